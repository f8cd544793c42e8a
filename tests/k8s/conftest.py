"""Each overlay's manifests, rendered once a session and kept in `build/manifests/`."""

from __future__ import annotations

import pytest
import yaml

from tests.k8s.rendering import K8S, OVERLAYS, RENDERED, Manifest, render


@pytest.fixture(scope="session")
def rendered():
    """`rendered(overlay)`: the objects of that overlay, each rendered once a session."""
    known: dict[str, list[Manifest]] = {}

    def objects(overlay: str) -> list[Manifest]:
        if overlay not in known:
            text = render(K8S / "overlays" / overlay)
            RENDERED.mkdir(parents=True, exist_ok=True)
            (RENDERED / f"{overlay}.yaml").write_text(text)
            known[overlay] = [m for m in yaml.safe_load_all(text) if m]
        return known[overlay]

    return objects


@pytest.fixture(params=OVERLAYS)
def overlay(request) -> str:
    """Each overlay in turn."""
    return request.param


@pytest.fixture
def manifests(rendered, overlay) -> list[Manifest]:
    """The objects of one overlay."""
    return rendered(overlay)
