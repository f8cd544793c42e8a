"""A trace of some steps, for a browser's trace viewer: which operation ran when, on the CPU and on the GPU.

An engine around an engine, so that neither the fit nor the engine knows that it is watched.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.training.engine import Engine, Learned
from components.training.rows import Rows

logger = logging.getLogger(__name__)


class ProfiledEngine:
    """Does what the engine it is given does; the second and the following calls of `learn` are traced.

    The first call warms up and is left out. Whole calls are traced, so that the seeds stay those of an untraced fit: as
    many as make the steps asked for.
    """

    def __init__(self, engine: Engine, num_steps: int, path: Path) -> None:
        """Traces at least `num_steps` steps into the file `path` (Chrome's trace format)."""
        self._engine, self._steps_left, self._path = engine, num_steps, path
        self._is_warm = False
        self._trace: Any = None

    def __getattr__(self, name: str) -> Any:
        """Everything but `learn` and `close` is the engine's."""
        return getattr(self._engine, name)

    def learn(self, rows: Rows, order: NDArray[np.int64], *, batch_size: int, seed: int) -> Learned:
        """See `Engine`."""
        if not self._is_warm or self._steps_left <= 0:
            self._is_warm = True
            return self._engine.learn(rows, order, batch_size=batch_size, seed=seed)
        if self._trace is None:
            from torch.profiler import profile

            self._trace = profile()
            self._trace.start()
        learned = self._engine.learn(rows, order, batch_size=batch_size, seed=seed)
        self._steps_left -= -(-len(order) // batch_size)
        if self._steps_left <= 0:
            self._write_trace()
        return learned

    def close(self) -> None:
        """See `Engine`; a trace that the fit's end cut short is written nevertheless."""
        try:
            if self._trace is not None:
                self._write_trace()
            elif self._steps_left > 0:
                logger.warning("no trace was written: the engine learned in less than two calls")
        finally:
            self._engine.close()

    def _write_trace(self) -> None:
        # What was traced takes memory, and the fit goes on.
        trace, self._trace, self._steps_left = self._trace, None, 0
        trace.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(self._path))
        logger.info("trace written to %s", self._path)
