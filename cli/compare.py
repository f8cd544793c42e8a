"""`evergreen audit compare A B` shows how two stored models differ.

The command compares settings and sizes, and the scores of both models on rows that neither model
was trained on. These rows are held-out rows of the model whose training data end later. Only rows
after the end of the other model's training data are used. Both models score the rows with their
stored weights, as in serving. The command changes nothing.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evergreen.contracts.manifests import Model, RawDataset, RowsQuality
from evergreen.networks import share_cores
from evergreen.registry.model_cards import CalibrationBin, SliceQuality
from evergreen.registry.models import referenced_model, verdict_paths
from evergreen.registry.promotion_journal import moment_of
from evergreen.reports.formats import ABSENT, number, probability
from evergreen.reports.model_card import calibration_blocks, quality_blocks, slices_blocks
from evergreen.reports.page import PageTable, Text, html_page
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.storage.uris import local_path, typed_folder

TEXT_SLICES = 10
"""Maximum number of slices in the text output. The page and the JSON contain more slices."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of model B with model A.

    In `quality` and `slices`, A has the role of the champion, and B has the role of the candidate.
    """

    a: str
    """Model id."""
    b: str
    rows_of: str
    """Id of the model for which the rows were held out."""
    differing: Mapping[str, tuple[Any, Any]]
    """For each setting or fact that differs: its name, and the values of A and B. A value is None
    if the model's recommender does not set it. None means that the setting has its default."""
    sizes: Mapping[str, tuple[Any, Any]]
    """Numbers of A and B by name, including equal numbers."""
    quality: RowsQuality
    slices: list[SliceQuality]
    """Slices, ordered by the evidence against B, strongest first."""
    calibration_a: list[CalibrationBin]
    calibration_b: list[CalibrationBin]


def compare(store: Path, a: Model, b: Model) -> Comparison:
    """Compare two models of `store`.

    Raises:
        ContractError: a file is corrupt, or no rows are new to both models. There are no new rows
            if the later model was never evaluated, if its held-out rows were removed, or if the
            other model was trained on these rows.
    """
    from components.evaluation.evaluate import check_holdout, shown_values
    from components.evaluation.gate import measure_rows, measure_slices, slice_masks
    from components.evaluation.report import calibration_bins
    from components.evaluation.scoring import score_with_both
    from evergreen.config.gate import GateSettings

    later, earlier = sorted((a, b), key=lambda model: moment_of(model.watermark), reverse=True)
    path = verdict_paths(store, later.model_id)[1]
    if not path.exists():
        raise ContractError(
            f"{path} is absent: model {later.model_id} was never evaluated, so it has no held-out "
            "rows"
        )
    raw = RawDataset.read(path)
    if not local_path(raw.holdout_uri).is_dir():
        raise ContractError(
            f"{raw.holdout_uri} is absent: held-out rows are removed with the work folder of their "
            "run"
        )
    features, named = raw.recommender.features, raw.recommender.data
    scored = score_with_both(raw.holdout_uri, features, named, candidate=b, champion=a)
    newest = moment_of(earlier.watermark).timestamp()
    scored = scored.of_rows(scored.event_seconds > newest)
    if not len(scored.labels):
        raise ContractError(
            f"model {earlier.model_id} was trained on rows up to {earlier.watermark}, expected a "
            f"newer held-out row of model {later.model_id}"
        )
    slices = slice_masks(scored, is_first_run=None, shown=shown_values(raw))
    decided = check_holdout(scored, slices, raw.recommender.section("gate", GateSettings))
    calibration_a, calibration_b = (
        calibration_bins(scored.labels, scores, weights=scored.weights)
        for scores in (scored.champion, scored.candidate)
        if scores is not None
    )
    return Comparison(
        a=a.model_id,
        b=b.model_id,
        rows_of=later.model_id,
        differing=dict(_differing(a, b)),
        sizes={name: (value, _sizes(b)[name]) for name, value in _sizes(a).items()},
        quality=measure_rows(scored, decided.estimates),
        slices=measure_slices(scored, slices, decided.slice_p_values),
        calibration_a=calibration_a,
        calibration_b=calibration_b,
    )


def _differing(a: Model, b: Model) -> Iterator[tuple[str, tuple[Any, Any]]]:
    of_a, of_b = _configured(a), _configured(b)
    for name in dict.fromkeys([*of_a, *of_b]):
        if of_a.get(name) != of_b.get(name):
            yield name, (of_a.get(name), of_b.get(name))


def _configured(model: Model) -> dict[str, Any]:
    """Return the configuration, the data and the parent of a model, by name."""
    features = model.recommender.features
    settings = model.recommender.named_settings
    return {
        # The network has all settings of the section `model`, including defaults.
        **{name: value for name, value in settings.items() if not name.startswith("model.")},
        **{
            f"model.{'kind' if name == 'network' else name}": value
            for name, value in model.config.items()
        },
        "engine": model.backend,
        "parent": model.parent_model_id,
        "trained from": model.window_start,
        "trained up to": model.watermark,
        "columns left out": model.excluded_columns,
        "features": [name for name in features.names if name not in model.excluded_columns],
    }


