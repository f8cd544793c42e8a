"""Each overlay's manifests, rendered once a session and stored in `build/manifests/`."""

import pytest

from tests.support.rendering import OVERLAYS, RENDERED, VARIANTS, Manifest, render_variant
from tests.support.yaml_texts import documents


@pytest.fixture(scope="session")
def rendered(tmp_path_factory):
    """`rendered(overlay or variant)` returns its objects, rendered once a session."""
    known: dict[str, list[Manifest]] = {}
    scratch = tmp_path_factory.mktemp("kustomizations")

    def objects(variant: str) -> list[Manifest]:
        if variant not in known:
            text = render_variant(variant, scratch)
            RENDERED.mkdir(parents=True, exist_ok=True)
            (RENDERED / f"{variant}.yaml").write_text(text)
            known[variant] = documents(text)
        return known[variant]

    return objects


@pytest.fixture(params=OVERLAYS)
def overlay(request) -> str:
    """Runs the test once for each overlay."""
    return request.param


@pytest.fixture
def manifests(rendered, overlay) -> list[Manifest]:
    """The objects of one overlay."""
    return rendered(overlay)


@pytest.fixture(params=VARIANTS)
def variant(request, rendered) -> list[Manifest]:
    """Objects of each variant: overlays with and without optional components."""
    return rendered(request.param)
