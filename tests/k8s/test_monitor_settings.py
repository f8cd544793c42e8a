"""Tests of the monitor's manifests against its code: settings, volumes and ports."""

import re

import pytest

from evergreen.config.reader import build_parser, read_settings
from evergreen.events.locations import SCHEMES
from evergreen.events.urls import LogUrl
from evergreen.registry.promotion_journal import findings_path
from evergreen.runtime.kubeflow import TOKEN_PATH
from monitoring.retraining.triggers import REQUEST_TIMEOUT_SECONDS
from monitoring.settings import ENVIRONMENT_PREFIX, InstallationSettings
from monitoring.uploader import ENVIRONMENT_PREFIX as UPLOADER_PREFIX
from monitoring.uploader import UploaderSettings
from monitoring.web.exposition import STALL_SECONDS
from pipelines.retraining import PIPELINE_NAME
from testing.paths import REPOSITORY
from tests.k8s.environment import command, container, environment_of, volume_at
from tests.k8s.pod import triton_container, variables
from tests.support.rendering import Manifest, find, workloads

CASES = ("cpu", "gke", "gke-mig", "gke+webhook", "cpu+webhook+kubeflow-network+kubeflow-multi-user")


@pytest.fixture(params=CASES)
def manifests(request, rendered) -> list[Manifest]:
    return rendered(request.param)


@pytest.fixture
def monitor(manifests) -> Manifest:
    return find(manifests, "Deployment", "monitor")


def read(settings, variables: dict[str, str], prefix: str = ENVIRONMENT_PREFIX):
    return read_settings(
        settings,
        build_parser(settings, prog="x", description="").parse_args([]),
        environment=variables,
        prefix=prefix,
    )


@pytest.fixture
def settings(manifests, monitor) -> InstallationSettings:
    """Settings, parsed by the monitor's own parser from the manifest's environment."""
    return read(InstallationSettings, environment_of(manifests, monitor, "monitor"))


@pytest.fixture
def uploader(manifests, monitor) -> UploaderSettings:
    return read(
        UploaderSettings, environment_of(manifests, monitor, "uploader"), prefix=UPLOADER_PREFIX
    )


def test_pod_has_what_two_processes_need(monitor, settings, uploader):
    spec = monitor["spec"]["template"]["spec"]
    assert settings.actions.trigger == "kubeflow"
    assert uploader.archive == settings.archive
    assert settings.log_format == uploader.log_format == "json"
    # A variable set in a container would override the ConfigMap's.
    for name in ("monitor", "uploader"):
        assert not [
            e["name"] for e in container(monitor, name)["env"] if e["name"].startswith("EVERGREEN_")
        ]
    # Kubernetes sets variables for each Service. The monitor would refuse the variable
    # EVERGREEN_MONITOR_SERVICE_HOST at its start.
    assert spec["enableServiceLinks"] is False
    # A rolling update would start the new pod first, which could not mount the disk on another
    # node.
    assert (monitor["spec"]["strategy"], monitor["spec"]["replicas"]) == ({"type": "Recreate"}, 1)
    assert spec["terminationGracePeriodSeconds"] > 2 * sum(REQUEST_TIMEOUT_SECONDS)
    assert (
        len({container(monitor, name)["image"] for name in ("folders", "monitor", "uploader")}) == 1
    )
    with pytest.raises(LookupError):  # The uploader gets no token.
        volume_at(monitor, "uploader", TOKEN_PATH)


def test_every_folder_is_on_volume_of_required_kind(monitor, settings, uploader):
    own, share = "monitor-state", "evergreen"
    baking = findings_path(settings.store, 1)
    claims_by_path = [
        ("monitor", settings.state, own),
        ("monitor", settings.archive, own),
        ("monitor", baking, share),
    ]
    claims_by_path += [("uploader", uploader.archive, own), ("monitor", settings.store, share)]
    if not uploader.lake.startswith("gs://"):
        claims_by_path += [("uploader", uploader.lake, share)]
    for name, path, claim in claims_by_path:
        volume, is_writable = volume_at(monitor, name, str(path))
        assert volume["persistentVolumeClaim"]["claimName"] == claim, path
        assert is_writable == (path != settings.store), path


def runs_namespace(settings) -> str:
    """Return the namespace of the pipeline's pods: either Kubeflow's or the profile's namespace."""
    return settings.actions.kubeflow.kubeflow_namespace or "kubeflow"


