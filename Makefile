# make demo   the whole loop on this machine, once
# make test   every test, each in the environment of its image
# make test-images  builds the images with podman, runs the pipeline in them, plays the cpu overlay (root, podman, runc, mmdebstrap, kubectl)
# make coverage  the tests again, with the share of the product's branches that they run (twice the time; no gate)
# make test-core  tests of the core and the client on another Python: PYTHON=python3.13
# make check  style, types, dependency arrows, compiled pipeline, manifests
# make manifests            what each overlay sends to a cluster, in build/manifests (needs kubectl)
# make images               every image, tagged by git revision, with docker or podman (REGISTRY=... PUSH=1 DIRTY=1 DRY_RUN=1)
# make sbom                 what each image installs from our locks, as CycloneDX in build/sbom
# make audit                which locked packages have known vulnerabilities, as a report (asks PyPI, else OSV)
# make kind               the demo on a Kubernetes cluster of this machine (Docker, kind, kubectl; docs/kubernetes/kind.md)
# make wheel              core, client and command line as one wheel, in build/wheels (CONTRIBUTING.md)
# make client-wheel         the inference client as one wheel for other services, in build/wheels (docs/guides/log-from-your-service.md)
# make benchmarks         every benchmark in turn, unattended; a second call goes on (BENCHMARK_FLAGS=--quick: an hour or two, else a night)
# make benchmark-training   one of them beside its named peers, anew; `python -m benchmarks --help` names all (BENCHMARK_FLAGS=--quick: minutes)
# make performance        docs/design/performance.md of what was measured
# make docs               the documentation site, in build/site
# make gpu                what only a GPU can show, in at most nine minutes; a second call goes on (GPU_FLAGS=--quick: tiny, also without a GPU)
# Each builds the environments that it needs, once; later calls take what is there while the locks are unchanged.

PYTHON ?= python3.11
DRIVER := .venvs/driver/bin/python
# Turns off telemetry, which ONNX Runtime's wheels send by default (evergreen/runtime/onnx_runtime.py).
export ORT_DISABLE_TELEMETRY := 1
# Python writes bytecode, even if a container's environment turns it off, because each step and each part of the tests
# is a new process.
unexport PYTHONDONTWRITEBYTECODE
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help python environments demo test test-core test-images coverage check manifests images sbom audit kind wheel client-wheel benchmarks performance docs screenshots gpu golden \
	format lock clean

help:
	@sed -n 's/^# //p' Makefile

python:
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' is not a working Python 3.11 with venv; install it or say 'make PYTHON=/path/to/python3.11 ...'" >&2; exit 2; }

ENVIRONMENTS ?= driver validation preprocessing training serving

# Builds two environments at a time. A second `make` waits for the lock and then has nothing to do. The file `built` in
# an environment has a digest of its locks. The environment is built again when the locks change, or when its
# interpreter is missing, for example after an upgrade of the system. File times are not compared, because all files of
# a fresh clone are new.
environments: python
	@mkdir -p .venvs
	@flock .venvs/lock $(SHELL) -c 'for name in $(ENVIRONMENTS); do \
	  [ "$$(cat .venvs/$$name/built 2>/dev/null)" = "$$($(MAKE) -s --no-print-directory digest-$$name)" ] && \
	  .venvs/$$name/bin/python -c "" 2>/dev/null || rm -f .venvs/$$name/built; done; \
	  $(MAKE) -s --no-print-directory -j2 $(ENVIRONMENTS:%=.venvs/%/built)'

LOCKS_OF = requirements/$(1).lock $(wildcard requirements/$(1).test.lock) requirements/torch.txt
digest-%:
	@cat $(call LOCKS_OF,$*) | sha256sum | cut -d " " -f 1

# Every package is pinned by its hash except torch (requirements/torch.txt). `built` is written last.
.venvs/%/built:
	@echo "building environment $* (log: .venvs/$*.log)"
	@{ rm -rf .venvs/$* && $(PYTHON) -m venv .venvs/$* && \
	  install=".venvs/$*/bin/python -m pip install --disable-pip-version-check" && \
	  $$install --no-deps --require-hashes $(patsubst %,-r %,$(filter %.lock,$(call LOCKS_OF,$*))) && \
	  case $* in \
	    training|benchmarks) $$install -r requirements/torch.txt;; \
	    driver) $$install --no-deps --no-build-isolation -e .;; \
	  esac; } > .venvs/$*.log 2>&1 || { tail -n 5 .venvs/$*.log >&2; \
	  echo "error: environment $* could not be built, see .venvs/$*.log" >&2; exit 1; }
	@$(MAKE) -s --no-print-directory digest-$* > $@

# WORLD is the first name of EXAMPLE.
EXAMPLE ?= $(WORLD)

