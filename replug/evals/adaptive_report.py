"""Report when retrieval helps: a page of tables and figures as Mallen et al. 2023 have them, and its numbers as JSON.

`report.json` holds every number of the page by LM, and the thresholds of every signal, fitted to all questions. The
numbers of the paper beside them are those of `paper` in the evaluations' configurations.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from matplotlib.axes import Axes

from replug.config.methods import NONE
from replug.data.files import replace_file, write_json
from replug.data.progress import Progress
from replug.data.rows import one_line
from replug.evals.adaptive import (
    FREQUENCY,
    POPULARITY,
    SIGNALS,
    AnsweredQuestions,
    Compared,
    Pair,
    Prices,
    accuracy_by_popularity_policy,
    compare_policies,
    pair_name,
    thresholds_of,
)
from replug.evals.charts import Draw, bars, lines, to_svg
from replug.evals.intervals import Interval, wilson_interval
from replug.evals.tables import Block, Blocks, Html, Table, figure, grid, html_page
from replug.evals.thresholds import MIN_QUESTIONS, NUM_RESAMPLES

log = logging.getLogger(__name__)

Measured = dict[str, Any]  # what report.json holds of one LM, or of a pair of its methods
Figure = tuple[str, Draw, float, str]  # name, drawing, height, caption

ADAPTIVE = "adaptive "  # before the name of a pair of methods: its policy by popularity
SCALES = {POPULARITY: "popularity of the subject", FREQUENCY: "documents that name the subject"}
MIN_DRAWN = 5  # questions: an accuracy of fewer says nothing, and its interval hides the others
NUM_SHOWN, NUM_REFERENCES = 4, 3  # questions that only one method answers right, and accepted answers of each
COST_HEADS = {
    "lm_calls": ("LM calls", 2),
    "retriever_calls": ("searches", 2),
    "prompt_tokens": ("prompt tokens", 0),
    "generated_tokens": ("new tokens", 1),
    "dollars": ("dollars per 1,000", 2),
}
NOTE = (
    "Each policy is fitted to 75% of the questions and measured on the others, in 100 random splits. Intervals are "
    "95%, by fitting anew in a bootstrap over questions. The gain is that over the better of never and always; its p "
    f"is Holm's, over the policies of the table. A relation with fewer than {MIN_QUESTIONS} questions to fit to has "
    "the threshold of all questions. AUROC: how well the signal separates right closed-book answers from wrong ones; "
    "0.5 is chance."
)


def write_report(
    lms: Sequence[AnsweredQuestions], out: Path, prices: Prices | None = None, num_resamples: int = NUM_RESAMPLES
) -> dict[str, Blocks]:
    """Write figures, report.json, and last report.html; return the sections of the page."""
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress("policies compared", sum(len(answered.pairs()) for answered in lms))
    measured = {answered.name: measure_lm(answered) for answered in lms}
    for answered in lms:
        for pair in answered.pairs():
            of = measure_pair(answered, pair, num_resamples, prices)
            measured[answered.name]["pairs"][pair_name(pair)] = of
            if unsure := _without_gain(of["policies"]):
                log.warning(
                    f"{answered.name}, {pair_name(pair)}: policies by {unsure} may gain nothing over {of['better']}"
                )
            progress.advance()

    def shown(drawings: Sequence[Figure]) -> Html:
        figures = []
        for name, draw, height, caption in drawings:
            svg = to_svg(draw, 7.0, height)
            replace_file(out / f"{name}.svg", svg.encode())
            figures.append(figure(svg, caption))
        return grid(figures)

    about = f"{len(lms[0].ids):,} questions, asked of {', '.join(measured)}."
    sections: dict[str, Blocks] = {"": [about, shown(figures_of_all(measured, lms[0].popularity_signal))]}
    for answered in lms:
        for name, of in measured[answered.name]["pairs"].items():
            drawn = shown([figure_of_pair(answered, name, of)])
            sections[f"{answered.name}: {of['closed']} or {of['augmented']}"] = [drawn, *_pair_blocks(answered, of)]
    signals = [
        [name, signal.title, "below" if signal.sign > 0 else "above", signal.known_from]
        for name, signal in SIGNALS.items()
    ]
    sections["Signals"] = [Table(["signal", "what it is", "retrieval is used", "known from"], signals)]
    papers: dict[tuple[str, str, str], None] = {}  # the configurations' figures, each once
    for paper in (answered.config.paper for answered in lms):
        for group, values in {"accuracy": paper.values, **paper.groups}.items():
            papers |= {(paper.table or "", f"{group}: {name}", f"{value:g}"): None for name, value in values.items()}
    if papers:
        sections["The paper"] = [
            "Mallen et al. asked far larger LMs all 14,282 questions, with passages of Wikipedia.",
            Table(["table", "what", "value"], list(papers)),
        ]
    write_json(out / "report.json", _json(measured))
    replace_file(out / "report.html", html_page("When to retrieve", sections).encode())
    return sections


# Measuring --------------------------------------------------------------------------------------------------------


def measure_lm(answered: AnsweredQuestions) -> Measured:
    everything, relations = np.ones(len(answered.ids), dtype=bool), np.array(answered.relations)
    of_relations = [(relation, relations == relation) for relation in sorted(set(answered.relations))]
    return {
        "identity": answered.identity,
        "n": len(answered.ids),
        "accuracy": accuracies(answered, everything),
        "parameters": answered.parameters,
        "popularity": accuracy_by_popularity(answered, per_power=1),
        "relations": [
            {"relation": name, "n": int(own.sum()), "accuracy": accuracies(answered, own)} for name, own in of_relations
        ],
        "pairs": {},
    }


def measure_pair(
    answered: AnsweredQuestions, pair: Pair, num_resamples: int = NUM_RESAMPLES, prices: Prices | None = None
) -> Measured:
    """Return what report.json holds of a method without retrieval and one with it."""
    compared, better = compare_policies(answered, pair, num_resamples, prices)
    return {
        "closed": pair[0],
        "augmented": pair[1],
        "help and harm": help_and_harm(answered, pair),
        "popularity": accuracy_by_popularity(answered, per_power=2, pair=pair),
        "thresholds": {signal: thresholds_of(answered, pair, signal) for signal in answered.signals(pair)},
        "better": better,
        "policies": compared,
    }


def accuracies(answered: AnsweredQuestions, among: np.ndarray) -> dict[str, Interval | float]:
    """Return the accuracy by method among the questions bool [N], with Wilson's intervals."""
    num = int(among.sum())
    return {name: wilson_interval(float(of["accuracy"][among].sum()), num) for name, of in answered.methods.items()}