def test_both_claims_use_one_share_that_outlives_them(manifests, settings):
    volumes = {
        m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "PersistentVolume"
    }
    claims = [
        m
        for m in manifests
        if m["kind"] == "PersistentVolumeClaim" and m["metadata"]["name"] == "evergreen"
    ]
    assert sorted(c["metadata"]["namespace"] for c in claims) == [
        "evergreen",
        runs_namespace(settings),
    ]
    (state,) = [m for m in manifests if m["kind"] == "PersistentVolumeClaim" and m not in claims]
    assert (state["metadata"]["name"], state["spec"]["accessModes"]) == (
        "monitor-state",
        ["ReadWriteOnce"],
    )
    sources = []
    for claim in claims:
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        volume = volumes[claim["spec"]["volumeName"]]
        assert volume["claimRef"]["namespace"] == claim["metadata"]["namespace"]
        assert volume["claimRef"]["name"] == "evergreen"
        # A claim with the storage class "" uses no storage class. The API server deletes the
        # storage class "" from a volume. If the manifest's volume had it, each apply would report a
        # change.
        assert claim["spec"]["storageClassName"] == ""
        assert "storageClassName" not in volume
        assert volume["accessModes"] == claim["spec"]["accessModes"]
        assert volume["capacity"] == claim["spec"]["resources"]["requests"]
        assert volume["persistentVolumeReclaimPolicy"] == "Retain"
        sources.append(volume.get("csi") or volume["nfs"])
    assert sources[0] == sources[1]
    if sources[0].get("driver") == "filestore.csi.storage.gke.io":
        mode, zone, instance, share = sources[0]["volumeHandle"].split("/")
        assert (mode, share) == ("modeInstance", sources[0]["volumeAttributes"]["volume"])
        assert zone
        assert instance
        assert sources[0]["volumeAttributes"]["ip"]


def test_pages_are_at_one_port_everywhere(manifests, monitor, settings):
    (port,) = container(monitor, "monitor")["ports"]
    (served,) = find(manifests, "Service", "monitor")["spec"]["ports"]
    assert settings.http.http_port == port["containerPort"] == served["port"]
    assert served["targetPort"] == port["name"]
    # Probes and Prometheus connect from other machines.
    assert settings.http.http_host == "0.0.0.0"


def test_stuck_loop_is_restarted_and_unreachable_log_is_not(monitor):
    probes = container(monitor, "monitor")
    for name in ("startupProbe", "livenessProbe"):
        assert probes[name]["httpGet"]["path"] == "/healthz", name
    assert probes["readinessProbe"]["httpGet"]["path"] == "/readyz"
    # The process detects a stuck loop with its own timeout. The probes must allow for a slow start.
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > STALL_SECONDS


def test_runs_are_requested_at_kubeflow_api_as_pipeline_account(manifests, settings):
    assert (
        settings.actions.kubeflow.kubeflow_host
        == "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
    )
    assert settings.actions.kubeflow.pipeline_name == PIPELINE_NAME
    account = find(manifests, "ServiceAccount", settings.actions.kubeflow.kubeflow_service_account)
    assert account["metadata"]["namespace"] == runs_namespace(settings)