# DATA=<file or folder> replaces the simulated rows by your own rows. RECOMMENDER=<file> describes their columns.
# Without RECOMMENDER, Criteo's columns are recognized, and a file for other columns is drafted. EXAMPLE=shop uses the
# rows of a simulated shop (examples/shop). LOG=pubsub stores the records in Google's Pub/Sub emulator (if the Cloud SDK
# has it), and LOG=kafka in librdkafka's mock cluster, instead of an SQLite file.
demo: environments
	@$(if $(EXAMPLE),$(DRIVER) -m examples.$(EXAMPLE).simulator --output build/$(EXAMPLE)/clicks.parquet &&) \
	  exec $(DRIVER) -m cli demo $(if $(DATA),--data "$(DATA)") \
	  $(if $(EXAMPLE),--data build/$(EXAMPLE)/clicks.parquet --recommender examples/$(EXAMPLE)/recommender.yaml) \
	  $(if $(RECOMMENDER),--recommender "$(RECOMMENDER)") $(if $(LOG),--log "$(LOG)") $(DEMO_FLAGS)

test: environments
	@exec $(DRIVER) -m tests.everywhere $(TEST_FLAGS)

# The coverage leaves out programs that the tests start. The exit code is that of the tests.
coverage: environments
	@$(MAKE) --no-print-directory environments ENVIRONMENTS=coverage
	@rm -rf build/coverage; code=0; EVERGREEN_COVERAGE=1 $(DRIVER) -m tests.everywhere $(TEST_FLAGS) || code=$$?; \
	  report="$(DRIVER:driver/%=coverage/%) -m coverage"; $$report combine --quiet && \
	  $$report report > build/coverage/report.txt && $$report report --format=total > build/coverage/total.txt && \
	  echo "branch coverage of product code: $$(cat build/coverage/total.txt) %, see build/coverage/report.txt"; exit $$code

# Runs in an environment of the given Python. The environment is called `driver`, because tests of the driver run in it.
CORE_TESTS := $(addprefix tests/evergreen/,config contracts recommender_file registry rows runtime statistics storage) \
	tests/inference_client
test-core:
	@rm -rf build/core build/lib; $(PYTHON) -m venv build/core/driver && build/core/driver/bin/python -m pip install --quiet \
	  --disable-pip-version-check ".[gcs,kafka,pubsub,serving,test]" && rm -rf build/lib && \
	  exec build/core/driver/bin/python -m pytest -q -m "not slow and not e2e" $(CORE_TESTS) $(TEST_FLAGS)

test-images: environments
	@exec $(DRIVER) -m pytest -q -s -m images -o faulthandler_timeout=5400 \
	  tests/architecture/test_containers.py tests/architecture/test_played_overlay.py $(TEST_FLAGS)

# TESTS=follow skips the tests of the manifests here, because a later `make test` includes them.
check: environments
	$(DRIVER) -m ruff check .
	$(DRIVER) -m ruff format --check .
	$(DRIVER) -m mypy
	$(DRIVER) -m tools.prose_lint
	git ls-files -z | xargs -0 .venvs/driver/bin/codespell
	.venvs/driver/bin/lint-imports
	$(DRIVER) -m cli compile --output build/check/retraining.yaml
	@cmp build/check/retraining.yaml tests/pipelines/golden/retraining.yaml || { \
	  echo "error: the compiled pipeline changed; if that is meant: make golden" >&2; exit 1; }
	$(if $(filter follow,$(TESTS)),,$(DRIVER) -m pytest -q tests/k8s -m "not e2e and not slow")

# Writes each rendering to a temporary file and renames it, so that a failed rendering leaves no partial file. Lists the
# placeholders that are not filled in.
manifests:
	@command -v kubectl >/dev/null || { echo "error: kubectl renders the manifests and is not installed" >&2; exit 2; }
	@mkdir -p build/manifests; for folder in k8s/overlays/*/; do overlay=$$(basename "$$folder"); \
	  kubectl kustomize "$$folder" > "build/manifests/.$$overlay" || exit 1; \
	  mv "build/manifests/.$$overlay" "build/manifests/$$overlay.yaml"; \
	  echo "build/manifests/$$overlay.yaml: $$(grep -c '^kind:' "build/manifests/$$overlay.yaml") objects"; \
	  ! grep -Eq '^[A-Z_]+=($$|.*my-)' "$${folder}cluster.env" || \
	    echo "  to be filled in, in $${folder}cluster.env: $$(grep -Eo '^[A-Z_]+=($$|.*my-[a-z-]*)' "$${folder}cluster.env" | tr '\n' ' ')"; done

# IMAGES="training monitoring" selects images. TAG= and REVISION= replace git's revision. ENGINE=podman selects the
# engine.
images: python
	@$(PYTHON) -m tools.build_images $(IMAGES) $(if $(REGISTRY),--registry "$(REGISTRY)") $(if $(TAG),--tag "$(TAG)") \
	  $(if $(REVISION),--revision "$(REVISION)") $(if $(SOURCE),--source "$(SOURCE)") $(if $(ENGINE),--engine "$(ENGINE)") \
	  $(if $(PUSH),--push) $(if $(DIRTY),--dirty) $(if $(DRY_RUN),--dry-run)

# The lock of an image is the one that its Dockerfile installs. The list has no packages of NVIDIA's base image or
# Debian.
sbom: python
	@$(MAKE) --no-print-directory environments ENVIRONMENTS=audit
	@mkdir -p build/sbom; for file in components/*/Dockerfile* demo/simulation/Dockerfile monitoring/Dockerfile; do \
	  image=$$(sed -n 's/.*image.title="\(.*\)".*/\1/p' "$$file"); \
	  sed -n 's/^COPY \(requirements\/[^ ]*\) .*/\1/p' "$$file" | xargs cat > build/sbom/requirements.txt || exit 1; \
	  .venvs/audit/bin/cyclonedx-py requirements --output-reproducible -o "build/sbom/$$image.json" build/sbom/requirements.txt || exit 1; \
	  echo "build/sbom/$$image.json: $$(grep -c '"purl"' "build/sbom/$$image.json") packages"; done

