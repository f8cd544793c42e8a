"""Models and servers for tests of a real Triton."""

from pathlib import Path
from typing import Any

from evergreen.serving.repository.triton_config import ServingOptions, triton_config
from testing.recommenders import SHOP
from testing.served_names import MODEL_NAME

_CODE = """\
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        dense = [pb_utils.get_input_tensor_by_name(r, "dense").as_numpy() for r in requests]
        {work}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("probability", d[:, :1])]) for d in dense]
"""  # noqa: E501
ONE_INSTANCE = ServingOptions(instances=1)


def write_model(repository: Path, name: str = MODEL_NAME, work: str = "pass", **more: Any) -> None:
    """Write a model that runs the Python lines `work` with `requests` and returns its first input.

    `more` may contain `code` (the whole program, instead of `work`), the `version`, and the serving
    `options`.
    """
    version, options = more.get("version", 1), more.get("options", ONE_INSTANCE)
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(
        more.get("code") or _CODE.format(work=work.replace("\n", "\n" + " " * 8))
    )
    (repository / name / "config.pbtxt").write_text(
        triton_config(name, options, [version], features=SHOP.features)
    )
    # The tritonserver on laptops requires a file `model.onnx` beside the code when it starts. The
    # code of the test's model does not read `model.onnx`.
    (folder / "model.onnx").touch()
