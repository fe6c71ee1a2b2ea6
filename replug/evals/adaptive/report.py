"""`replug adapt report`: one page, its numbers as JSON, and every figure as a file, from outcomes on disk."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from replug.data.files import replace_file, write_json
from replug.evals.adaptive import paper
from replug.evals.adaptive.comparison import NOTE, comparison_table
from replug.evals.adaptive.figures import Drawing, drawings_of_all, drawings_of_lm, drawings_of_way, named
from replug.evals.adaptive.measured import MeasuredLM, MeasuredWay
from replug.evals.adaptive.protocol import Prices
from replug.evals.tables import CSS
from replug.models.policy import SIGNALS

TITLE = "When to retrieve"
WORDS = {True: "right", False: "wrong"}
STYLE = (
    CSS
    + """
figure { margin: 0; } figcaption { color: #555; font-size: 13px; }
table { font-size: 13px; display: block; overflow-x: auto; margin: .6rem 0; } td { white-space: nowrap; }
"""
)


def write_report(measured: Sequence[MeasuredLM], out: Path, prices: Prices | None = None) -> Path:
    """Write every figure, report.json, and last report.html, whose path is returned."""
    out.mkdir(parents=True, exist_ok=True)
    shared, of_lms = drawings_of_all(measured, prices), [drawings_of_lm(lm) for lm in measured]
    of_ways = [[drawings_of_way(lm, way) for way in lm.ways] for lm in measured]
    own = [one for some in (*of_lms, *(way for ways in of_ways for way in ways)) for one in some]
    for drawing in [*shared, *own]:
        replace_file(out / f"{drawing.name}.svg", drawing.svg.encode())
    write_json(out / "report.json", as_json(measured, prices))
    replace_file(out / "report.html", _page(measured, shared, of_lms, of_ways, prices).encode())
    return out / "report.html"


def as_json(measured: Sequence[MeasuredLM], prices: Prices | None) -> dict[str, Any]:
    """Every number of the page; what was not measured is null."""
    by_lm: dict[str, Any] = {}
    for lm in measured:
        ways = {}
        for way in lm.ways:
            policies = []
            for one in way.compared:
                dollars = {"dollars per 1,000": one.costs.dollars(prices)} if one.costs and prices else {}
                policies.append({**asdict(one), **dollars})
            ways[way.pair.name] = {
                "help and harm": [asdict(cell) for cell in way.cells],
                "popularity": [asdict(one) for one in way.bins],
                "thresholds by popularity": way.thresholds,
                "policies": policies,
            }
        by_lm[lm.name] = {
            "identity": lm.answered.identity,
            "n": len(lm.answered.ids),
            "accuracy": {name: asdict(one) for name, one in lm.accuracy.items()},
            "accuracy of the rarest 28%": {name: asdict(one) for name, one in lm.rarest.items()},
            "accuracy of the others": {name: asdict(one) for name, one in lm.others.items()},
            "popularity": [asdict(one) for one in lm.bins],
            "relative popularity": [asdict(one) for one in lm.relative_bins],
            "relations": [asdict(one) for one in lm.relations],
            "costs": {name: asdict(of.costs().mean()) for name, of in lm.answered.methods.items()},
            "ways": ways,
        }
    return {name: _finite(of) for name, of in by_lm.items()}


def _finite(value: Any) -> Any:
    """With null for NaN, which JSON has none of."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# The page ---------------------------------------------------------------------------------------------------------


def _page(
    measured: Sequence[MeasuredLM],
    shared: Sequence[Drawing],
    of_lms: Sequence[Sequence[Drawing]],
    of_ways: Sequence[Sequence[Sequence[Drawing]]],
    prices: Prices | None,
) -> str:
    """Show LMs side by side, then each LM's answers by popularity, and each way to answer with drawings and tables."""
    n, names = len(measured[0].answered.ids), ", ".join(escape(lm.name) for lm in measured)
    about = f"{n:,} questions, asked of {names}. The numbers of {paper.TITLE} are of far larger LMs and of Wikipedia."
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{TITLE}</title><style>{STYLE}</style>",
        f"<h1>{TITLE}</h1><p>{about}</p><div class=grid>{''.join(map(_figure, shared))}</div>",
    ]
    for lm, by_popularity, drawings in zip(measured, of_lms, of_ways, strict=True):
        ways = ""
        for way, some in zip(lm.ways, drawings, strict=True):
            first = named(way.pair.closed)
            title = escape(f"{first[0].upper()}{first[1:]} or {way.pair.augmented}")
            ways += (
                f"<h3>{title}</h3>{_cells_table(way)}<div class=grid>{''.join(map(_figure, some))}</div>"
                f"{_table(*comparison_table(way.compared, prices))}<p class=muted>{NOTE}</p>"
            )
        figures = "".join(map(_figure, by_popularity))
        parts.append(f"<h2>{escape(lm.name)}</h2><div class=grid>{figures}</div>{ways}")
    return "\n".join([*parts, _signals_section(measured)]) + "</html>\n"


def _figure(drawing: Drawing) -> str:
    return f"<figure>{drawing.svg}<figcaption>{escape(drawing.caption)}</figcaption></figure>"


def _cells_table(way: MeasuredWay) -> str:
    asked = [named(way.pair.closed), named(way.pair.augmented)]
    heads = [*asked, "questions", "share", "documents hold an answer", "paper: share", "recall@1"]
    rows = []
    for cell in way.cells:
        share, recall = paper.HELP_AND_HARM[cell.closed_right, cell.augmented_right]
        held = "" if cell.recall is None else f"{cell.recall:.2f}"
        both = [WORDS[cell.closed_right], WORDS[cell.augmented_right]]
        rows.append([*both, str(cell.n), f"{cell.share:.0%}", held, f"{share:.0%}", f"{recall:.2f}"])
    return _table(heads, rows) + (
        f"<p class=muted>{escape(way.pair.augmented)} harms in the second row and helps in the third. The paper's are "
        "davinci-003, closed book and with Contriever's first document.</p>"
    )


def _signals_section(measured: Sequence[MeasuredLM]) -> str:
    used = dict.fromkeys(one.signal for lm in measured for way in lm.ways for one in way.compared if one.signal)
    rows = [
        [
            name,
            SIGNALS[name].title,
            f"it is {SIGNALS[name].retrieves_when} the threshold",
            SIGNALS[name].known_from.value,
        ]
        for name in used
    ]
    return f"<h2>Signals</h2>{_table(['signal', 'what it is', 'retrieval is used', 'known from'], rows)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(one)}</td>' for one in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