audit: python
	@$(MAKE) --no-print-directory environments ENVIRONMENTS=audit
	@.ci/audit

kind: python
	@$(MAKE) --no-print-directory environments ENVIRONMENTS=driver
	@exec k8s/kind/up

# The folder build/lib of an earlier call would bring removed modules into the wheel.
wheel: python
	@$(MAKE) --no-print-directory environments ENVIRONMENTS=driver
	@rm -rf build/lib build/bdist.*; $(DRIVER) -m pip wheel --quiet --no-deps --no-index --no-build-isolation \
	  --disable-pip-version-check --wheel-dir build/wheels . && rm -rf build/lib build/bdist.* && ls build/wheels/evergreen-[0-9]*.whl

client-wheel: python
	@$(MAKE) --no-print-directory environments ENVIRONMENTS=driver
	@exec $(DRIVER) -m tools.client_wheel --output build/wheels

PEERS_training := benchmarks
PEERS_quality := benchmarks
PEERS_serving := serving-peers
benchmarks: python
	@$(MAKE) --no-print-directory environments ENVIRONMENTS="$(ENVIRONMENTS) benchmarks serving-peers"
	@exec $(DRIVER) -m benchmarks $(BENCHMARK_FLAGS)

benchmark-%: python
	@$(MAKE) --no-print-directory environments ENVIRONMENTS="$(ENVIRONMENTS) $(PEERS_$*)"
	@exec $(DRIVER) -m benchmarks $* --again $(BENCHMARK_FLAGS)

performance: environments
	@exec $(DRIVER) -m benchmarks.page

# Treats each warning as an error, such as a link to a missing page or heading.
docs: python
	@$(MAKE) --no-print-directory environments ENVIRONMENTS=docs
	@exec .venvs/docs/bin/zensical build --strict --config-file mkdocs.yml

# Takes the pictures of README.md from the pages of a finished demo. Needs chromium.
screenshots:
	@exec $(DRIVER) -m tools.screenshots

# Uses torch's CUDA wheel and the packages installed beside it. PYTHON_GPU= selects the interpreter.
PYTHON_GPU ?= .venvs/training/bin/python
gpu:
	@exec $(PYTHON_GPU) -m benchmarks.gpu $(GPU_FLAGS)

golden: environments
	$(DRIVER) -m cli compile --output tests/pipelines/golden/retraining.yaml
	$(DRIVER) -m cli.reference_pages
	$(DRIVER) -m evergreen.recommender_file.json_schema > docs/reference/recommender.schema.json
	$(DRIVER) -m cli data records examples/shop/recommender.yaml > docs/reference/records.proto

format: environments
	$(DRIVER) -m ruff check --fix .
	$(DRIVER) -m ruff format .

# For maintainers: resolves a lock with hashes again after an edit of its .in file. The packages of `X.no-deps.in` are
# installed without their dependencies, the packages of `X.excludes` are left out, and `X-trixie` is for Debian 13's
# glibc.
LOCKS := driver validation validation-trixie preprocessing training serving export search benchmarks serving-peers audit docs coverage
lock:
	@cd requirements; \
	compile="../.venvs/driver/bin/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command"; \
	for name in $(or $(ENVIRONMENT),$(LOCKS)); do \
	  options=""; [ ! -f $$name.excludes ] || options="--excludes $$name.excludes"; \
	  case $$name in *-trixie) options="$$options --python-platform x86_64-manylinux_2_39";; esac; \
	  $$compile "make lock ENVIRONMENT=$$name" $$options $$name.in -o $$name.lock || exit 1; \
	  [ ! -f $$name.test.in ] || $$compile "make lock ENVIRONMENT=$$name" $$name.test.in -c $$name.lock -o $$name.test.lock || exit 1; \
	  [ ! -f $$name.test.no-deps.in ] || $$compile "" --no-header --no-deps $$name.test.no-deps.in >> $$name.test.lock || exit 1; \
	  [ ! -f $$name.no-deps.in ] || $$compile "" --no-header --no-deps $$name.no-deps.in >> $$name.lock || exit 1; \
	done

clean:
	rm -rf build .venvs
