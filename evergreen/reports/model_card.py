"""The page of a model card: serving times, evaluation, training rows and lineage."""

from collections.abc import Mapping, Sequence
from datetime import timezone

from evergreen.contracts.checks import FAIL, PASS
from evergreen.contracts.manifests import (
    AucLead,
    Model,
    ModelQuality,
    RawDataset,
    ReorderingGain,
    RowsQuality,
    ValidationReport,
    Verdict,
)
from evergreen.registry.model_cards import Ancestor, CalibrationBin, ModelCard, SliceQuality
from evergreen.registry.promotion_journal import CANARY, ROLLBACK, Promotion, moment_of
from evergreen.reports.events import ShownEvent, event_list
from evergreen.reports.formats import ABSENT, number, percent, probability
from evergreen.reports.page import (
    Badge,
    Banner,
    Checks,
    Code,
    Fold,
    PageTable,
    Strong,
    Text,
    check_rows,
    facts_table,
    html_page,
)
from evergreen.reports.rendering import PageBlock
from evergreen.reports.svg import Interval, Line, interval_chart, line_chart

_THRESHOLDS = {
    "min_auc": "minimum AUC",
    "max_auc_loss": "AUC by which the candidate may trail the champion",
    "max_slice_loss": "relative increase of its log loss over the champion's, allowed in a slice",
    "max_calibration_factor": "factor by which expected clicks may differ from observed clicks",
    "min_class_requests": "requests with a click, and with a row without, needed for an interval",
}
_FIRST_SLICES = 8
"""Number of slices that are shown without unfolding."""


def card_page(card: ModelCard) -> str:
    """Return the model card as an HTML page."""
    verdict = card.verdict
    badge, state = _state(card)
    return html_page(
        f"Model card: {card.model_id}",
        badge=badge,
        first=[state, *_auc_chart(card), *_decision(card)],
        sections={
            "Served": [*_served(card), _LATER],
            "All held-out rows": quality_blocks(verdict, _names(card)),
            **(
                {"Columns alone": [_columns_alone(verdict.column_aucs)]}
                if verdict.column_aucs
                else {}
            ),
            "Old rows": _old_rows(card),
            "Explored lists": [_explored_lists(verdict.reordering_gain)],
            "Calibration": calibration_blocks(
                {"champion": card.champion_calibration, "candidate": card.calibration}
            ),
            "Slices": [
                Text(
                    "The slices with the strongest evidence against the candidate. If a slice "
                    "loses no more log loss than is allowed, p is the probability of the measured "
                    "loss. The gate corrects p for the number of slices. Each interval is a 95 % "
                    "interval."
                ),
                *slices_blocks(card.slices),
            ],
            "How it was evaluated": [_settings_table(card)],
            "Drift": _drift(card.validation),
            "Data": _data(card.raw),
            "Specification": [_specification(card.model)],
            "Lineage": _lineage(card.model, card.lineage),
        },
    )


# -- what the gate decided


def _auc_chart(card: ModelCard) -> list[PageBlock]:
    """Return a chart of the AUC of both models on the held-out rows.

    A model without an interval for its AUC is not in the chart. The list is empty if no model has
    an interval.
    """
    verdict = card.verdict
    intervals = [
        Interval(label=name, value=of.auc, low=of.auc_low, high=of.auc_high)
        for name, of in (("candidate", verdict.candidate), ("champion", verdict.champion))
        if of and of.auc is not None and of.auc_low is not None and of.auc_high is not None
    ]
    label = "AUC on the held-out rows with its 95 % interval"
    return (
        [interval_chart(intervals, label=label, limit=card.gate.get("min_auc"))]
        if intervals
        else []
    )


def _decision(card: ModelCard) -> list[PageBlock]:
    verdict = card.verdict
    passed = sum(check.passed for check in verdict.checks)
    caption = (
        f"The gate {_answer(verdict)} it: {passed} of {len(verdict.checks)} checks passed on "
        f"{verdict.num_rows:,} held-out rows"
    )
    found: list[PageBlock] = [Checks(caption=caption, rows=check_rows(verdict.checks))]
    found += [
        Banner(text=f"{each[0].upper()}{each[1:]}.", tone="warn") for each in verdict.warnings
    ]
    if verdict.advice:
        found.append(
            Banner(text="What would make the gate pass such a model", items=verdict.advice)
        )
    return found


# -- state after the gate's decision


def _answer(verdict: Verdict) -> str:
    return "accepted" if verdict.accepted else "refused"


