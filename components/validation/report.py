"""The report for people: one self-contained HTML page, readable on a phone and without a network.

Says the decision first, then the findings, the drift of all features, and each column with its distribution now and in
the champion's rows. Judges nothing. Everything that comes from the rows or their file names is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from components.contracts import criteo
from components.validation.charts import Bar, draw_bars
from components.validation.rules import Finding
from components.validation.summarize import (
    by_feature,
    log_histogram,
    missing_share,
    num_rows,
    num_values,
    value_counts,
)

_SHOWN_VALUES = 12

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#667085;--paper:#fff;--line:#e2e6ec;--now:#2563eb;--before:#b8c0cc}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#98a2b3;--paper:#12161c;--line:#2b323d;--before:#4b5565}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1100px;padding:1rem;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}
small,.soft{color:var(--soft)}table{border-collapse:collapse;width:100%}.scroll{overflow-x:auto}
th,td{padding:.3rem .5rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.block,.warn,.pass,.info{display:inline-block;padding:0 .5em;border-radius:.6em;color:#fff;font-size:.85em}
.block{background:#b42318}.warn{background:#b54708}.pass{background:#067647}.info{background:#667085}
.cards{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(260px,1fr))}
.card{border:1px solid var(--line);border-radius:.5rem;padding:.6rem;overflow-wrap:anywhere}
.card h3{margin:0 0 .2rem;font-size:1rem}svg{width:100%;height:72px;display:block;margin-top:.3rem}
rect.now{fill:var(--now)}rect.before{fill:var(--before)}
"""


def write_html(
    *,
    title: str,
    decision: str,
    findings: Sequence[Finding],
    drift: Sequence[dict[str, Any]],
    now: Any,
    before: Any | None,
) -> str:
    """The page's HTML."""
    compared = f"compared with the {num_rows(before):,} rows of the champion" if before is not None else "no champion"
    body = (
        f'<h1>{escape(title)} <span class="{escape(decision)}">{escape(decision)}</span></h1>'
        f'<p class="soft">{num_rows(now):,} training rows, {compared}.</p>'
        f"<h2>Findings</h2>{_findings_table(findings)}"
        f"<h2>Drift</h2>{_drift_table(drift)}"
        f'<h2>Columns</h2><p class="soft">Blue: these rows. Grey: the champion\'s.</p>'
        f'<div class="cards">{_cards(now, before)}</div>'
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _findings_table(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>Nothing was found.</p>"
    rows = "".join(
        f'<tr><td><span class="{escape(f["severity"])}">{escape(f["severity"])}</span></td>'
        f"<td>{escape(f['feature'])}</td><td>{escape(f['kind'])}</td><td>{escape(f['description'])}</td></tr>"
        for f in findings
    )
    return _table("<th>Severity</th><th>Column</th><th>Kind</th><th>What</th>", rows)


def _drift_table(drift: Sequence[dict[str, Any]]) -> str:
    if not drift:
        return "<p>There is no champion to compare with.</p>"
    rows = "".join(
        f'<tr><td>{escape(e["feature"])} <span class="{escape(e["severity"])}">{escape(e["severity"])}</span></td>'
        f'<td class="number">{_number(e["distance"])}</td><td class="number">{_number(e["threshold"])}</td>'
        f'<td class="number">{_percent(e["new_value_share"])}</td>'
        f"<td><small>{escape(e['measure'])}</small></td></tr>"
        for e in sorted(drift, key=_excess, reverse=True)
    )
    head = '<th class="number">Distance</th><th class="number">Threshold</th><th class="number">New values</th>'
    return _table(f"<th>Column</th>{head}<th>Measure</th>", rows)


def _excess(entry: dict[str, Any]) -> float:
    return float(entry["distance"] / entry["threshold"]) if entry["threshold"] and entry["distance"] is not None else -1


def _cards(now: Any, before: Any | None) -> str:
    features, features_before = by_feature(now), by_feature(before) if before is not None else {}
    known = [criteo.LABEL, *criteo.FEATURES]
    names = [name for name in known if name in features] + [name for name in features if name not in known]
    return "".join(_card(name, features[name], features_before.get(name)) for name in names)


def _card(name: str, now: Any, before: Any) -> str:
    facts = [f"missing {_percent(missing_share(now))}"]
    if before is not None:
        facts[0] += f" (before {_percent(missing_share(before))})"
    if now.WhichOneof("stats") == "string_stats":
        facts.append(f"about {now.string_stats.unique:,} values")
        bars = _value_bars(now, before)
    else:
        numbers = now.num_stats
        if num_values(now):
            facts.append(f"{_number(numbers.min)} to {_number(numbers.max)}, median {_number(numbers.median)}")
            facts.append(f"mean {_number(numbers.mean)}, std {_number(numbers.std_dev)}")
        bars = _bucket_bars(now, before)
    chart = draw_bars(bars, f"distribution of {name}")
    return f'<div class="card"><h3>{escape(name)}</h3><small>{escape("; ".join(facts))}</small>{chart}</div>'


def _value_bars(now: Any, before: Any) -> list[Bar]:
    counts, counts_before = value_counts(now), value_counts(before)
    rows, rows_before = num_values(now) or 1, num_values(before) or 1
    top = [*list(counts)[:_SHOWN_VALUES], *list(counts_before)[:_SHOWN_VALUES]]
    shares = {v: (counts.get(v, 0.0) / rows, counts_before.get(v, 0.0) / rows_before) for v in top}
    chosen = sorted(shares, key=lambda v: -max(shares[v]))[:_SHOWN_VALUES]
    return [Bar(value, shares[value][0], shares[value][1] if before is not None else None) for value in chosen]


def _bucket_bars(now: Any, before: Any) -> list[Bar]:
    histogram, histogram_before = log_histogram(now), log_histogram(before)
    if histogram is None:
        if now.num_stats.common_stats.num_non_missing == 0:
            return []
        share, share_before = now.num_stats.mean, before.num_stats.mean if before is not None else None
        # The label: its mean is the share of ones.
        return (
            [
                Bar("0", 1 - share, None if share_before is None else 1 - share_before),
                Bar("1", share, share_before),
            ]
            if 0 <= share <= 1
            else []
        )
    buckets_before = histogram_before.buckets if histogram_before is not None else [None] * len(histogram.buckets)
    rows, rows_before = num_values(now) or 1, num_values(before) or 1
    pairs = list(zip(histogram.buckets, buckets_before))
    occupied = [i for i, (b, old) in enumerate(pairs) if b.sample_count or (old is not None and old.sample_count)]
    return [
        Bar(
            f"{b.low_value:.4g} to {b.high_value:.4g}",
            b.sample_count / rows,
            None if old is None else old.sample_count / rows_before,
        )
        for b, old in (pairs[occupied[0] : occupied[-1] + 1] if occupied else [])
    ]


def _table(head: str, rows: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
