"""A compiled pipeline by its parts, as tests ask for them."""

from pathlib import Path

from pipelines.images import ENVIRONMENT_OF_STEP
from tests.support.yaml_texts import documents

STEPS = tuple(ENVIRONMENT_OF_STEP)


class Compiled:
    """One compiled file, by its parts."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text()
        self.spec, platform = documents(self.text)
        self.kubernetes = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        self.tasks = {
            name: (task, owner)
            for owner, dag in [("root", self.spec["root"]), *self.spec["components"].items()]
            for name, task in dag.get("dag", {}).get("tasks", {}).items()
        }

    @property
    def defaults(self) -> dict:
        """Defaults of the pipeline's parameters."""
        inputs = self.spec["root"]["inputDefinitions"]["parameters"]
        return {name: parameter["defaultValue"] for name, parameter in inputs.items()}

    def executor(self, step: str) -> dict:
        return self.spec["deploymentSpec"]["executors"][f"exec-{dashed(step)}"]["container"]

    def platform(self, step: str) -> dict:
        return self.kubernetes[f"exec-{dashed(step)}"]

    def task(self, step: str) -> dict:
        return self.tasks[dashed(step)][0]

    def owner(self, task: str) -> str:
        """The component whose graph holds `task`."""
        return self.tasks[task][1]


def dashed(step: str) -> str:
    return step.replace("_", "-")