def _state(card: ModelCard) -> tuple[Badge, Banner]:
    """Return the model's state (live, canary, earlier live, blocked) as a badge and a banner.

    If a model never served, its state is the decision of the gate.
    """
    last = card.served[-1] if card.served else None
    decision = card.verdict.decision
    badge = Badge(f"gate: {decision}", decision)
    if card.blocked is not None:
        badge = Badge("blocked")
        tone, text = (
            "bad",
            f"Rolled back at {_time(card.blocked.time)}, and blocked until a person promotes it",
        )
    elif live := next((span.begun for span in card.served if span.is_live), None):
        badge = Badge("live")
        tone, text = "good", f"Live as version {live.version} since {_time(live.time)}"
    elif last is None:
        tone = {PASS: "good", FAIL: "bad"}.get(decision, "warn")
        text = f"The gate {_answer(card.verdict)} it. It has not answered a request"
    elif last.ended is None:
        badge = Badge(_role(last.begun), CANARY)
        tone, text = (
            "warn",
            f"Version {last.begun.version} is a {_role(last.begun)} since {_time(last.begun.time)}",
        )
    else:
        badge = Badge("not live")
        tone, text = "", f"Not live since {_time(last.ended.time)}"
    as_of = (
        f", by the promotion journal up to {_time(card.journal_time)}" if card.journal_time else ""
    )
    return badge, Banner(text=f"{text}{as_of}.", tone=tone)


_LATER = Text(
    "What came later is on the card that the monitor's status page links to, and that ",
    Code("evergreen models show"),
    " writes.",
    soft=True,
)


def _served(card: ModelCard) -> list[PageBlock]:
    """Return the intervals in which the model served requests.

    A list of events below the table shows the reasons.
    """
    if not card.served:
        return [Text("The promotion journal has no version of this model.")]
    rows = [
        [
            f"version {span.begun.version}, {_role(span.begun)}",
            _time(span.begun.time),
            _time(span.ended.time) if span.ended else "now",
            _cause_text(span.begun),
            _time(span.baked.time) if span.baked else ABSENT,
            _cause_text(span.ended) if span.ended else ABSENT,
            span.repository_uri,
        ]
        for span in card.served
    ]
    head = ["as", "from", "to", "started by", "baked", "ended by", "model repository"]
    lines = {
        (line.time, line.action): line
        for span in card.served
        for line in (span.begun, span.baked, span.ended)
        if line is not None
    }
    events = [
        ShownEvent(
            time=moment_of(line.time).timestamp(),
            kind=line.action,
            text=f"version {line.version}: {line.reason}",
        )
        for line in lines.values()
    ]
    return [
        PageTable(caption="when it served (UTC), and who decided", head=head, rows=rows),
        Fold("reasons in the promotion journal", [event_list(events, routine=())]),
    ]


def _role(line: Promotion) -> str:
    if line.action != CANARY:
        return "live"
    return f"canary at {percent(line.share)}" if line.share else "shadow"


def _cause_text(line: Promotion) -> str:
    action = "rollback to" if line.action == ROLLBACK else f"{line.action.replace('_', ' ')} of"
    return f"{action} version {line.version} by {line.who or 'unknown'}"


def _time(text: str) -> str:
    """Format a journal time to the second, UTC."""
    return moment_of(text).astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


# -- what the gate measured


def _auc(quality: ModelQuality | None) -> str:
    if quality is None or quality.auc is None:
        return ABSENT
    low, high = (
        ABSENT if end is None else f"{end:.4f}" for end in (quality.auc_low, quality.auc_high)
    )
    return f"{quality.auc:.4f} [{low}, {high}]"


def _difference(value: AucLead | None) -> Strong | str:
    if value is None or value.auc is None or value.low is None or value.high is None:
        return ABSENT
    text = f"{value.auc:+.4f} [{value.low:+.4f}, {value.high:+.4f}]"
    return Strong(text, "worse" if value.high < 0 else "")


def _names(card: ModelCard) -> tuple[str, str]:
    return f"candidate {card.model_id}", f"champion {card.verdict.champion_model_id}"


def quality_blocks(found: RowsQuality | Verdict, names: tuple[str, str]) -> list[PageBlock]:
    """Return a table of both models' quality on the same rows.

    `names` are the names of the candidate and the champion.
    """
    candidate, champion, difference = found.candidate, found.champion, found.difference
    of_users = candidate.gauc is not None

    def row(name: str, quality: ModelQuality) -> list[str]:
        others = [quality.log_loss, quality.normalized_entropy, quality.calibration]
        others += [quality.gauc, quality.user_ndcg] if of_users else []
        return [name, _auc(quality), *map(number, others)]

    rows = [row(names[0], candidate)]
    if champion is not None:
        rows.append(row(names[1], champion))
    head = ["model", "AUC [95 %]", "log loss", "normalized entropy", "expected / observed clicks"]
    head += ["AUC within users (GAUC)", "NDCG within users"] if of_users else []
    table = PageTable(
        caption="both models on the same rows", head=head, rows=rows, numbers=range(1, len(head))
    )
    if difference is None:
        return [table, Text("There is no champion to compare with.")]
    p_value = probability(difference.p_value)
    p_value = p_value if p_value.startswith("<") else f"= {p_value}"
    words = "AUC difference, candidate minus champion, paired: "
    return [table, Text(words, _difference(difference), f", p {p_value}.")]


