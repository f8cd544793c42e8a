"""A stand-in for a running Triton whose state is stored in files, so that it outlives its process.

The stand-in follows the real server's rules. A load reads config.pbtxt and loads exactly the
versions that the file names, if their warm-up rows exist. A load that fails for one version loads
none. A loaded version answers from the server's own copy, even if the repository changes. The
highest version answers requests without a version. A starting server loads what is configured. The
stand-in scores with ONNX Runtime. Other tests check the real server.
"""

import shutil
from pathlib import Path
from uuid import uuid4

from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.serving import versions_of
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.serving.parity import GoldenRows, open_graph, score
from evergreen.serving.repository.triton_config import warmup_files_of
from evergreen.serving.servers import NotListening
from tests.support.served_names import MODEL_NAME


class FileTriton:
    """The server `url` over `repository`.

    The server's loaded models are in `<state>/<url>/<model>/<version>/model.onnx`.
    """

    def __init__(self, url, *, repository, state):
        self.url, self._repository, self._memory = url, Path(repository), Path(state) / url
        self._down = Path(state) / f"{url}.down"

    def start(self):
        """Start like a pod: clear the memory and load what is configured."""
        shutil.rmtree(self._memory, ignore_errors=True)
        self._down.unlink(missing_ok=True)
        if (self._repository / MODEL_NAME / "config.pbtxt").exists():
            self.load(MODEL_NAME)
        return self

    def crash(self):
        self._down.parent.mkdir(parents=True, exist_ok=True)
        self._down.touch()

    def close(self):
        pass

    def check_live(self):
        if self._down.exists():
            raise NotListening(f"triton {self.url}: connection refused")

    def load(self, name):
        self.check_live()
        config = self._repository / name / "config.pbtxt"
        if not config.exists():
            raise PermanentError(f"triton {self.url}: failed to load {name}, no configuration")
        for file in warmup_files_of(config.read_text()):
            if not (config.parent / "warmup" / file).exists():
                raise PermanentError(
                    f"triton {self.url}: failed to load {name}, no warm-up rows {file}"
                )
        fresh = self._memory / f".{name}.{uuid4().hex}"
        for version in versions_of(config.read_text()):
            source = self._repository / name / str(version)
            try:
                open_graph(source / "model.onnx")
            except ContractError as error:
                shutil.rmtree(fresh, ignore_errors=True)
                raise PermanentError(
                    f"triton {self.url}: failed to load {name} version {version}: {error}"
                ) from error
            shutil.copytree(source, fresh / str(version))
        self.unload(name)
        fresh.rename(self._memory / name)

    def unload(self, name):
        self.check_live()
        shutil.rmtree(self._memory / name, ignore_errors=True)

    def loaded(self, name=MODEL_NAME):
        """Return the loaded versions, ascending."""
        return sorted(int(path.name) for path in (self._memory / name).glob("*"))

    def graph(self, version, name=MODEL_NAME):
        return self._memory / name / str(version) / "model.onnx"

    def is_ready(self, name, version):
        self.check_live()
        return version in self.loaded(name)

    def infer(self, name, dense, categorical, *, version=None):
        self.check_live()
        if not self.loaded(name) or (version is not None and version not in self.loaded(name)):
            raise PermanentError(f"triton {self.url}: {name} version {version} is not loaded")
        chosen = version or max(self.loaded(name))
        rows = GoldenRows(
            features=CRITEO, dense=dense, categorical=categorical, expected=dense[:, 0]
        )
        return score(open_graph(self.graph(chosen, name)), rows), chosen