def help_and_harm(answered: AnsweredQuestions, pair: Pair) -> list[Measured]:
    """Return the four cells of right and wrong (table 1): retrieval harms in the second, helps in the third.

    `recall` is the share whose documents hold an answer; None without questions, or where nothing says what documents
    hold.
    """
    holds, right = answered.methods[pair[1]].get("answer_recall"), answered.right(pair)
    cells = []
    for closed, augmented in ((True, True), (True, False), (False, True), (False, False)):
        own = (right[0] == closed) & (right[1] == augmented)
        recall = float(holds[own].mean()) if holds is not None and own.any() else None
        cell = {"closed_right": closed, "augmented_right": augmented, "n": int(own.sum())}
        cells.append({**cell, "share": float(own.mean()), "recall": recall})
    return cells


def accuracy_by_popularity(answered: AnsweredQuestions, per_power: int, pair: Pair | None = None) -> list[Measured]:
    """Return the accuracy by method in bins of popularity that hold questions: powers of ten, or parts of these.

    A popularity below 1 counts as 1. A pair also has the accuracy of its policy by popularity, a mean over splits.
    """
    popularity = np.maximum(answered.popularity, 1)
    edges = 10 ** (np.arange(0, per_power * np.ceil(np.log10(popularity.max() + 1)) + 1) / per_power)
    places = np.searchsorted(edges, popularity, side="right") - 1
    policy = accuracy_by_popularity_policy(answered, pair) if pair else np.full(len(popularity), np.nan)
    bins = []
    for place in np.unique(places):
        own = places == place
        accuracy = {name: of for name, of in accuracies(answered, own).items() if pair is None or name in pair}
        if pair and not np.isnan(policy[own]).all():
            accuracy[f"{ADAPTIVE}{pair_name(pair)}"] = float(np.nanmean(policy[own]))
        ends = {"low": float(edges[place]), "high": float(edges[place + 1])}
        bins.append({**ends, "n": int(own.sum()), "accuracy": accuracy})
    return bins


