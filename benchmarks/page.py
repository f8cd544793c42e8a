"""Write docs/design/performance.md and its charts from the newest documents.

Run by `make performance`. Measured documents are in build/benchmarks, which git ignores.
`benchmarks.page` copies the documents to benchmarks/results, one file per benchmark, and writes the
page from all documents. Quick runs are not copied, because they only show that a benchmark works.
`command` defines the documents, and each benchmark defines its charts.
"""

import json
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.__main__ import PLANS
from benchmarks.command import MEASURED
from benchmarks.spread import Figure, figure_of
from demo.environments import REPOSITORY
from evergreen.runtime.durable import write_whole

RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "design" / "performance.md"
CHARTS = ("freshness", "growth")
"""Benchmarks whose modules draw charts."""
COUNTS = ("policies", "gate", "validation")
"""Benchmarks that count decisions, such as false alarms. Other work on the machine does not change
a count."""
NAMES = [*PLANS, "gpu"]
_LIMITS = {
    "product_gflop_s": "The machine multiplied float32 matrices at {:g} GFLOP/s.",
    "copy_gb_s": "The machine copied memory at {:g} GB/s.",
    "fsync_ms": "A write with fsync took {:g} ms.",
}
_INTRODUCTION = """# Performance

Other pages take their speed figures from this page. If another page has an older speed figure, its
paragraph contains "not measured again since" and a date. A test fails if a speed figure has neither
this source nor a date. `make performance` writes this page from the documents in
`benchmarks/results`.

`make benchmarks` repeats all measurements, and resumes after an interruption.
`make benchmark-serving` runs one benchmark, and `BENCHMARK_FLAGS=--quick` only tests the benchmark.
On a GPU, `make gpu PYTHON_GPU=python3` takes at most nine minutes, and a second call resumes. All
steps of `make gpu` together take an estimated eleven minutes. `make gpu` needs torch, NumPy,
msgspec, pyarrow and safetensors. The command also uses onnxruntime-gpu, torchrec and pytest if
these packages are installed. The command was tested on Python 3.12 with CUDA's build of torch 2.11
and NumPy 2.5, but without a GPU. The result is one archive, `build/benchmarks/gpu.tar.gz`, from
which another machine can resume. `GPU_FLAGS=--quick` tests all steps without a GPU.

A figure is the median of several measurements, with minimum and maximum in parentheses. A ratio
compares two measurements of the same run that follow each other in time. The text above each table
names the speed of the machine at that time.
"""


def copy_results() -> None:
    """Copy newly measured documents to the results."""
    RESULTS.mkdir(exist_ok=True)
    for path in (REPOSITORY / MEASURED / f"{name}.json" for name in NAMES):
        if path.exists() and not json.loads(text := path.read_text())["is_quick"]:
            write_whole(RESULTS / path.name, text)


def read_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the documents of the results, in the order of the page."""
    paths = [folder / f"{name}.json" for name in NAMES]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def page(documents: Iterable[dict[str, Any]]) -> str:
    """Return the complete page."""
    sections = {each["benchmark"]: section(each) for each in documents}
    missing = [f"`{name}`" for name in NAMES if name not in sections]
    note = [f"Not measured yet: {', '.join(missing)}.\n"] if missing else []
    return "\n".join([_INTRODUCTION, *note, *sections.values()])


def section(document: dict[str, Any]) -> str:
    """Return the section of one benchmark: date, machine and command, a table, and charts."""
    facts, name = document["machine"], document["benchmark"]
    parts = [facts.get("gpu") or facts["processor"]]
    parts += [f"{facts['memory_gib']:g} GiB of memory"] if "memory_gib" in facts else []
    limits = [
        text.format(document["limits"][key])
        for key, text in _LIMITS.items()
        if key in document["limits"]
    ]
    lines = [
        f"## {name}",
        "",
        f"`{document['command']}` measured these figures on {document['date'][:10]} at commit "
        f"{document['commit']}, and took {document['seconds']:,.0f} s. The benchmark used "
        f"{facts['cores_used']} of {facts['cores']} cores ({', '.join(parts)}). "
        f"{' '.join(limits)}",
    ]
    if doubt := doubts(document):
        lines += ["", f"**{doubt}**"]
    lines += ["", "| figure | peer | value | target | limit |", "|---|---|---|---|---|"]
    lines += [row(figure_of(each)) for each in document["figures"]]
    if skipped := document.get("skipped"):
        lines += ["", f"Left out: {'; '.join(skipped)}."]
    for chart in charts(document):
        lines += ["", f"![{chart.removesuffix('.svg').replace('-', ' ')}]({chart})"]
    return "\n".join([*lines, ""])


def charts(document: dict[str, Any]) -> dict[str, str]:
    """Return the charts of a document as SVG, by file name in docs/design."""
    if document["benchmark"] not in CHARTS:
        return {}
    drawn: dict[str, str] = import_module(f"benchmarks.{document['benchmark']}").charts(document)
    return drawn


def doubts(document: dict[str, Any]) -> str:
    """Return why the figures of a document are unreliable, or "" if they are reliable."""
    if document["benchmark"] in COUNTS:
        return ""
    if (share := document["other_work_share"]) is None:
        return "To be measured again: the share of other work is unknown."
    return (
        f"To be measured again: other work took {share:.0%} of the machine." if share >= 0.1 else ""
    )


def row(figure: Figure) -> str:
    """Return one figure as a row of the table."""
    cells = [
        figure.name,
        figure.peer,
        f"{figure.value.shown()} {figure.unit}".strip(),
        figure.aim(),
        figure.limit,
    ]
    return f"| {' | '.join((cell or '').replace('|', '/') for cell in cells)} |"


def main() -> int:
    """Copy the documents, and write page and charts."""
    copy_results()
    documents = read_results()
    for document in documents:
        for name, drawn in charts(document).items():
            write_whole(PAGE.with_name(name), drawn)
    write_whole(PAGE, page(documents))
    print(f"written: {PAGE} of {len(documents)} benchmarks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
