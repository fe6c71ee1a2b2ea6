"""Draw when retrieval helps: the figures of Mallen et al. 2023 (1 and 4 to 11), with what the paper reports.

The paper's LMs are far larger, its corpus is Wikipedia, and it asks all 14,267 questions: GPT-3 davinci-003 zero-shot,
the open LMs 15-shot. OPT-13B's numbers are those that the official notebook prints (adaptive-retrieval.ipynb).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from replug.config.methods import NONE
from replug.evals.adaptive import FREQUENCY, POPULARITY, AnsweredQuestions, Compared, Prices
from replug.evals.charts import Draw, bars, lines
from replug.evals.intervals import Interval
from replug.models.policy import SIGNALS, Threshold

ADAPTIVE = "adaptive "  # before the name of a pair of methods: its policy by popularity
BEST = "best without a policy"
SCALES = {POPULARITY: "popularity of the subject", FREQUENCY: "documents that name the subject"}
MIN_QUESTIONS = 5  # an accuracy of fewer says nothing, and its interval hides the others
DOTS, RETRIEVES = "#2f3e46", "#5b8db8"

Measured = dict[str, Any]  # what report.json holds of one LM, or of two of its methods
Figures = Iterator[tuple[str, Draw, float, str]]  # name, drawing, height, caption

PAPER = {  # by figure, what the paper reports
    "accuracy": "davinci-003 is right for 34% closed book, for 41% with Contriever's first document; OPT-13B for "
    "17.2% closed book, and for 25.4% with BM25's.",
    "adaptive": "adaptive retrieval with davinci-003, GenRead where it knows and Contriever where it does not, is "
    "right for 46.5%, 5.3 points above the best way without a policy; OPT-13B, closed book or BM25, for 27.1%.",
    "rarest": "of the 4,000 rarest questions three LMs, from the smallest to davinci-003, know 15%, 16% and 19%.",
    "retrieved": "davinci-003 retrieves for 40% of the questions, OPT-13B with BM25 for 80%, GPT-NeoX for under 80%.",
    "cost_dollars": "dollars for 1,000 questions to davinci-003, from closed book to GenRead: 0.46, 3.08, 2.80, 3.25.",
}


def figures_of_all(measured: Mapping[str, Measured], prices: Prices | None) -> Figures:
    """Yield the figures in which LMs stand side by side."""
    share = partial(_bars, is_share=True)
    accuracy = {name: lm["accuracy"] for name, lm in measured.items()}
    yield "accuracy", partial(share, groups=accuracy, label="right answers"), 3.6, "Every method."
    adaptive, retrieved = {}, {}
    for name, lm in measured.items():
        policies = {f"{ADAPTIVE}{pair}": _by_popularity(way) for pair, way in lm["ways"].items()}
        best = max(lm["accuracy"].values(), key=lambda interval: interval.value)
        adaptive[name] = {BEST: best, **{policy: compared.worth.accuracy for policy, compared in policies.items()}}
        retrieved[name] = {policy.removeprefix(ADAPTIVE): compared.worth.share for policy, compared in policies.items()}
    yield "adaptive", partial(share, groups=adaptive, label="right answers"), 3.6, "Policies by popularity."
    rarest = {
        name: {"the rarest 28%": lm["accuracy of the rarest 28%"][NONE], "others": lm["accuracy of the others"][NONE]}
        for name, lm in measured.items()
    }
    yield "rarest", partial(share, groups=rarest, label="right answers, closed book"), 3.6, "What LMs know."
    said = "How many questions a policy by popularity retrieves for."
    yield "retrieved", partial(share, groups=retrieved, label="questions that retrieve"), 3.6, said
    height = 1.4 + 0.28 * len(next(iter(measured.values()))["relations"])
    draw = partial(share, groups=_by_relation(measured, "accuracy"), label="right answers", horizontal=True)
    yield "relations", draw, height, "Closed book, by relation, with Wilson's 95% intervals."
    correlations = _by_relation(measured, "correlation")
    draw = partial(_bars, groups=correlations, label="correlation of being right with log popularity", horizontal=True)
    said = "Closed book, by relation. Far to the right, answers are known of popular subjects alone."
    yield "correlation", draw, height, said
    labels = {"seconds": "seconds a question", "prompt_tokens": "prompt tokens a question"}
    if prices is not None:
        labels["dollars"] = "dollars for 1,000 questions"
    for cost, label in labels.items():
        costs = {name: known for name, lm in measured.items() if (known := _cost_bars(lm, cost))}
        if costs:
            said = "Each method for every question, and under a policy by popularity (adaptive)."
            yield f"cost_{cost}", partial(_bars, groups=costs, label=label), 3.6, said


def _by_popularity(way: Measured) -> Compared:
    """Return the paper's policy: by popularity, with a threshold for each relation where there are several."""
    found: Compared = next(policy for policy in way["policies"] if policy.name in SCALES)
    return found


def _by_relation(measured: Mapping[str, Measured], what: str) -> dict[str, dict[str, Any]]:
    """Return closed-book figures by relation and LM; what does not exist is left out."""
    groups: dict[str, dict[str, Any]] = {}
    for name, lm in measured.items():
        for relation in lm["relations"]:
            of_relation = groups.setdefault(relation["relation"], {})
            if relation[what][NONE] is not None:
                of_relation[name] = relation[what][NONE]
    return groups


