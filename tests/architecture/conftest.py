"""Fixtures with images and containers, for the tests of `make test-images`."""

from tests.support.containers import images, podman, volume  # noqa: F401  fixtures