def _old_rows(card: ModelCard) -> list[PageBlock]:
    old = card.verdict.old_distribution
    if old is None:
        return [Text("No rows older than the window were held out.")]
    text = (
        f"{old.num_rows} rows of days before the window, {old.num_clicks} clicks, drawn for this "
        "and never replayed. Both models may have been trained on them when they were new, so the "
        "table shows how well the models still score them. If the data changed in between, a "
        "candidate that follows the change scores these rows worse. This is a fault only if the "
        "old behaviour may return."
    )
    return [Text(text), *quality_blocks(old, _names(card))]


def _columns_alone(aucs: Mapping[str, float]) -> PageTable:
    """Return a table with the AUC of each column used alone.

    A high value shows a column that leaks the label.
    """
    rows = [[column, f"{auc:.4f}"] for column, auc in aucs.items()]
    return PageTable(
        caption="each column alone, on the held-out rows",
        head=["column", "AUC"],
        rows=rows,
        numbers=(1,),
    )


def _explored_lists(found: ReorderingGain | None) -> Text:
    if found is None:
        return Text("No held-out list was explored, so the value of another order is unknown.")
    overlap = (
        f"{found.num_lists} held-out lists were explored. The candidate would order "
        f"{percent(found.disputed_share)} of the neighbours otherwise, and {found.num_swaps} swaps "
        "of such a pair were shown"
    )
    if found.gain is None or found.low is None or found.high is None:
        return Text(f"{overlap}: too few to estimate the value of its order.")
    return Text(
        f"{overlap}. Each such swap gains ",
        Strong(f"{found.gain:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"),
        " clicks on the two rows over the order that was served. The interval, 95 %, holds at "
        "every number of lists at once. The gate does not use it.",
    )


def slices_blocks(slices: Sequence[SliceQuality]) -> list[PageBlock]:
    """Return tables of both models' quality on each slice.

    Only the first slices are visible before the reader unfolds the rest.
    """
    head = [
        "slice",
        "rows",
        "click rate",
        "log loss",
        "p",
        "AUC [95 %]",
        "difference",
        "NE",
        "calibration",
    ]
    rows = [
        [
            part.name,
            str(part.num_rows),
            percent(part.click_rate),
            ABSENT if part.log_loss_change is None else f"{part.log_loss_change:+.1%}",
            probability(part.p_value),
            _auc(part.candidate),
            _difference(part.difference),
            number(part.candidate.normalized_entropy),
            number(part.candidate.calibration),
        ]
        for part in slices
    ]

    def table(rows: Sequence[Sequence[object]]) -> PageTable:
        return PageTable(
            caption="slices of the held-out rows", head=head, rows=rows, numbers=range(1, len(head))
        )

    rest = rows[_FIRST_SLICES:]
    return [
        table(rows[:_FIRST_SLICES]),
        *([Fold(f"{len(rest)} more slices", [table(rest)])] if rest else []),
    ]


def calibration_blocks(models: Mapping[str, Sequence[CalibrationBin]]) -> list[PageBlock]:
    """Return charts of click rate against mean score.

    The chart draws the last model in front of the other models.
    """
    colors = ["var(--mark)", "var(--now)"]
    lines = [
        Line(
            label=name,
            color=color,
            x=[each.mean_score for each in bins],
            y=[each.click_rate for each in bins],
        )
        for (name, bins), color in zip(models.items(), colors)
        if bins
    ]
    ends = [0.0, max((value for line in lines for value in line.x), default=0.0)]
    lines = [Line(label="calibrated", color="var(--before)", x=ends, y=ends), *lines]
    chart = line_chart(lines, y_label="click rate", x_unit="", from_zero=True)
    text = Text("Click rate against mean score, of ten equal shares of the rows.", soft=True)
    return [text, *([chart] if chart else [])]


def _settings_table(card: ModelCard) -> PageTable:
    rows = {_THRESHOLDS.get(name, name): f"{value:g}" for name, value in card.gate.items()}
    rows["held-out rows, clicks, each counted once"] = (
        f"{card.verdict.num_rows}, {card.verdict.num_clicks}"
    )
    rows["scores"] = card.verdict.scores_uri
    rows["run"] = card.run
    return facts_table(rows, caption="settings of the gate")


# -- training rows and recommender


