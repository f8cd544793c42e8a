"""Checks that modules exist if docstrings, comments or pages name them in backticks."""

import pytest

from testing.paths import REPOSITORY
from tests.support.module_names import missing_names, prose_of
from tests.support.sources import PACKAGES

FOLDERS = (*PACKAGES, "tests", "testing", "benchmarks", "docs", "examples", "k8s")
OTHERS = frozenset(
    {
        "evergreen.version",  # a label in the model registry
        "flags.output",
        "flags.train_job",
        "settings.access",
        "spec.groups",  # attributes of an argument, not modules
        "hugectr.Layer_t",
        "pubsub.subscriptions.get",  # a name of another project
        "model.data",  # name of a file
        "pipelines.googleusercontent.com",
        "pipelines.kubeflow.org",  # domains of web addresses
    }
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_named_in_prose_exist(folder):
    paths = [
        path
        for kind in ("py", "md", "yaml")
        for path in sorted((REPOSITORY / folder).rglob(f"*.{kind}"))
    ]
    assert paths
    faults = {
        path.relative_to(REPOSITORY).as_posix(): list(missing_names(prose_of(path), OTHERS))
        for path in paths
    }
    assert {path: names for path, names in faults.items() if names} == {}


def test_missing_module_is_found():
    text = (
        "See `runtime.errors`, `storage.objects.Objects.fetch`, `logs.nowhere`, "
        "`registry.nowhere` and `torch.nn`."
    )
    assert list(missing_names(text, OTHERS)) == ["registry.nowhere"]
