"""Compare policies of when to retrieve by the outcomes of PopQA (Mallen et al. 2023, section 5), and report them.

`replug report DIR... --policies OUT` reads finished evaluations and asks no LM. Folders of one LM may bring different
methods over the same questions; folders of other LMs stand beside them. For every pair of methods, one without
retrieval and one with it, policies by each signal in the outcomes are compared on the same splits of the questions
(`evals.thresholds`).

The page has tables and figures as the paper has them. `report.json` holds every number of the page by LM, and the
thresholds of every signal, fitted to all questions. The numbers of the paper are those of `paper` in the evaluations'
configurations.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import flatten, load_stored_evaluation_config
from replug.config.methods import GENREAD, NONE
from replug.data.files import replace_file, write_json
from replug.data.progress import Progress
from replug.evals.charts import Draw, bars, lines, to_svg
from replug.evals.folder import LM, EvaluationFolder
from replug.evals.intervals import Interval, holm, wilson_interval
from replug.evals.outcomes import OutcomeFile, Row
from replug.evals.tables import Block, Blocks, Html, Table, figure, grid, html_page
from replug.evals.thresholds import (
    ALWAYS,
    ALWAYS_RETRIEVE,
    MIN_QUESTIONS,
    NEVER,
    NEVER_RETRIEVE,
    NUM_RESAMPLES,
    ORACLE,
    Rule,
    Worth,
    accuracy_left_out,
    decisions,
    draw_splits,
    fit_thresholds,
    mean_over_splits,
    measure,
    rule_by,
    signal_auroc,
)
from replug.planning.model_sizes import known_parameters

log = logging.getLogger(__name__)

POPULARITY = "popularity"
COUNTED = ("lm_calls", "retriever_calls", "prompt_tokens", "generated_tokens")
BY_RELATION, POOLED = "by relation", "one for all"
# Keys of `questions` that do not say how a question is asked; inputs.json says which questions are asked.
FREE = ("questions.path", "questions.max_questions")

Pair = tuple[str, str]  # the names of a method without retrieval and of one with it
Numbers = Mapping[str, np.ndarray]  # a method's numbers of N questions by name, NaN where a question has none
Threshold = float | Literal["never", "always"]
Measured = dict[str, Any]  # what report.json holds of one LM, or of a pair of its methods
Figure = tuple[str, Draw, float, str]  # name, drawing, height, caption

ADAPTIVE = "adaptive "  # before the name of a pair of methods: its policy by popularity
MIN_DRAWN = 5  # questions: an accuracy of fewer says nothing, and its interval hides the others
COST_HEADS = {
    "lm_calls": ("LM calls", 2),
    "retriever_calls": ("searches", 2),
    "prompt_tokens": ("prompt tokens", 0),
    "generated_tokens": ("new tokens", 1),
}
NOTE = (
    "Each policy is fitted to 75% of the questions and measured on the others, in 100 random splits. Intervals are "
    "95%, by fitting anew in a bootstrap over questions. The gain is that over the better of never and always; its p "
    f"is Holm's, over the policies of the table. A relation with fewer than {MIN_QUESTIONS} questions to fit to has "
    "the threshold of all questions. AUROC: how well the signal separates right closed-book answers from wrong ones; "
    "0.5 is chance."
)


@dataclass(frozen=True, slots=True)
class Signal:
    """A number of a question by which retrieval is decided: below a threshold where `sign` is 1, above where it is -1.

    `known_from` says what the signal costs: nothing, an answer of the LM, or a search.
    """

    title: str
    sign: int
    known_from: Literal["the question", "the closed-book answer", "the search"]


# Documents are used where the LM is unsure, or where the retriever is sure of what it found.
SIGNALS = {
    POPULARITY: Signal("popularity of the subject", 1, "the question"),
    "mean_logprob": Signal("log-prob of the closed-book answer", 1, "the closed-book answer"),
    "mean_entropy": Signal("entropy of the closed-book answer", -1, "the closed-book answer"),
    "top_score": Signal("score of the first document", -1, "the search"),
}


def pair_name(pair: Pair) -> str:
    """Return the name of the second method, with the first one's before it unless that is closed book."""
    closed, augmented = pair
    return augmented if closed == NONE else f"{closed} + {augmented}"


# Outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnsweredQuestions:
    """One LM's answers to N questions: their ids and relations, and the numbers of each method.

    `config` is that of the first folder.
    """

    name: str
    identity: str
    config: EvaluationConfig
    ids: tuple[str, ...]
    relations: tuple[str, ...]
    methods: Mapping[str, Numbers]

    @property
    def popularity(self) -> np.ndarray:
        """Return the popularity of each subject, [N], the same under every method."""
        return self.methods[NONE][POPULARITY]

    def right(self, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
        """Return 0 or 1 for each question by the two methods, int64 [N] each."""
        closed, augmented = (self.methods[name]["accuracy"].astype(np.int64) for name in pair)
        return closed, augmented

    def signals(self, pair: Pair) -> dict[str, np.ndarray]:
        """Return the signals that any question has: values [N] in their own unit, NaN where a question has none."""
        signals = {}
        for name, signal in SIGNALS.items():
            source = pair[0] if signal.known_from == "the closed-book answer" else pair[1]
            values = self.methods[source].get(name)
            if values is not None and np.isfinite(values).any():
                signals[name] = values
        return signals

    def pairs(self) -> list[Pair]:
        """Return closed book with each other method, and GenRead with each that reads documents, as the paper does."""
        others = [method for method in self.methods if method != NONE]
        retrieving = [method for method in others if method != GENREAD]
        return [*((NONE, name) for name in others), *((GENREAD, name) for name in retrieving if GENREAD in others)]


def read_answered(folders: Sequence[EvaluationFolder]) -> list[AnsweredQuestions]:
    """Return what finished evaluations of the same questions hold, by LM in the order given.

    Raises UserError for an LM without closed-book answers or without others, and for folders of one LM that asked in
    different ways, or answer differently by one method.
    """
    by_lm: dict[str, list[EvaluationFolder]] = {}
    for folder in folders:
        by_lm.setdefault(str((folder.folder.inputs or {})[LM]), []).append(folder)
    lms = [_read(identity, own) for identity, own in by_lm.items()]
    names = [one.name for one in lms]  # one LM in two dtypes has one name
    return [replace(one, name=f"{one.name} {one.identity}") if names.count(one.name) > 1 else one for one in lms]


def _read(identity: str, folders: Sequence[EvaluationFolder]) -> AnsweredQuestions:
    configs = [load_stored_evaluation_config(folder.config) for folder in folders]
    rows_of = [{row["id"]: row for row in reversed(OutcomeFile(folder.outcomes).rows)} for folder in folders]
    ids = tuple(reversed(rows_of[0]))
    if len(ids) < 2:
        raise UserError(f"{folders[0].path} asked one question; expected two or more: to fit to and to measure")
    methods: dict[str, Numbers] = {}
    source: dict[str, EvaluationFolder] = {}
    for folder, config, rows in zip(folders, configs, rows_of, strict=True):
        first_keys, keys = flatten(configs[0]), flatten(config)
        for key in first_keys:
            is_asked = (key == "seed" or key.startswith("questions.")) and key not in FREE
            if is_asked and first_keys[key] != keys[key]:
                raise UserError(
                    f"{key} is {first_keys[key]} in {folders[0].path}, but {keys[key]} in {folder.path}: expected "
                    "questions that were asked in one way"
                )
        for method in rows[ids[0]]["methods"]:
            numbers = _numbers([rows[name] for name in ids], method)
            if method in methods and not np.array_equal(methods[method]["accuracy"], numbers["accuracy"]):
                raise UserError(
                    f"{method} answers differently in {source[method].path} and in {folder.path}; expected a method "
                    "once for each LM: leave one of the folders out"
                )
            methods.setdefault(method, numbers)
            source.setdefault(method, folder)
    lm = configs[0].lm
    name = lm.model or Path(str(lm.path)).name.rpartition(":")[2]
    if NONE not in methods or len(methods) == 1:
        raise UserError(
            f"the outcomes of {name} are of {', '.join(methods)}; expected {NONE}, and a method with documents"
        )
    relations = tuple(rows_of[0][name]["group"] for name in ids)
    return AnsweredQuestions(name, identity, configs[0], ids, relations, methods)


def _numbers(rows: Sequence[Row], method: str) -> dict[str, np.ndarray]:
    outcomes = [row["methods"][method]["numbers"] for row in rows]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome)
    return {name: np.array([outcome.get(name, np.nan) for outcome in outcomes], np.float64) for name in names}