def _without_gain(compared: Sequence[Compared]) -> str:
    """Name the signals whose policy, by relation where there are several, has a gain whose interval holds 0."""
    kept = {one.name: one for one in reversed(compared) if one.thresholds}
    return ", ".join(name for name, one in reversed(kept.items()) if one.worth.gain.low <= 0)


def _json(value: Any) -> Any:
    """Return what JSON can hold; null is NaN, which was not measured."""
    if is_dataclass(value) and not isinstance(value, type):
        return _json(asdict(value))
    if isinstance(value, Mapping):
        return {name: _json(of) for name, of in value.items()}
    if isinstance(value, list):
        return [_json(of) for of in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# Figures ----------------------------------------------------------------------------------------------------------


def figures_of_all(measured: Mapping[str, Measured], signal: str) -> list[Figure]:
    """Return the figures in which LMs stand side by side; the last where LMs of several sizes are known."""
    accuracy = {name: {**lm["accuracy"], **_adaptive(lm)} for name, lm in measured.items()}
    adaptive = {name for of in accuracy.values() for name in of if name.startswith(ADAPTIVE)}
    draw = partial(bars, groups=accuracy, label="right answers", is_share=True, hatched=adaptive)
    figures: list[Figure] = [("accuracy", draw, 3.6, "Every method, and policies by popularity (hatched).")]
    by_relation: dict[str, dict[str, Interval]] = {}
    for name, lm in measured.items():
        for of in lm["relations"]:
            by_relation.setdefault(of["relation"], {})[name] = of["accuracy"][NONE]
    draw = partial(bars, groups=by_relation, label="right answers", horizontal=True, is_share=True)
    caption = "Closed book, by relation, with Wilson's 95% intervals (figure 4)."
    figures.append(("relations", draw, 1.4 + 0.28 * len(by_relation), caption))
    sizes = {name: lm["parameters"] for name, lm in measured.items()}
    if None not in sizes.values() and len(set(sizes.values())) > 1:
        caption = f"Closed book, a line for each range of {SCALES[signal]} (figure 6)."
        figures.append(("sizes", partial(_draw_sizes, measured=measured, sizes=sizes), 3.8, caption))
    return figures


def _adaptive(lm: Measured) -> dict[str, Interval]:
    """Return the accuracy of the paper's policy by pair: by popularity, for each relation where there are several."""
    return {
        f"{ADAPTIVE}{pair}": next(one.worth.accuracy for one in of["policies"] if one.name in SCALES)
        for pair, of in lm["pairs"].items()
    }


def _draw_sizes(axes: Axes, measured: Mapping[str, Measured], sizes: Mapping[str, float]) -> None:
    points: dict[str, list[tuple[float, Interval]]] = {}
    for name in sorted(measured, key=lambda name: sizes[name]):
        for of in (of for of in measured[name]["popularity"] if of["n"] >= MIN_DRAWN):
            series = points.setdefault(f"{of['low']:,.0f} to {of['high']:,.0f}", [])
            series.append((sizes[name] / 1e6, of["accuracy"][NONE]))
    lines(axes, points, "parameters of the LM, millions", "right answers", log_x=True, is_share=True)
    axes.set_xticks([size / 1e6 for size in sizes.values()])


def figure_of_pair(answered: AnsweredQuestions, name: str, of: Measured) -> Figure:
    """Return the figure of two methods and their policy over popularity (figure 1)."""
    draw = partial(_draw_popularity, bins=of["popularity"], label=SCALES[answered.popularity_signal])
    caption = "Two methods, and a policy by popularity on questions left out of fitting (dashed); Wilson's intervals."
    return f"adaptive_{slug(name)}_{slug(answered.name)}", draw, 3.8, caption


def _draw_popularity(axes: Axes, bins: Sequence[Measured], label: str) -> None:
    """Draw a line for each method, at places that are moved a little so that intervals do not hide each other."""
    methods = list(dict.fromkeys(method for of in bins for method in of["accuracy"]))
    points = {
        method: [
            (math.sqrt(of["low"] * of["high"]) * 1.06 ** (number - (len(methods) - 1) / 2), of["accuracy"][method])
            for of in bins
            if of["n"] >= MIN_DRAWN and method in of["accuracy"]
        ]
        for number, method in enumerate(methods)
    }
    # A logarithmic scale needs limits where no bin has questions enough to be drawn.
    axes.set_xlim(bins[0]["low"], bins[-1]["high"])
    dashed = [method for method in methods if method.startswith(ADAPTIVE)]
    lines(axes, points, label, "right answers", log_x=True, is_share=True, dashed=dashed)


def slug(name: str) -> str:
    """Return a part of a file's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)


# Tables -----------------------------------------------------------------------------------------------------------


def _pair_blocks(answered: AnsweredQuestions, of: Measured) -> Iterator[Block]:
    right = {True: "right", False: "wrong"}
    yield Table(
        [of["closed"], of["augmented"], "questions", "share", "documents hold an answer"],
        [
            [
                right[cell["closed_right"]],
                right[cell["augmented_right"]],
                str(cell["n"]),
                f"{cell['share']:.0%}",
                "" if cell["recall"] is None else f"{cell['recall']:.2f}",
            ]
            for cell in of["help and harm"]
        ],
    )
    yield f"{of['augmented']} harms in the second row and helps in the third."
    yield from example_blocks(answered, (of["closed"], of["augmented"]))
    yield comparison_table(of)
    if unsure := _without_gain(of["policies"]):
        yield f"No gain is shown (its interval holds 0) of: {unsure}."
    signal = answered.popularity_signal
    rules = [
        f"{relation}: {rule if isinstance(rule, str) else f'below {rule:g}'}"
        for relation, rule in of["thresholds"][signal].items()
    ]
    yield f"The policy by {signal} retrieves by relation: {'; '.join(rules)}."
    yield NOTE


def comparison_table(of: Measured) -> Table:
    """Show a policy a row; a column that nobody measured is left out."""
    head = ["policy", "accuracy", f"gain over {of['better']}", "p (Holm)", "retrieves", "AUROC"]
    head += [name for name, _ in COST_HEADS.values()]
    rows = []
    for policy in of["policies"]:
        costs = policy.costs or {}
        known = {name: value for name, value in costs.items() if not math.isnan(value)}
        rows.append(
            [
                f"{policy.name}, {policy.thresholds}" if policy.thresholds else policy.name,
                _interval_text(policy.worth.accuracy),
                "" if policy.name == of["better"] else _interval_text(policy.worth.gain, "+"),
                "" if policy.p_holm is None else f"{policy.p_holm:.3f}",
                f"{policy.worth.share.value:.0%}",
                _interval_text(policy.auroc),
                *(f"{known[name]:,.{digits}f}" if name in known else "" for name, (_, digits) in COST_HEADS.items()),
            ]
        )
    shown = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return Table([head[column] for column in shown], [[row[column] for column in shown] for row in rows])


def _interval_text(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return ""
    return f"{interval.value:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def example_blocks(answered: AnsweredQuestions, pair: Pair) -> Iterator[Block]:
    """Yield questions that only the first method answers right, and ones of the second's (tables 3 and 4)."""
    paths = [answered.folders[name].examples for name in pair]
    right = answered.right(pair)
    for winner, verb in ((0, "harms"), (1, "helps")):
        rows = np.flatnonzero((right[winner] == 1) & (right[1 - winner] == 0))
        if not len(rows) or not all(path.is_file() for path in paths):
            continue
        places = np.linspace(0, len(rows) - 1, min(NUM_SHOWN, len(rows))).round().astype(int)
        ids = [answered.ids[row] for row in rows[places].tolist()]
        yield f"{pair[1]} {verb} {len(rows)} questions, which only {pair[winner]} answers right; {len(ids)} of them:"
        closed, augmented = (_examples(path, name, ids) for path, name in zip(paths, pair, strict=True))
        table = []
        for name in ids:
            accepted = "; ".join(closed[name]["references"][:NUM_REFERENCES])
            question = f"{one_line(closed[name]['question'])} ({accepted})"
            table.append([name, question, closed[name]["answer"], augmented[name]["answer"]])
        yield Table(["id in examples.parquet", "question (answers)", *pair], table)


def _examples(path: Path, method: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    rows = pq.read_table(path, filters=[("id", "in", list(ids)), ("method", "=", method)]).to_pylist()
    return {row["id"]: row for row in rows}