def test_kubeflow_token_is_where_trigger_reads_it_and_has_no_other_use(monitor):
    volume, is_writable = volume_at(monitor, "monitor", TOKEN_PATH)
    (source,) = volume["projected"]["sources"]
    (mount,) = [
        m for m in container(monitor, "monitor")["volumeMounts"] if m["name"] == volume["name"]
    ]
    assert f"{mount['mountPath']}/{source['serviceAccountToken']['path']}" == TOKEN_PATH
    assert source["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org"
    assert not is_writable


def test_log_is_one_that_several_machines_reach(settings):
    log = LogUrl.parse(settings.log)
    assert log.scheme in set(SCHEMES) - {"sqlite"}
    assert log.authority
    assert log.path


def test_webhook_address_is_read_from_optional_secret_and_appears_nowhere(
    manifests, monitor, settings
):
    if not settings.actions.notifications.webhook_file:
        assert "evergreen-notifications" not in str(monitor)
        return
    volume, _ = volume_at(monitor, "monitor", settings.actions.notifications.webhook_file)
    assert volume["secret"] == {"secretName": "evergreen-notifications", "optional": True}
    assert not [m for m in manifests if m["kind"] == "Secret"]


def test_folders_of_share_are_created_before_use(monitor, settings, uploader):
    """An init container with the group of the share's root creates the folders.

    Pods of the pipeline do not belong to the group that owns the share's root.
    """
    made = command(monitor, "folders", "monitoring/Dockerfile")
    assert made[:2] == ["mkdir", "-p"]
    baking = str(findings_path(settings.store, 1).parent)
    assert set(made[2:]) == {
        baking,
        "/evergreen/lake",
        "/evergreen/work",
        "/evergreen/repository",
        str(settings.archive),
    }
    assert uploader.lake in made or uploader.lake.startswith("gs://")
    user = monitor["spec"]["template"]["spec"]["securityContext"]
    assert (user["runAsUser"], user["fsGroup"]) == (10001, 10001)


def test_monitor_and_uploader_reach_only_what_they_need(variant):
    """A compromised monitor must not write journal, models or repository.

    A compromised uploader must not read journal, models or repository.
    """
    found = [
        each
        for each, spec in workloads(variant)
        if {c["name"] for c in spec["containers"]} >= {"monitor", "uploader"}
    ]
    assert found
    for workload in found:
        settings = read(InstallationSettings, environment_of(variant, workload, "monitor"))
        mounts = {
            name: container(workload, name)["volumeMounts"] for name in ("monitor", "uploader")
        }
        volumes = {each["name"]: each for each in workload["spec"]["template"]["spec"]["volumes"]}
        claims = {
            name: each.get("persistentVolumeClaim", {}).get("claimName")
            for name, each in volumes.items()
        }
        shared = {name for name, claim in claims.items() if claim == "evergreen"}
        of_share = {
            name: {
                m["mountPath"]: (m["subPath"], not m.get("readOnly", False))
                for m in each
                if m["name"] in shared
            }
            for name, each in mounts.items()
        }
        store, baking = settings.store, findings_path(settings.store, 1).parent
        lake = store.with_name("lake")
        within = {folder: str(folder.relative_to("/evergreen")) for folder in (store, baking, lake)}
        assert of_share["monitor"] == {
            str(store): (within[store], False),
            str(baking): (within[baking], True),
            str(lake): (within[lake], False),
        }
        assert of_share["uploader"] == {str(lake): (within[lake], True)}
        (disk,) = [m for m in mounts["uploader"] if m["mountPath"].startswith("/var/lib/evergreen")]
        assert (disk["mountPath"], disk["subPath"]) == (str(settings.archive), "archive")
        # The folder of a subPath must exist. The user that writes to the folder must also have
        # created it.
        made = command(workload, "folders", "monitoring/Dockerfile")[2:]
        assert {str(baking), str(lake), str(settings.archive)} <= set(made)


def test_second_recommender_has_own_log_disk_registry_lake_on_one_triton(rendered):
    objects = rendered("cpu+second-recommender")
    claims_by_path = []
    for suffix in ("", "-shop"):
        monitor = find(objects, "Deployment", f"monitor{suffix}")
        settings = read(InstallationSettings, environment_of(objects, monitor, "monitor"))
        uploader = read(
            UploaderSettings, environment_of(objects, monitor, "uploader"), prefix=UPLOADER_PREFIX
        )
        disk, _ = volume_at(monitor, "monitor", str(settings.state))
        claim = disk["persistentVolumeClaim"]["claimName"]
        claims_by_path.append(
            {
                settings.log,
                str(settings.store),
                uploader.lake,
                claim,
                settings.actions.kubeflow.kubeflow_experiment,
            }
        )
        controller = container(
            find(objects, "Deployment", f"release-controller{suffix}"), "release-controller"
        )
        assert f"--store={settings.store}" in controller["args"]
        assert variables(objects, controller)["LAKE"] == uploader.lake
    assert [len(each) for each in claims_by_path] == [5, 5]
    assert claims_by_path[0].isdisjoint(claims_by_path[1])
    text = (REPOSITORY / "k8s/components/second-recommender/shop/shop.env").read_text()
    compiled = dict(re.findall(r"--(store|lake|work) (\S+)", text))
    assert compiled == {
        "store": str(settings.store),
        "lake": uploader.lake,
        "work": "/evergreen/shop/work",
    }
    assert f"--pipeline {settings.actions.kubeflow.pipeline_name} " in text
    assert settings.actions.kubeflow.pipeline_name != PIPELINE_NAME
    loaded = [
        each for each in triton_container(objects)["args"] if each.startswith("--load-model=")
    ]
    assert loaded == [
        f"--load-model={n}" for name in ("$(RECOMMENDER)", "shop") for n in (name, f"{name}_canary")
    ]


def test_each_archiver_has_own_partition_and_disk_and_rest_is_monitors(rendered):
    objects = rendered("cpu+archivers")
    archivers, monitor = (
        find(objects, "StatefulSet", "archivers"),
        find(objects, "Deployment", "monitor"),
    )
    spec = archivers["spec"]
    assert (spec["ordinals"]["start"], spec["podManagementPolicy"]) == (1, "Parallel")
    variables = {each["name"]: each for each in container(archivers, "monitor")["env"]}
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    assert variables.pop("EVERGREEN_MONITOR_PARTITION")["valueFrom"] == index
    for name in ("monitor", "uploader"):
        assert environment_of(objects, archivers, name) == environment_of(objects, monitor, name)
    settings = read(InstallationSettings, environment_of(objects, archivers, "monitor"))
    (claim,) = spec["volumeClaimTemplates"]
    mounts = {
        each["mountPath"]: each["name"] for each in container(archivers, "monitor")["volumeMounts"]
    }
    (mount,) = [path for path, name in mounts.items() if name == claim["metadata"]["name"]]
    assert all(folder.is_relative_to(mount) for folder in (settings.state, settings.archive))
    # The selectors of the monitor's Service and Deployment do not match an archiver.
    labels = spec["template"]["metadata"]["labels"]
    for selector in (
        find(objects, "Service", "monitor")["spec"]["selector"],
        monitor["spec"]["selector"]["matchLabels"],
    ):
        assert not selector.items() <= labels.items()
    assert spec["selector"]["matchLabels"].items() <= labels.items()
