"""TFDV imported without TensorFlow: the same results as imported plainly, and other releases of TFDV still work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

EVERYTHING = """
import json, sys
from pathlib import Path
if sys.argv[1] == "plain":
    import tensorflow_data_validation
from components.validation import tfdv as imported
from components.validation.deferred import is_deferred
from components.validation.rows import COLUMNS, parquet_files
from components.validation.schema import format_schema, infer_schema
from components.validation.summarize import summarize_files
from components.validation.tfdv_drift import tfdv_distances
tfdv = imported.tfdv
now, before = (summarize_files([path], COLUMNS, processes=1) for path in parquet_files(Path(sys.argv[2])))
schema = infer_schema(before, range_factor=10.0)
loose = tfdv.update_schema(schema, now)
tfdv.get_feature(schema, "I3").drift_comparator.jensen_shannon_divergence.threshold = 1e-6
anomalies = tfdv.validate_statistics(now, schema, previous_statistics=before, environment="TRAINING")
results = {
    "statistics": now.SerializeToString(deterministic=True).hex(),
    "schema": format_schema(schema),
    "updated": format_schema(loose),
    "anomalies": anomalies.SerializeToString(deterministic=True).hex(),
    "reasons": sorted(anomalies.anomaly_info),
    "distances": tfdv_distances(now, before, ()),
}
said = {"results": results, "deferred": is_deferred("tensorflow"), "google": "google.cloud.bigquery" in sys.modules}
said["tensorflows"] = sys.modules["tensorflow_data_validation.api.validation_api"].tf is sys.modules["tensorflow"]
print(json.dumps(said))
"""


def run(script, *arguments, path=""):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_that_the_step_uses_gives_what_a_plain_import_gives(tmp_path, judged):
    pq.write_table(judged(2000, seed=1), tmp_path / "a.parquet")
    pq.write_table(judged(2000), tmp_path / "b.parquet")
    plain, ours = (json.loads(run(EVERYTHING, how, tmp_path).splitlines()[-1]) for how in ("plain", "deferred"))
    assert (plain["deferred"], plain["google"], plain["tensorflows"]) == (False, True, True)
    assert (ours["deferred"], ours["google"], ours["tensorflows"]) == (True, False, False)
    assert "I3" in ours["results"]["reasons"]
    assert ours["results"] == plain["results"]


def test_tensorflow_is_there_for_whoever_uses_it():
    script = """
from components.validation.tfdv import tfdv
from components.validation.deferred import is_deferred
assert is_deferred("tensorflow")
import tensorflow, tensorflow as tf
from tensorflow_data_validation.utils import io_util
assert is_deferred("tensorflow") and io_util.tf is tf
assert tf.constant([1, 2]).numpy().tolist() == [1, 2]
assert not is_deferred("tensorflow")
assert io_util.tf.Tensor is tf.Tensor
assert tfdv.generate_statistics_from_csv and tfdv.__version__
print("done")
"""
    assert run(script).endswith("done\n")


def test_a_submodule_of_tensorflow_executes_tensorflow_first():
    script = """
from components.validation.deferred import is_deferred
import components.validation.tfdv
from tensorflow.python.framework.tensor import Tensor
assert not is_deferred("tensorflow")
import tensorflow
assert tensorflow.Tensor is Tensor
print("done")
"""
    assert run(script).endswith("done\n")


def test_the_conversion_to_bytes_is_tensorflows_and_other_names_are_its_own_beside_it():
    script = """
from components.validation.as_bytes import as_bytes
from components.validation.deferred import is_deferred
from components.validation.tfdv import tfdv
from tensorflow_data_validation.api import validation_api
assert validation_api.tf.compat.as_bytes("a") == b"a" and is_deferred("tensorflow")
import tensorflow
assert validation_api.tf.train.Example is tensorflow.train.Example and not is_deferred("tensorflow")
assert validation_api.tf.compat.as_text is tensorflow.compat.as_text
def outcome(convert, value):
    try:
        result = convert(value)
        return type(result), result
    except Exception as error:
        return type(error), str(error)
for value in (b"a\\xff", "\u00e9", bytearray(b"x"), "", b"", None, 3, ["a"], "\\ud800"):
    assert outcome(as_bytes, value) == outcome(tensorflow.compat.as_bytes, value), value
