"""Run pipeline steps as forks of processes with imported libraries (`testing.warm`).

The chain's first round uses plain commands, so that the tests also cover a start without a fork.
"""

from contextlib import ExitStack
from pathlib import Path

from demo.environments import python_of
from pipelines.images import ENVIRONMENT_OF_STEP
from testing.warm import Warm

IMPORTS = {
    "driver": "import evergreen.serving.prepare, components.extraction.extract, "
    "components.extraction.lake_files",
    "preprocessing": "import components.preprocessing.preprocess",
    "training": "import components.evaluation.evaluate, components.training.pytorch.engine, "
    "components.training.step",
    "validation": "import components.validation.validate",
}
"""Modules that the steps of each environment import after parsing their arguments."""
STEP = "import runpy; runpy.run_module('components.{}', run_name='__main__', alter_sys=True)"


class WarmSteps:
    """Context manager that starts one waiting process for each environment.

    The end of the context kills these processes.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._known: dict[str, Warm] = {}

    def __enter__(self) -> "WarmSteps":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self, step: str, arguments: list[str], *, variables: dict[str, str], folder: Path
    ) -> tuple[int, str]:
        """Run the step's command with `arguments`, and return its exit code and its output."""
        return self.of(step, variables).run(
            STEP.format(step), arguments, variables=variables, folder=folder
        )

    def of(self, step: str, variables: dict[str, str]) -> Warm:
        """Return the waiting process of the step's environment.

        If the process does not exist yet, it is started with the environment variables `variables`.
        """
        name = ENVIRONMENT_OF_STEP[step]
        if name not in self._known:
            self._known[name] = self._stack.enter_context(
                Warm(python_of(name), IMPORTS[name], variables)
            )
        return self._known[name]
