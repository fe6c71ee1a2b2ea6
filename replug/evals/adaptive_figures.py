"""Draw when retrieval helps: figures of Mallen et al. 2023, with what the paper reports.

The paper's LMs are far larger, its corpus is Wikipedia, and it asks all 14,282 questions: GPT-3 davinci-003 zero-shot,
the open LMs 15-shot. OPT-13B's numbers are those that the official notebook prints (adaptive-retrieval.ipynb).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from replug.config.methods import NONE
from replug.evals.adaptive import FREQUENCY, POPULARITY, AnsweredQuestions, Compared, Prices
from replug.evals.charts import Draw, bars, lines, panels
from replug.evals.intervals import Interval
from replug.models.policy import SIGNALS

ADAPTIVE = "adaptive "  # before the name of a pair of methods: its policy by popularity
SCALES = {POPULARITY: "popularity of the subject", FREQUENCY: "documents that name the subject"}
MIN_QUESTIONS = 5  # an accuracy of fewer says nothing, and its interval hides the others

Measured = dict[str, Any]  # what report.json holds of one LM, or of two of its methods
Figures = Iterator[tuple[str, Draw, float, str]]  # name, drawing, height, caption

PAPER = {  # by figure, what the paper reports
    "accuracy": "davinci-003 is right for 34% closed book, for 41% with the first document of Contriever-MS MARCO; "
    "GPT-NeoX 20B for 25% closed book; OPT-13B (the notebook) for 17.2% closed book, for 25.4% with BM25's document.",
    "adaptive": "adaptive retrieval with davinci-003, GenRead where it knows and Contriever-MS MARCO where not, "
    "is right for 46.5%, 5.3 points above the best way without a policy; OPT-13B, closed book or BM25, for 27.1%. "
    "davinci-003 retrieves for 40% of the questions only, and GPT-NeoX 20B does not for more than 20%.",
    "sizes": "of the 4,000 least popular questions GPT-J 6B answers 15%, GPT-NeoX 20B 16%, davinci-003 19%.",
    "cost_seconds": "GenRead takes 70 s a question with GPT-NeoX 20B; a policy saves up to 9% of the time.",
    "cost_dollars": "dollars for 1,000 questions to davinci-003, from closed book to GenRead: 0.46, 3.08, 2.80, 3.25.",
}


def figures_of_all(measured: Mapping[str, Measured], prices: Prices | None) -> Figures:
    """Yield the figures in which LMs stand side by side."""
    share = partial(_bars, is_share=True)
    accuracy = {name: lm["accuracy"] for name, lm in measured.items()}
    yield "accuracy", partial(share, groups=accuracy, label="right answers"), 3.6, "Every method."
    adaptive = {}
    for name, lm in measured.items():
        policies = {f"{ADAPTIVE}{pair}": _by_popularity(way).worth.accuracy for pair, way in lm["ways"].items()}
        best = max(lm["accuracy"].values(), key=lambda interval: interval.value)
        adaptive[name] = {"best without a policy": best, **policies}
    yield "adaptive", partial(share, groups=adaptive, label="right answers"), 3.6, "Policies by popularity."
    height = 1.4 + 0.28 * len(next(iter(measured.values()))["relations"])
    draw = partial(share, groups=_by_relation(measured, "accuracy"), label="right answers", horizontal=True)
    yield "relations", draw, height, "Closed book, by relation, with Wilson's 95% intervals."
    correlations = _by_relation(measured, "correlation")
    draw = partial(_bars, groups=correlations, label="correlation of being right with log popularity", horizontal=True)
    said = "Closed book, by relation. Far to the right, answers are known of popular subjects alone."
    if correlations:  # none where all answers are equally right
        yield "correlation", draw, height, said
    labels = {"seconds": "seconds a question", "prompt_tokens": "prompt tokens a question"}
    if prices is not None:
        labels["dollars"] = "dollars for 1,000 questions"
    for cost, label in labels.items():
        costs = {name: known for name, lm in measured.items() if (known := _cost_bars(lm, cost))}
        if costs:
            said = "Each method for every question, and under a policy by popularity (adaptive)."
            yield f"cost_{cost}", partial(_bars, groups=costs, label=label), 3.6, said


def figures_by_popularity(measured: Mapping[str, Measured], signal: str) -> Figures:
    """Yield how popular subjects are, and closed-book answers of several LMs by relation and by size."""
    first, label = next(iter(measured.values())), SCALES[signal]
    shares = [(_middle(bin_), bin_["n"] / first["n"]) for bin_ in first["popularity"]]
    draw = partial(lines, points={"questions": shares}, x_label=label, y_label="questions", log_x=True, is_share=True)
    yield "subjects", draw, 3.0, "How popular the subjects are; a dot is half a power of ten (figure 3)."
    if len(measured) == 1:
        return
    of_lms: dict[str, dict[float, dict[str, Any]]] = {}
    for name, lm in measured.items():
        for relation in lm["relations"]:
            bins = of_lms.setdefault(relation["relation"], {})
            for bin_ in relation["popularity"]:
                bins.setdefault(bin_["low"], {**bin_, "accuracy": {}})["accuracy"][name] = bin_["accuracy"][NONE]
    by_relation = {relation: list(bins.values()) for relation, bins in of_lms.items()}
    yield from _panels("popularity_by_relation", by_relation, label, "Closed book, by relation (figure 5).")
    sizes = {name: lm["parameters"] for name, lm in measured.items()}
    if None in sizes.values() or len(set(sizes.values())) == 1:
        return
    points: dict[str, list[tuple[float, Interval]]] = {}
    for name in sorted(measured, key=lambda name: sizes[name]):
        for bin_ in (bin_ for bin_ in measured[name]["powers of popularity"] if bin_["n"] >= MIN_QUESTIONS):
            series = points.setdefault(f"{bin_['low']:,.0f} to {bin_['high']:,.0f}", [])
            series.append((sizes[name] / 1e6, bin_["accuracy"][NONE]))

    def draw_sizes(axes: Axes) -> None:
        lines(axes, points, "parameters of the LM, millions", "right answers", log_x=True, is_share=True)
        axes.set_xticks([size / 1e6 for size in sizes.values()])

    yield "sizes", draw_sizes, 3.8, f"Closed book, a line for each range of {label} (figure 6)."


def _panels(name: str, bins: Mapping[str, Sequence[Mapping[str, Any]]], label: str, said: str) -> Figures:
    """Yield a panel for each relation that has a bin with questions enough."""
    drawn = {relation: of for relation, of in bins.items() if any(bin_["n"] >= MIN_QUESTIONS for bin_ in of)}
    ends = [end for of in drawn.values() for bin_ in of for end in (bin_["low"], bin_["high"])]
    if not drawn:
        return
    limits = min(ends), max(ends)
    draw = {relation: partial(_draw_popularity, bins=of, label=label, limits=limits) for relation, of in drawn.items()}
    few = f" Bins with fewer than {MIN_QUESTIONS} questions are left out; intervals are Wilson's, 95%."
    yield name, partial(panels, drawings=draw), 0.8 + 1.9 * -(-len(drawn) // 3), said + few


def _middle(bin_: Mapping[str, Any]) -> float:
    return math.sqrt(bin_["low"] * bin_["high"])


def _by_popularity(way: Measured) -> Compared:
    """Return the paper's policy: by popularity, with a threshold for each relation where there are several."""
    found: Compared = next(policy for policy in way["policies"] if policy.name in SCALES)
    return found


