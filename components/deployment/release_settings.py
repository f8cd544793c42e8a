"""What a release is told: where it goes, how the version is served, how patient it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from components.deployment.repository.triton_config import CPU, PYTHON, ServingOptions
from components.deployment.servers import Patience
from components.deployment.site import SiteSettings, no_checkpoint, utc_now
from components.runtime.errors import ContractError
from components.runtime.people import whoami


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings:
    """Where a release goes, and how patiently."""

    store: Path
    """The model store."""
    repository: str
    """URI of Triton's model repository, as this process sees it."""
    triton_urls: tuple[str, ...] = ()
    """Running servers, see `discovery`; none = publish only, servers read it when they start."""
    server: str = PYTHON
    """`python` or `onnxruntime`, see `repository.triton_config`."""
    device: str = CPU
    """`cpu` or `gpu` (a MIG slice is a GPU), for `onnxruntime`."""
    instances: int = 2
    """Copies of the model that work side by side in each server."""
    response_cache: bool = False
    """Whether servers that have a response cache may answer from it."""
    target_memory: str = ""
    """Memory or MIG slice that the model must fit in, see `memory.check_fits`; empty = not checked."""
    trigger_id: str | None = None
    """The retrain request that this answers."""
    who: str = field(default_factory=whoami)
    """The pipeline run or person that asks, for the journal."""
    num_kept: int = 3
    """Versions kept in the repository, the live and the previous one among them."""
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], datetime] = utc_now
    checkpoint: Callable[[str], None] = no_checkpoint
    """See `SiteSettings`."""

    def __post_init__(self) -> None:
        """Refuses settings that no release has."""
        _ = self.options
        if self.num_kept < 2:
            raise ContractError(f"num_kept is {self.num_kept}, expected at least 2 (live and previous)")

    @property
    def site(self) -> SiteSettings:
        """The place to open."""
        return SiteSettings(
            store=self.store,
            repository=self.repository,
            triton_urls=self.triton_urls,
            who=self.who,
            patience=self.patience,
            clock=self.clock,
            checkpoint=self.checkpoint,
        )

    @property
    def options(self) -> ServingOptions:
        """How the version is served."""
        return ServingOptions(
            server=self.server, device=self.device, instances=self.instances, response_cache=self.response_cache
        )
