"""Report when retrieval helps: a page, its numbers as JSON, every figure as a file, and the policies that were fitted.

`report.json` holds every number of the page, by LM, and `policies/LM/METHOD_SIGNAL.json` the policies, which
`replug ask --policy` follows.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.data.files import replace_file, write_json
from replug.data.progress import Progress
from replug.evals.adaptive import (
    AnsweredQuestions,
    Compared,
    Costs,
    Pair,
    Prices,
    accuracy_by_popularity_policy,
    compare_policies,
    fit_policy,
    pair_name,
    prompts_of,
    retriever_identity,
    thresholds_of,
)
from replug.evals.adaptive_examples import example_blocks
from replug.evals.adaptive_figures import (
    ADAPTIVE,
    PAPER,
    Figures,
    Measured,
    figures_by_popularity,
    figures_of_all,
    figures_of_lm,
    figures_of_way,
    slug,
)
from replug.evals.charts import to_svg
from replug.evals.intervals import Interval, wilson_interval
from replug.evals.popqa_sets import popularity_correlation
from replug.evals.tables import Block, Blocks, Html, Table, figure, grid, html_page
from replug.evals.thresholds import MIN_QUESTIONS, NUM_RESAMPLES
from replug.models.policy import SIGNALS, Threshold

log = logging.getLogger(__name__)

COST_HEADS = {
    "lm_calls": ("LM calls", 2),
    "retriever_calls": ("searches", 2),
    "prompt_tokens": ("prompt tokens", 0),
    "generated_tokens": ("new tokens", 1),
    "seconds": ("seconds", 2),
    "dollars": ("dollars per 1,000", 2),
}
NOTE = (
    "Each policy is fitted to 75% of the questions and measured on the others, in 100 random splits. Intervals are "
    "95%, by fitting anew in a bootstrap over questions. The gain is that over the better of never and always; its p "
    f"is Holm's, over the policies of the table. A relation with fewer than {MIN_QUESTIONS} questions to fit to has "
    "the threshold of all questions. AUROC: how well the signal separates right closed-book answers from wrong ones; "
    "0.5 is chance."
)

# Mallen et al., table 1: (closed book is right, the answer with Contriever-MS MARCO's document is) -> share, recall@1.
PAPER_HELP_AND_HARM = {
    (True, True): (0.24, 0.83),
    (True, False): (0.10, 0.14),
    (False, True): (0.17, 0.88),
    (False, False): (0.49, 0.11),
}


def write_report(
    lms: Sequence[AnsweredQuestions], out: Path, prices: Prices | None = None, num_resamples: int = NUM_RESAMPLES
) -> dict[str, Blocks]:
    """Write policies, figures, report.json, and last report.html; return the sections of the page."""
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress("policies compared", sum(len(answered.pairs()) for answered in lms))
    measured: dict[str, Measured] = {}
    for answered in lms:
        measured[answered.name] = _measure_lm(answered, prices)
        for pair in answered.pairs():
            compared, better = compare_policies(answered, pair, num_resamples, prices)
            measured[answered.name]["ways"][pair_name(pair)] = {
                "closed": pair[0],
                "augmented": pair[1],
                "help and harm": help_and_harm(answered, pair),
                "popularity": policy_by_popularity(answered, pair),
                "thresholds by popularity": _popularity_thresholds(answered, pair),
                "better": better,
                "policies": compared,
            }
            _write_policies(answered, pair, compared, better, out / "policies" / slug(answered.name))
            progress.advance()

    def shown(drawings: Figures) -> Html:
        figures = []
        for name, draw, height, caption in drawings:
            svg = to_svg(draw, 7.0, height)
            replace_file(out / f"{name}.svg", svg.encode())
            said = f"{caption} The paper: {PAPER[name]}" if name in PAPER else caption
            figures.append(figure(svg, said))
        return grid(figures)

    names = ", ".join(measured)
    about = f"{len(lms[0].ids):,} questions, asked of {names}. The paper's LMs are far larger; it has Wikipedia."
    by_popularity = figures_by_popularity(measured, lms[0].popularity_signal)
    drawn = [*figures_of_all(measured, prices), *by_popularity]
    sections: dict[str, Blocks] = {"": [about, shown(iter(drawn))]}
    for answered in lms:
        lm = measured[answered.name]
        sections[answered.name] = [shown(figures_of_lm(answered.name, lm, answered.popularity_signal))]
        for name, way in lm["ways"].items():
            title = f"{answered.name}: {way['closed']} or {way['augmented']}"
            rules = [
                f"{relation}: {rule if isinstance(rule, str) else f'below {rule:g}'}"
                for relation, rule in way["thresholds by popularity"].items()
            ]
            sections[title] = [
                *_help_and_harm_blocks(way),
                *example_blocks(answered, (way["closed"], way["augmented"])),
                shown(figures_of_way(answered, name, way)),
                comparison_table(way),
                *(
                    [f"No gain is shown (its interval holds 0) of: {unsure}."]
                    if (unsure := _without_gain(way["policies"]))
                    else []
                ),
                f"The policy by {answered.popularity_signal} retrieves by relation: {'; '.join(rules)}.",
                NOTE,
            ]
    sections["Signals"] = [_signals_table(measured)]
    write_json(out / "report.json", _json(measured))
    replace_file(out / "report.html", html_page("When to retrieve", sections).encode())
    return sections


# Measuring --------------------------------------------------------------------------------------------------------


def _measure_lm(answered: AnsweredQuestions, prices: Prices | None) -> Measured:
    everything = np.ones(len(answered.ids), dtype=bool)
    return {
        "identity": answered.identity,
        "n": len(answered.ids),
        "accuracy": accuracies(answered, everything),
        "parameters": answered.parameters,
        "popularity": _by_popularity(answered, everything),
        "powers of popularity": _by_popularity(answered, everything, per_power=1),
        "relations": accuracy_by_relation(answered),
        "costs": {name: method.mean_costs(prices) for name, method in answered.methods.items()},
        "ways": {},
    }


def _write_policies(
    answered: AnsweredQuestions, pair: Pair, compared: Sequence[Compared], better: str, folder: Path
) -> None:
    """Write the policy of each signal; none where the index or the documents of the evaluation are gone."""
    method = answered.methods[pair[1]]
    try:
        retriever = retriever_identity(pair[1], method.config, method.folder)
        prompts_of(answered, pair)
    except UserError as error:
        log.warning(f"no policy of {pair_name(pair)} is written: {error}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    if unsure := _without_gain(compared):
        log.warning(
            f"{answered.name}, {pair_name(pair)}: policies by {unsure} may gain nothing over {better} (the interval of "
            "the gain holds 0); see report.html before you use them"
        )
    for signal in answered.signals(pair):
        policy = fit_policy(answered, pair, signal, retriever, compared)
        policy.save(folder / f"{slug(pair_name(pair))}_{signal}.json")


def _popularity_thresholds(answered: AnsweredQuestions, pair: Pair) -> dict[str, Threshold]:
    """Return the thresholds of relations with questions enough, and that of all others."""
    by_relation, pooled = thresholds_of(answered, pair, answered.popularity_signal)
    return {**by_relation, "others": pooled}


def _without_gain(compared: Sequence[Compared]) -> str:
    """Name the signals whose policy, as it is kept, may gain nothing: its interval holds 0, or lies below."""
    kept = {one.name: one for one in reversed(compared) if one.thresholds}  # by relation where there are several
    return ", ".join(name for name, one in reversed(kept.items()) if one.worth.gain.low <= 0)


def accuracies(answered: AnsweredQuestions, among: np.ndarray) -> dict[str, Interval]:
    """Return the accuracy by method among the questions bool [N], with Wilson's intervals."""
    num = int(among.sum())
    return {name: wilson_interval(float(of.accuracy[among].sum()), num) for name, of in answered.methods.items()}