def _by_relation(measured: Mapping[str, Measured], what: str) -> dict[str, dict[str, Any]]:
    """Return closed-book figures by relation and LM; what does not exist is left out."""
    groups: dict[str, dict[str, Any]] = {}
    for name, lm in measured.items():
        for relation in lm["relations"]:
            if relation[what][NONE] is not None:
                groups.setdefault(relation["relation"], {})[name] = relation[what][NONE]
    return groups


def _cost_bars(lm: Measured, cost: str) -> dict[str, float]:
    """Return a cost by method and by policy; what was not measured is left out."""
    costs = {**lm["costs"], **{f"{ADAPTIVE}{name}": _by_popularity(way).costs for name, way in lm["ways"].items()}}
    return {name: of[cost] for name, of in costs.items() if not math.isnan(of[cost])}


def figures_of_lm(name: str, lm: Measured, signal: str) -> Figures:
    """Yield one LM's answers by popularity."""
    label = SCALES[signal]
    draw = partial(_draw_popularity, bins=lm["popularity"], label=label)
    yield f"popularity_{slug(name)}", draw, 3.8, "Right answers against popularity, with Wilson's 95% intervals."
    if len(lm["relations"]) > 1:
        bins = {relation["relation"]: relation["popularity"] for relation in lm["relations"]}
        yield from _panels(f"relations_{slug(name)}", bins, label, "Every method, by relation (figure 15).")


def figures_of_way(answered: AnsweredQuestions, name: str, way: Measured) -> Figures:
    """Yield two methods by popularity with their policy, and what policies are worth."""
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


def _bars(axes: Axes, groups: Mapping[str, Mapping[str, Interval | float]], label: str, **options: Any) -> None:
    hatched = {name for group in groups.values() for name in group if name.startswith(ADAPTIVE)}
    bars(axes, groups, label, hatched=hatched, **options)


def _draw_popularity(
    axes: Axes, bins: Sequence[Mapping[str, Any]], label: str, limits: tuple[float, float] | None = None
) -> None:
    """Draw a line for each method, at places that are moved a little so that intervals do not hide each other."""
    methods = list(dict.fromkeys(method for bin_ in bins for method in bin_["accuracy"]))
    points: dict[str, list[tuple[float, Interval | float]]] = {}
    for number, method in enumerate(methods):
        shift = number - (len(methods) - 1) / 2
        points[method] = []
        for bin_ in (bin_ for bin_ in bins if bin_["n"] >= MIN_QUESTIONS and method in bin_["accuracy"]):
            place = _middle(bin_) * 1.06**shift
            points[method].append((place, bin_["accuracy"][method]))
    # A logarithmic scale needs limits where no bin has questions enough to be drawn.
    axes.set_xlim(limits or (min(bin_["low"] for bin_ in bins), max(bin_["high"] for bin_ in bins)))
    dashed = [method for method in methods if method.startswith(ADAPTIVE)]
    lines(axes, points, label, "right answers", log_x=True, is_share=True, dashed=dashed)


def _draw_policies(axes: Axes, way: Measured) -> None:
    groups: dict[str, dict[str, Interval]] = {}
    for policy in way["policies"]:
        title = SIGNALS[policy.name].title if policy.name in SIGNALS else policy.name
        groups.setdefault(title, {})[policy.thresholds or "no threshold"] = policy.worth.accuracy
    bars(axes, groups, "right answers", horizontal=True, from_zero=False, is_share=True)
    axes.axvline(groups[way["better"]]["no threshold"].value, color="#2f3e46", lw=0.8, ls=":")


def slug(name: str) -> str:
    """Return a part of a file's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)
