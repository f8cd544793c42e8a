"""A compiled pipeline by its parts, as tests ask for them."""

from pathlib import Path

from pipelines.images import ENVIRONMENT_OF_STEP
from pipelines.package import read_places
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
    def num_pods(self) -> int:
        """Pods of a run in which every step runs: Kubeflow drives each group and each step, and executes each step."""
        components = [self.spec["components"][task["componentRef"]["name"]] for task, _ in self.tasks.values()]
        return 1 + sum(1 if "dag" in component else 2 for component in components)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Producer and consumer of each artifact that a step takes."""
        found = []
        for step in STEPS:
            for given in self.task(step)["inputs"].get("artifacts", {}).values():
                if "taskOutputArtifact" in given:
                    producer = given["taskOutputArtifact"]["producerTask"]
                else:  # through a group, which names its input after the task and its output
                    producer = given["componentInputArtifact"].removeprefix("pipelinechannel--").partition("-")[0]
                found.append((producer, step))
        return found

    @property
    def places(self) -> dict:
        """Folders and servers that it names."""
        return read_places(self.path)

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