def _drift(report: ValidationReport | None) -> list[PageBlock]:
    if report is None:
        return [Text("Evaluation had no validation report.")]
    found: list[PageBlock] = [Text(f"Validation decided: {report.decision}.")]
    if unmet := [check for check in report.checks if not check.passed]:
        found.append(Checks(caption="validation's checks", rows=check_rows(unmet)))
    if report.label is not None:
        label = report.label
        found.append(
            Text(
                f"Click rate {percent(label['rate_now'])}, before {percent(label['rate_before'])}: "
                f"difference {label['difference']:+.4f} [{label['low']:+.4f}, "
                f"{label['high']:+.4f}]."
            )
        )
    if not report.drift:
        return [*found, Text("Nothing to compare the rows with.")]
    moved = [entry for entry in report.drift if entry["drifted"]]
    rows = [
        [
            entry["feature"],
            "already trained on" if entry["is_trained_on"] else ", ".join(entry["changes"]),
            f"{number(entry['effect'])} [{number(entry['effect_low'])}, "
            f"{number(entry['effect_high'])}]",
            number(entry["threshold"]),
            probability(entry["q_value"]),
        ]
        for entry in moved
    ]
    found.append(
        Text(
            f"{len(moved)} of {len(report.drift)} features drifted against the rows of the "
            "parent's lineage."
        )
    )
    head = ["feature", "what changed", "effect [95 %]", "matters from", "q"]
    table = PageTable(caption="features that drifted", head=head, rows=rows, numbers=range(2, 5))
    return [*found, *([table] if rows else [])]


def _data(raw: RawDataset) -> list[PageBlock]:
    facts: dict[str, object] = {
        "source": raw.source_uri,
        "window": f"{raw.window_start or 'the first row'} to {raw.window_end or 'the last row'}",
        "rows read from the window": f"{raw.first_event_time} to {raw.last_event_time}",
        "trained up to": raw.watermark,
        "training rows, of them late": f"{raw.num_train_rows}, {raw.num_late_rows}",
        "rows held out": raw.num_holdout_rows,
        "rows replayed from earlier days, of them held out": f"{raw.num_replay_rows}, "
        f"{raw.num_replay_holdout_rows}",
        "malformed, duplicate, quarantined": f"{raw.num_malformed}, {raw.num_duplicates}, "
        f"{raw.num_quarantined}",
        "clicks that came late": raw.num_late_clicks,
        "digest (SHA-256)": raw.digest,
        "digest of late outcomes": raw.outcomes_digest or ABSENT,
        "columns left out": ", ".join(raw.excluded_columns) or "none",
    }
    days = [
        [
            each["day"],
            str(each["version"]),
            str(each["num_rows"]),
            "yes" if each.get("replay") else "",
            digest,
        ]
        for each in raw.seen_days()
        for digest in [each.get("digest", ABSENT)]
    ]
    head = ["day", "version", "rows", "replayed", "digest (SHA-256)"]
    table = PageTable(caption="days that were read", head=head, rows=days, numbers=(1, 2))
    return [facts_table(facts, caption="the rows of its run"), *([table] if days else [])]


def _specification(model: Model) -> PageTable:
    recommender = model.recommender
    features = recommender.features
    facts: dict[str, object] = {
        "recommender": recommender.name,
        "digest of its description": recommender.digest,
        "numeric features": ", ".join(features.numeric) or "none",
        "categorical features": ", ".join(features.categorical) or "none",
        "features of lists": ", ".join(features.lists) or "none",
        "engine": model.backend,
        "network": _named(model.config),
        **{
            f"settings of {section}": _named(values)
            for section, values in recommender.settings.items()
        },
        "ids of categories": sum(model.slot_sizes),
        "seed": model.seed,
        "rows of its own run": model.num_train_rows,
        "optimizer steps, over all runs": model.optimizer_step,
        "share of rows without a click that was used": f"{model.negative_rate:g}",
        **{
            f"{name} on rows just before training on them": number(v)
            for name, v in model.progressive.items()
        },
        "made": model.created_at,
        "folder": model.uri,
        **{f"SHA-256 of {part}": digest for part, digest in model.sha256.items()},
    }
    return facts_table(facts, caption="model specification")


def _lineage(model: Model, ancestors: Sequence[Ancestor]) -> list[PageBlock]:
    if model.parent_model_id is None:
        return [Text("It was trained from scratch.")]
    rows = [
        [
            m.model_id,
            m.created_at,
            m.window_start or "the first row",
            m.watermark,
            str(m.num_train_rows),
        ]
        for m in ancestors
    ]
    head = ["model", "made", "trained from", "up to", "rows"]
    table = PageTable(caption="its lineage, newest first", head=head, rows=rows, numbers=(4,))
    return [Text(f"It continues model {model.parent_model_id}."), table]


def _named(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items())
