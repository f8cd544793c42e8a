# make demo   the whole loop on this machine, once
# make test   every test, each in the environment of its image
# make check  style, types, dependency arrows, compiled pipeline
# Each builds the environments that it needs, once; later calls take what is there while the locks are unchanged.

PYTHON ?= python3.11
DRIVER := .venvs/driver/bin/python
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help environments demo test check golden format lock clean

help:
	@sed -n 's/^# //p' Makefile

environments:
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' is not a working Python 3.11 with venv; install it or say 'make PYTHON=/path/to/python3.11 ...'" >&2; exit 2; }
	@$(PYTHON) pipelines/local/environments.py

# DATA=<file or folder> takes your own Criteo rows instead of the simulated ones.
demo: environments
	@exec $(DRIVER) -m pipelines demo $(if $(DATA),--data "$(DATA)") $(DEMO_FLAGS)

test: environments
	@exec $(DRIVER) tests/everywhere.py $(TEST_FLAGS)

check: environments
	$(DRIVER) -m ruff check .
	$(DRIVER) -m ruff format --check .
	$(DRIVER) -m mypy
	.venvs/driver/bin/lint-imports
	$(DRIVER) -m pipelines compile --output build/check/retraining.yaml
	@cmp build/check/retraining.yaml tests/pipelines/golden/retraining.yaml || { \
	  echo "error: the compiled pipeline changed; if that is meant: make golden" >&2; exit 1; }

golden: environments
	$(DRIVER) -m pipelines compile --output tests/pipelines/golden/retraining.yaml

format: environments
	$(DRIVER) -m ruff check --fix .
	$(DRIVER) -m ruff format .

lock:
	$(PYTHON) requirements/lock.py $(or $(ENVIRONMENT),driver validation preprocessing training serving)

clean:
	rm -rf build .venvs