# Policies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy on the same splits as all others: never, always, the name of a signal, or oracle.

    `thresholds` is BY_RELATION or POOLED, None where the policy has none. `costs` are None for the oracle, which nobody
    can follow. `auroc` says how well the signal separates right closed-book answers from wrong ones. `p_holm` is
    that of no gain, corrected for all policies by a signal; None for the others.
    """

    name: str
    thresholds: str | None
    worth: Worth
    costs: Mapping[str, float] | None
    auroc: Interval | None = None
    p_holm: float | None = None


def compare_policies(
    answered: AnsweredQuestions, pair: Pair, num_resamples: int = NUM_RESAMPLES
) -> tuple[list[Compared], str]:
    """Return never, always, policies by each signal, and the oracle; and the better one of never and always.

    A signal has a threshold for each relation, where there are several, and one for all.
    """
    closed, augmented = answered.right(pair)
    signals, splits = answered.signals(pair), draw_splits(len(answered.ids))
    without, with_documents = (costs_of(answered.methods[name]) for name in pair)
    kinds = (BY_RELATION, POOLED) if len(set(answered.relations)) > 1 else (POOLED,)
    rules = {
        f"{name}, {kind}": (name, kind, _rule(answered, name, values, kind))
        for name, values in signals.items()
        for kind in kinds
    }
    worth, better = measure(
        {label: rule for label, (_, _, rule) in rules.items()}, closed, augmented, splits, num_resamples
    )
    aurocs = {name: signal_auroc(oriented(name, values), closed, num_resamples) for name, values in signals.items()}
    corrected = dict(zip(rules, holm([worth[label].p for label in rules]), strict=True))
    by_signal = []
    for label, (name, kind, rule) in rules.items():
        retrieved = decisions(rule, closed, augmented, splits)
        own = policy_costs(without, with_documents, name, retrieved, splits)
        by_signal.append(Compared(name, kind, worth[label], own, aurocs[name], corrected[label]))
    means = [{name: float(values.mean()) for name, values in costs.items()} for costs in (without, with_documents)]
    compared = [
        Compared(NEVER_RETRIEVE, None, worth[NEVER_RETRIEVE], means[0]),
        Compared(ALWAYS_RETRIEVE, None, worth[ALWAYS_RETRIEVE], means[1]),
        *by_signal,
        Compared(ORACLE, None, worth[ORACLE], None),
    ]
    return compared, better


def costs_of(numbers: Numbers) -> Numbers:
    """Return COUNTED of each question, [N]; NaN where a number is unknown."""
    unknown = np.full(len(numbers["accuracy"]), np.nan)
    return {name: numbers.get(name, unknown) for name in COUNTED}


def policy_costs(
    without: Numbers, with_documents: Numbers, signal: str, retrieved: np.ndarray, splits: np.ndarray
) -> dict[str, float]:
    """Return the costs of a policy that retrieves where `retrieved` [S, N] says, over what `splits` leave to measure.

    A question that retrieves pays for the closed-book answer too, where the signal is known from it; one that does not
    retrieve pays for the search, where the signal is the retriever's.
    """
    known_from = SIGNALS[signal].known_from
    if known_from == "the closed-book answer":
        with_documents = {name: values + without[name] for name, values in with_documents.items()}
    elif known_from == "the search":
        searches = without["retriever_calls"] + with_documents["retriever_calls"]
        without = {**without, "retriever_calls": searches}
    each = {name: np.where(retrieved, with_documents[name], without[name]) for name in without}
    return {name: mean_over_splits(values, splits) for name, values in each.items()}


def accuracy_by_popularity_policy(answered: AnsweredQuestions, pair: Pair) -> np.ndarray:
    """Return how often each question is right, [N], by thresholds for each relation fitted to others; NaN if never."""
    (closed, augmented), splits = answered.right(pair), draw_splits(len(answered.ids))
    rule = _rule(answered, POPULARITY, answered.popularity, BY_RELATION)
    return accuracy_left_out(closed, augmented, decisions(rule, closed, augmented, splits), splits)


def _rule(answered: AnsweredQuestions, signal: str, values: np.ndarray, kind: str) -> Rule:
    return rule_by(oriented(signal, values), answered.relations if kind == BY_RELATION else None)


def oriented(signal: str, values: np.ndarray) -> np.ndarray:
    """Return values [N] turned so that retrieval is used below a threshold; -inf where a question has none."""
    return np.where(np.isnan(values), NEVER, SIGNALS[signal].sign * values)


def thresholds_of(answered: AnsweredQuestions, pair: Pair, signal: str) -> dict[str, Threshold]:
    """Return the thresholds, fitted to all questions, of relations with questions enough, and that of `others`.

    They are in the signal's unit, or "never" or "always".
    """
    values, right, sign = answered.signals(pair)[signal], answered.right(pair), SIGNALS[signal].sign
    by_relation = fit_thresholds(_rule(answered, signal, values, BY_RELATION), *right)
    pooled = fit_thresholds(_rule(answered, signal, values, POOLED), *right)[""]
    return {
        relation: "never" if threshold == NEVER else "always" if threshold == ALWAYS else sign * threshold
        for relation, threshold in {**by_relation, "others": pooled}.items()
    }


# The report ---------------------------------------------------------------------------------------------------------


def write_report(lms: Sequence[AnsweredQuestions], out: Path, num_resamples: int = NUM_RESAMPLES) -> dict[str, Blocks]:
    """Write figures, report.json, and last report.html; return the sections of the page."""
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress("policies compared", sum(len(answered.pairs()) for answered in lms))
    measured = {answered.name: measure_lm(answered) for answered in lms}
    for answered in lms:
        for pair in answered.pairs():
            of = measure_pair(answered, pair, num_resamples)
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
    sections: dict[str, Blocks] = {"": [about, shown(figures_of_all(measured))]}
    for answered in lms:
        for name, of in measured[answered.name]["pairs"].items():
            drawn = shown([figure_of_pair(answered, name, of)])
            sections[f"{answered.name}: {of['closed']} or {of['augmented']}"] = [drawn, *_pair_blocks(answered, of)]
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
        "parameters": known_parameters(answered.config.lm),
        "popularity": accuracy_by_popularity(answered, per_power=1),
        "relations": [
            {"relation": name, "n": int(own.sum()), "accuracy": accuracies(answered, own)} for name, own in of_relations
        ],
        "pairs": {},
    }


def measure_pair(answered: AnsweredQuestions, pair: Pair, num_resamples: int = NUM_RESAMPLES) -> Measured:
    """Return what report.json holds of a method without retrieval and one with it."""
    compared, better = compare_policies(answered, pair, num_resamples)
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


def figures_of_all(measured: Mapping[str, Measured]) -> list[Figure]:
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
        caption = f"Closed book, a line for each range of {SIGNALS[POPULARITY].title} (figure 6)."
        figures.append(("sizes", partial(_draw_sizes, measured=measured, sizes=sizes), 3.8, caption))
    return figures


def _adaptive(lm: Measured) -> dict[str, Interval]:
    """Return the accuracy of the paper's policy by pair: by popularity, for each relation where there are several."""
    return {
        f"{ADAPTIVE}{pair}": next(one.worth.accuracy for one in of["policies"] if one.name == POPULARITY)
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
    draw = partial(_draw_popularity, bins=of["popularity"], label=SIGNALS[POPULARITY].title)
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
    yield comparison_table(of)
    if unsure := _without_gain(of["policies"]):
        yield f"No gain is shown (its interval holds 0) of: {unsure}."
    rules = [
        f"{relation}: {rule if isinstance(rule, str) else f'below {rule:g}'}"
        for relation, rule in of["thresholds"][POPULARITY].items()
    ]
    yield f"The policy by popularity retrieves by relation: {'; '.join(rules)}."
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