print("done")
"""
    assert run(script).endswith("done\n")


PACKAGE = {
    "parts/__init__.py": "",
    "parts/heavy.py": "import pathlib\npathlib.Path(__file__).with_name('executed').touch()\nvalue = 5\n",
    "parts/user.py": "import parts.heavy as heavy\nimport parts.heavy\ndef use():\n    return heavy.value\n",
    "parts/eager.py": "from parts.heavy import value\n",
    "parts/broken.py": "import parts.heavy\nraise ImportError('no library')\n",
    "named/__init__.py": "'''Names.'''\nfrom named.one import first as renamed\nfrom named.two import second\n",
    "named/one.py": "first = 1\n",
    "named/two.py": "from named import one\nsecond = one.first + 1\n",
    "doing/__init__.py": "from doing.one import first\nsecond = first + 1\n",
    "doing/one.py": "first = 1\n",
}


@pytest.fixture
def packages(tmp_path):
    for name, content in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def deferred(packages, script):
    begin = """
import sys
from pathlib import Path
from components.validation.deferred import absent, deferring, is_deferred
executed = lambda: (Path(sys.argv[1]) / "parts/executed").exists()
"""
    return run(begin + script + "\nprint('done')", packages, path=packages)


@pytest.mark.parametrize(
    "script",
    [
        """
with deferring(modules=["parts.heavy"], packages=[]):
    import parts.user
assert is_deferred("parts.heavy") and not executed()
assert parts.user.use() == 5 and executed() and not is_deferred("parts.heavy")
assert "__getattr__" not in vars(sys.modules["parts.heavy"])
""",
        """
with deferring(modules=["parts.heavy"], packages=[]):
    import parts.eager
assert executed() and not is_deferred("parts.heavy") and parts.eager.value == 5
""",
        """
with deferring(modules=["parts.heavy"], packages=[]):
    import parts.heavy
for name in ("nothing", "nothing"):
    assert not hasattr(parts.heavy, name)
assert parts.heavy.value == 5
""",
        """
with deferring(modules=["parts.broken"], packages=[]):
    import parts.broken
for _ in range(2):
    try:
        parts.broken.value
    except ImportError as error:
        assert str(error) == "no library"
    else:
        raise AssertionError
""",
        """
with deferring(modules=[], packages=["named"]):
    import named
    from named import two
assert "renamed" not in vars(named)
assert named.renamed == 1 and named.second == 2 and not hasattr(named, "first")
""",
        """
with deferring(modules=[], packages=["doing"]):
    import doing
assert vars(doing)["second"] == 2
""",
        """
with absent("parts.heavy"):
    try:
        import parts.heavy
    except ImportError:
        pass
    else:
        raise AssertionError
import parts.heavy
with absent("parts.heavy"):
    import parts.heavy
assert parts.heavy.value == 5
""",
    ],
    ids=["used later", "used at once", "asked for nothing", "broken", "names", "more than names", "absent"],
)
def test_a_deferred_module_behaves_as_the_real_one(packages, script):
    assert deferred(packages, script) == "done\n"


def test_a_tfdv_that_cannot_be_imported_in_parts_is_imported_plainly(tmp_path):
    """One whose parts need the package's own import to come first, as a circle of imports does."""
    real = Path(__import__("tensorflow_data_validation").__file__).parent
    fake = tmp_path / real.name
    fake.mkdir()
    names = (real / "__init__.py").read_text()
    (fake / "__init__.py").write_text(f"from tensorflow_data_validation.first import ready\n{names}")
    (fake / "first.py").write_text("ready = True\nimport tensorflow_data_validation as p\np.mark = 1\n")
    for entry in real.iterdir():
        if entry.name not in ("__init__.py", "__pycache__", "api"):
            (fake / entry.name).symlink_to(entry)
    (fake / "api").mkdir()
    for entry in (real / "api").iterdir():
        if entry.name not in ("__pycache__", "stats_api.py"):
            (fake / "api" / entry.name).symlink_to(entry)
    text = (
        "import tensorflow_data_validation\ntensorflow_data_validation.mark\n" + (real / "api/stats_api.py").read_text()
    )
    (fake / "api" / "stats_api.py").write_text(text.replace("from __future__", "# from __future__"))
    script = """
from components.validation import tfdv
from components.validation.summarize import num_rows, summarize_files
import tensorflow_data_validation
assert tensorflow_data_validation.__file__.startswith(__import__("sys").argv[1])
assert tensorflow_data_validation.mark == 1 and "GenerateStatistics" in vars(tensorflow_data_validation)
assert num_rows(summarize_files([], [])) == 0
print("done")
"""
    assert run(script, tmp_path, path=tmp_path).endswith("done\n")