def help_and_harm(answered: AnsweredQuestions, pair: Pair) -> list[dict[str, Any]]:
    """Return the four cells of right and wrong (table 1): retrieval harms in the second, helps in the third.

    `recall` is the share whose documents hold an answer; None without questions, or where nothing says what documents
    hold.
    """
    held, right = answered.methods[pair[1]].numbers.get("answer_recall"), answered.right(pair)
    cells = []
    for closed, augmented in PAPER_HELP_AND_HARM:
        own = (right[0] == closed) & (right[1] == augmented)
        recall = float(held[own].mean()) if held is not None and own.any() else None
        cell = {"closed_right": closed, "augmented_right": augmented, "n": int(own.sum())}
        cells.append({**cell, "share": float(own.mean()), "recall": recall})
    return cells


def policy_by_popularity(answered: AnsweredQuestions, pair: Pair) -> list[dict[str, Any]]:
    """Return by popularity the accuracy of two methods and of their policy, which is a mean over splits."""
    right = accuracy_by_popularity_policy(answered, pair)
    bins = []
    for ends, own in _bins(answered):
        accuracy: dict[str, Interval | float] = {name: accuracies(answered, own)[name] for name in pair}
        measured = right[own & ~np.isnan(right)]
        if len(measured):
            accuracy[f"{ADAPTIVE}{pair_name(pair)}"] = float(measured.mean())
        bins.append({**ends, "accuracy": accuracy})
    return bins


