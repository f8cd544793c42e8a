"""The parts of a compiled pipeline, for tests."""

from pathlib import Path

from pipelines.images import ENVIRONMENT_OF_STEP
from pipelines.package import read_locations
from tests.support.yaml_texts import documents

STEPS = tuple(ENVIRONMENT_OF_STEP)


class Compiled:
    """One compiled pipeline file and its parts."""

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
    def num_pods(self) -> int:
        """Return the number of pods of a run that executes every step.

        Kubeflow starts a driver for each group and each step, and an executor for each step.
        """
        components = [
            self.spec["components"][task["componentRef"]["name"]] for task, _ in self.tasks.values()
        ]
        return 1 + sum(1 if "dag" in component else 2 for component in components)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Return the producer and the consumer of each input artifact."""
        found = []
        for step in STEPS:
            for given in self.task(step)["inputs"].get("artifacts", {}).values():
                if "taskOutputArtifact" in given:
                    producer = given["taskOutputArtifact"]["producerTask"]
                else:  # inside a group, the input's name contains the producing task
                    producer = (
                        given["componentInputArtifact"]
                        .removeprefix("pipelinechannel--")
                        .partition("-")[0]
                    )
                found.append((producer, step))
        return found

    @property
    def locations(self) -> dict:
        """Return the folders and servers that the pipeline names."""
        return read_locations(self.path)

    def executor(self, step: str) -> dict:
        return self.spec["deploymentSpec"]["executors"][f"exec-{dashed(step)}"]["container"]

    def platform(self, step: str) -> dict:
        return self.kubernetes[f"exec-{dashed(step)}"]

    def task(self, step: str) -> dict:
        return self.tasks[dashed(step)][0]

    def owner(self, task: str) -> str:
        """Return the component whose graph contains `task`."""
        return self.tasks[task][1]


def dashed(step: str) -> str:
    return step.replace("_", "-")
