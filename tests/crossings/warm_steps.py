"""The pipeline's steps, forked in their environments from processes that have their libraries (`support/warm.py`).

That a step also starts from nothing is shown by the chain's first round, which is run by plain commands.
"""

from contextlib import ExitStack
from pathlib import Path

from demo.environments import python_of
from pipelines.images import ENVIRONMENT_OF_STEP
from tests.support.warm import Warm

IMPORTS = {
    "driver": "import evergreen.serving.release, components.extraction.extract, components.extraction.lake_files",
    "preprocessing": "import components.preprocessing.preprocess",
    "training": "import components.evaluation.evaluate, components.training.pytorch.engine, components.training.step",
    "validation": "import components.validation.validate",
}
"""What the steps of an environment import once their arguments are read."""
STEP = "import runpy; runpy.run_module('components.{}', run_name='__main__', alter_sys=True)"


class WarmSteps:
    """One waiting process per environment, started when first asked for; a context, at whose end they are killed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._known: dict[str, Warm] = {}

    def __enter__(self) -> "WarmSteps":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, step: str, arguments: list[str], *, variables: dict[str, str], folder: Path) -> tuple[int, str]:
        """Exit code of the step's command with these arguments, and all that it said."""
        return self.of(step, variables).run(STEP.format(step), arguments, variables=variables, folder=folder)

    def of(self, step: str, variables: dict[str, str]) -> Warm:
        """The process that waits in the step's environment; started with `variables`, if it is not there yet."""
        name = ENVIRONMENT_OF_STEP[step]
        if name not in self._known:
            self._known[name] = self._stack.enter_context(Warm(python_of(name), IMPORTS[name], variables))
        return self._known[name]