def _sizes(model: Model) -> dict[str, Any]:
    weights = local_path(model.uri) / Model.WEIGHTS
    return {
        "training rows of its own run": model.num_train_rows,
        "optimizer steps of all runs": model.optimizer_step,
        "category ids": sum(model.slot_sizes),
        "MiB of weights and optimizer": round(
            sum(f.stat().st_size for f in weights.rglob("*") if f.is_file()) / 2**20, 1
        ),
    }


def comparison_page(found: Comparison) -> str:
    """Return the comparison as an HTML page."""
    head = ["what", f"A, {found.a}", f"B, {found.b}"]
    calibrations = {f"A, {found.a}": found.calibration_a, f"B, {found.b}": found.calibration_b}
    differing = PageTable(
        caption="settings and facts that differ", head=head, rows=_cells(found.differing)
    )
    return html_page(
        "Comparison of two models",
        first=[
            Text(f"{_rows_sentence(found)} Below, B is the candidate and A the champion."),
            *quality_blocks(found.quality, (f"B, {found.b}", f"A, {found.a}")),
            *map(Text, _uncertainty_warnings(found)),
        ],
        sections={
            "What differs": [differing],
            "Sizes": [
                PageTable(caption="sizes", head=head, rows=_cells(found.sizes), numbers=(1, 2))
            ],
            "Calibration": calibration_blocks(calibrations),
            "Slices": [
                Text("Slices with the strongest evidence against B come first."),
                *slices_blocks(found.slices),
            ],
        },
    )


def comparison_text(found: Comparison) -> str:
    """Return the comparison for a terminal."""
    quality = found.quality
    lines = [f"A {found.a}", f"B {found.b}", _rows_sentence(found), ""]
    lines += [f"{'':34} {'A':>32} {'B':>32}"]
    for name in ("auc", "log_loss", "normalized_entropy", "calibration", "gauc", "user_ndcg"):
        values = [getattr(of, name) for of in (quality.champion, quality.candidate)]
        lines += (
            [f"{name:34}" + "".join(f" {number(value):>32}" for value in values)]
            if any(values)
            else []
        )
    if (lead := quality.difference) is not None and lead.auc is not None:
        lines += [
            f"AUC, B minus A: {lead.auc:+.4f} [{_signed(lead.low)}, {_signed(lead.high)}], p "
            f"{probability(lead.p_value)}"
        ]
    lines += _uncertainty_warnings(found)
    for title, pairs in (("what differs", found.differing), ("sizes", found.sizes)):
        lines += ["", title, *(f"{name:34} {a:>32} {b:>32}" for name, a, b in _cells(pairs))]
    lines += [
        "",
        f"slices, strongest evidence against B first{'':2}{'rows':>8}{'log loss':>10}{'p':>10}",
    ]
    for part in found.slices[:TEXT_SLICES]:
        change = ABSENT if part.log_loss_change is None else f"{part.log_loss_change:+.1%}"
        lines += [
            f"{part.name[:34]:34}{part.num_rows:>8}{change:>10}{probability(part.p_value):>10}"
        ]
    return "\n".join(lines)


def _signed(value: float | None) -> str:
    return ABSENT if value is None else f"{value:+.4f}"


def _uncertainty_warnings(found: Comparison) -> list[str]:
    """Return a warning if the rows do not show which AUC is higher, else an empty list."""
    lead = found.quality.difference
    if lead is None or lead.low is None or lead.high is None:
        return ["These rows are too few to compare the AUC of the models."]
    if lead.low <= 0 <= lead.high:
        return [
            f"The interval includes 0: these {found.quality.num_rows} rows do not show which model "
            "is better. More rows give a narrower interval."
        ]
    return []


def _rows_sentence(found: Comparison) -> str:
    return (
        f"{found.quality.num_rows} held-out rows of model {found.rows_of} with "
        f"{found.quality.num_clicks} clicks, new to both models."
    )


def _cells(pairs: Mapping[str, tuple[Any, Any]]) -> list[list[str]]:
    return [
        [name, *(ABSENT if value is None else str(value) for value in both)]
        for name, both in pairs.items()
    ]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen audit compare", description=(__doc__ or "").partition("\n\n")[2]
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(), help="a released version, or the id of a model in the store"
        )
    add_store_flag(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", type=Path, help="HTML page to write")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. `evergreen.runtime.exit_codes` lists its exit codes."""
    arguments = build_parser().parse_args(argv)
    store = typed_folder(arguments.store, "--store")
    share_cores()
    found = compare(
        store, referenced_model(store, arguments.a), referenced_model(store, arguments.b)
    )
    print(json.dumps(asdict(found), indent=2) if arguments.json else comparison_text(found))
    if arguments.output:
        write_whole(arguments.output, comparison_page(found))
    return ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