def _cost_bars(lm: Measured, cost: str) -> dict[str, float]:
    """Return a cost by method and by policy; what was not measured is left out."""
    costs = {**lm["costs"], **{f"{ADAPTIVE}{name}": _by_popularity(way).costs for name, way in lm["ways"].items()}}
    return {name: of[cost] for name, of in costs.items() if not math.isnan(of[cost])}


def figures_of_lm(name: str, lm: Measured, signal: str) -> Figures:
    """Yield one LM's answers by popularity, among all questions and among those of the same relation."""
    said = "with Wilson's 95% intervals."
    by_popularity = partial(_draw_popularity, bins=lm["popularity"], label=SCALES[signal])
    yield f"popularity_{slug(name)}", by_popularity, 3.8, f"Right answers against popularity, {said}"
    label = "log popularity above its relation's mean, in standard deviations"
    relative = partial(_draw_popularity, bins=lm["relative popularity"], label=label, is_relative=True)
    said = f"Right answers against popularity among the questions of the same relation, {said}"
    yield f"relative_popularity_{slug(name)}", relative, 3.8, said


def figures_of_way(answered: AnsweredQuestions, name: str, way: Measured) -> Figures:
    """Yield two methods by popularity with their policy, what policies are worth, and where that one retrieves."""
    end, label = f"{slug(name)}_{slug(answered.name)}", SCALES[answered.popularity_signal]
    draw = partial(_draw_popularity, bins=way["popularity"], label=label)
    said = "Two methods, and a policy by popularity on questions left out of fitting (dashed)."
    yield f"adaptive_{end}", draw, 3.8, said
    policies = {policy.name for policy in way["policies"]}
    said = (
        "Policies on questions left out of fitting. The dotted line is the better of never and always; the oracle "
        "takes whichever answer is right."
    )
    yield f"policies_{end}", partial(_draw_policies, way=way), 0.9 + 0.5 * len(policies), said
    thresholds = way["thresholds by popularity"]
    draw = partial(_draw_thresholds, thresholds=thresholds, answered=answered, label=label)
    said = "Thresholds of a policy by popularity, fitted to all questions. A dot is a question."
    yield f"thresholds_{end}", draw, 0.9 + 0.3 * len(thresholds), said


def _bars(axes: Axes, groups: Mapping[str, Mapping[str, Interval | float]], label: str, **options: Any) -> None:
    hatched = {name for group in groups.values() for name in group if name.startswith(ADAPTIVE)}
    bars(axes, groups, label, hatched=hatched, **options)


def _draw_popularity(axes: Axes, bins: Sequence[Mapping[str, Any]], label: str, is_relative: bool = False) -> None:
    """Draw a line for each method, at places that are moved a little so that intervals do not hide each other."""
    methods = list(dict.fromkeys(method for bin_ in bins for method in bin_["accuracy"]))
    points: dict[str, list[tuple[float, Interval | float]]] = {}
    for number, method in enumerate(methods):
        shift = number - (len(methods) - 1) / 2
        points[method] = []
        for bin_ in (bin_ for bin_ in bins if bin_["n"] >= MIN_QUESTIONS and method in bin_["accuracy"]):
            middle = (bin_["low"] + bin_["high"]) / 2 + 0.025 * shift
            place = middle if is_relative else math.sqrt(bin_["low"] * bin_["high"]) * 1.06**shift
            points[method].append((place, bin_["accuracy"][method]))
    if not is_relative:  # a logarithmic scale needs limits where no bin has questions enough to be drawn
        axes.set_xlim(min(bin_["low"] for bin_ in bins), max(bin_["high"] for bin_ in bins))
    dashed = [method for method in methods if method.startswith(ADAPTIVE)]
    lines(axes, points, label, "right answers", log_x=not is_relative, is_share=True, dashed=dashed)


def _draw_policies(axes: Axes, way: Measured) -> None:
    groups: dict[str, dict[str, Interval]] = {}
    for policy in way["policies"]:
        title = SIGNALS[policy.name].title if policy.name in SIGNALS else policy.name
        groups.setdefault(title, {})[policy.thresholds or "no threshold"] = policy.worth.accuracy
    bars(axes, groups, "right answers", horizontal=True, from_zero=False, is_share=True)
    axes.axvline(groups[way["better"]]["no threshold"].value, color=DOTS, lw=0.8, ls=":")


def _draw_thresholds(axes: Axes, thresholds: Mapping[str, Threshold], answered: AnsweredQuestions, label: str) -> None:
    """Draw each relation's popularities as dots and its threshold as a bar: left of its end questions retrieve."""
    popularity, relations = answered.popularity, np.array(answered.relations)
    lowest, highest = max(popularity.min(), 1) / 1.5, popularity.max() * 1.5
    jitter = np.random.default_rng(0)
    for row, (relation, rule) in enumerate(sorted(thresholds.items())):
        own = np.maximum(popularity[relations == relation], 1)
        limit = {"never": lowest, "always": highest}[rule] if isinstance(rule, str) else max(rule, lowest)
        axes.barh(row, limit - lowest, 0.8, left=lowest, color=RETRIEVES, alpha=0.3, lw=0)
        axes.plot(own, row + jitter.uniform(-0.28, 0.28, len(own)), ".", ms=2.5, color=DOTS, alpha=0.55)
        said = rule if isinstance(rule, str) else f"below {rule:,.0f}"
        axes.text(highest * 1.08, row, said, va="center", fontsize=8.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))  # formulas are not read
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(lowest, highest)
    axes.set_yticks(range(len(thresholds)), sorted(thresholds))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{label}; blue: retrieves")


def slug(name: str) -> str:
    """Return a part of a file's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)