def accuracy_by_relation(answered: AnsweredQuestions) -> list[dict[str, Any]]:
    """Return by relation the accuracy of each method, and its correlation with log popularity (figure 4)."""
    relations, found = np.array(answered.relations), []
    for relation in sorted(set(answered.relations)):
        own = relations == relation
        correlation = {
            name: popularity_correlation(answered.popularity[own], method.accuracy[own])
            for name, method in answered.methods.items()
        }
        of = {"relation": relation, "n": int(own.sum()), "accuracy": accuracies(answered, own)}
        found.append({**of, "correlation": correlation, "popularity": _by_popularity(answered, own)})
    return found


def _by_popularity(answered: AnsweredQuestions, among: np.ndarray, per_power: int = 2) -> list[dict[str, Any]]:
    """Return the bins of popularity that hold questions among these bool [N], with the accuracy by method."""
    bins = ((ends, own & among) for ends, own in _bins(answered, per_power))
    return [{**ends, "n": int(own.sum()), "accuracy": accuracies(answered, own)} for ends, own in bins if own.any()]


def _bins(answered: AnsweredQuestions, per_power: int = 2) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield bins of powers of ten, or parts of these: both ends, their number, and which questions, bool [N].

    A popularity below 1 counts as 1 (figures 1 and 5 have half powers).
    """
    popularity = np.maximum(answered.popularity, 1)
    edges = 10 ** (np.arange(0, per_power * np.ceil(np.log10(popularity.max() + 1)) + 1) / per_power)
    places = np.searchsorted(edges, popularity, side="right") - 1
    for place in np.unique(places):
        own = places == place
        yield {"low": float(edges[place]), "high": float(edges[place + 1]), "n": int(own.sum())}, own


def _json(value: Any) -> Any:
    """Return what JSON can hold; null is NaN, which was not measured."""
    if is_dataclass(value) and not isinstance(value, type):
        return _json(asdict(value))
    if isinstance(value, Mapping):
        return {name: _json(of) for name, of in value.items()}
    if isinstance(value, list):
        return [_json(of) for of in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# Tables -----------------------------------------------------------------------------------------------------------


def comparison_table(way: Measured) -> Table:
    """Show a policy a row; a column that nobody measured is left out."""
    head = ["policy", "accuracy", f"gain over {way['better']}", "p (Holm)", "retrieves", "AUROC"]
    rows = []
    for policy in way["policies"]:
        name = f"{policy.name}, {policy.thresholds}" if policy.thresholds else policy.name
        gain = "" if policy.name == way["better"] else _interval_text(policy.worth.gain, "+")
        p = "" if policy.p_holm is None else f"{policy.p_holm:.3f}"
        rows.append([name, _interval_text(policy.worth.accuracy), gain, p, f"{policy.worth.share.value:.0%}"])
        rows[-1] += [_interval_text(policy.auroc), *(_cost_text(policy.costs, cost) for cost in COST_HEADS)]
    head += [name for name, _ in COST_HEADS.values()]
    shown = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return Table([head[column] for column in shown], [[row[column] for column in shown] for row in rows])


def _interval_text(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return ""
    return f"{interval.value:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _cost_text(costs: Costs | None, name: str) -> str:
    value = math.nan if costs is None else costs.get(name, math.nan)
    return "" if math.isnan(value) else f"{value:,.{COST_HEADS[name][1]}f}"


def _help_and_harm_blocks(way: Measured) -> list[Block]:
    head = [
        way["closed"],
        way["augmented"],
        "questions",
        "share",
        "documents hold an answer",
        "paper: share",
        "recall@1",
    ]
    rows = []
    for cell in way["help and harm"]:
        right = cell["closed_right"], cell["augmented_right"]
        share, recall = PAPER_HELP_AND_HARM[right]
        held = "" if cell["recall"] is None else f"{cell['recall']:.2f}"
        said = ["right" if is_right else "wrong" for is_right in right]
        rows.append([*said, str(cell["n"]), f"{cell['share']:.0%}", held, f"{share:.0%}", f"{recall:.2f}"])
    note = (
        f"{way['augmented']} harms in the second row and helps in the third. The paper's shares are those of "
        "davinci-003, closed book and with the first document of Contriever-MS MARCO."
    )
    return [Table(head, rows), note]


def _signals_table(measured: Mapping[str, Measured]) -> Table:
    policies = [policy.name for lm in measured.values() for way in lm["ways"].values() for policy in way["policies"]]
    signals = [SIGNALS[name] for name in dict.fromkeys(policies) if name in SIGNALS]
    rows = [
        [signal.name, signal.title, f"it is {signal.retrieves_when} the threshold", signal.known_from.value]
        for signal in signals
    ]
    return Table(["signal", "what it is", "retrieval is used", "known from"], rows)
