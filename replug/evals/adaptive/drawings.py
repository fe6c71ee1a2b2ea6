"""Which figures a report has, and what is said under each."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from replug.config.methods import NONE
from replug.evals.adaptive import paper
from replug.evals.adaptive.analyses import popularity_of
from replug.evals.adaptive.costs import Costs, Prices
from replug.evals.adaptive.figures import (
    BEST,
    SCALES,
    Bars,
    draw_bars,
    draw_correlations,
    draw_policies,
    draw_popularity,
    draw_relations,
    draw_relative_popularity,
    draw_thresholds,
    named,
)
from replug.evals.adaptive.measured import MeasuredLM, MeasuredWay
from replug.evals.figures import to_svg
from replug.evals.intervals import Interval

WIDTH = 7.0


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure: the name of its file, an <svg> element, and what is said under it."""

    name: str
    svg: str
    caption: str


def drawings_of_all(measured: Sequence[MeasuredLM], prices: Prices | None) -> list[Drawing]:
    """LMs side by side."""
    accuracy: Bars = {lm.name: {named(method): one for method, one in lm.accuracy.items()} for lm in measured}
    rarest: Bars = {lm.name: {"the rarest 28%": lm.rarest[NONE], "the others": lm.others[NONE]} for lm in measured}
    adaptive: Bars = {lm.name: _adaptive_bars(lm) for lm in measured}
    retrieved: Bars = {lm.name: {way.pair.name: way.by_popularity().worth.share for way in lm.ways} for lm in measured}
    by_lm = {lm.name: lm.relations for lm in measured}
    height = 1.4 + 0.28 * len(measured[0].relations)
    return [
        Drawing("accuracy", _share_bars(accuracy, "right answers"), f"Every way to answer. {paper.ACCURACY}"),
        Drawing("adaptive", _share_bars(adaptive, "right answers"), f"Policies by popularity. {paper.ADAPTIVE}"),
        Drawing("rarest", _share_bars(rarest, "right answers, closed book"), f"What LMs know. {paper.RAREST}"),
        Drawing(
            "retrieved",
            _share_bars(retrieved, "questions that retrieve"),
            f"How many questions a policy by popularity retrieves for. {paper.SHARE}",
        ),
        Drawing(
            "relations",
            to_svg(partial(draw_relations, by_lm=by_lm, method=NONE), WIDTH, height),
            "Closed book, by relation, with Wilson's 95% intervals.",
        ),
        Drawing(
            "correlation",
            to_svg(partial(draw_correlations, by_lm=by_lm, method=NONE), WIDTH, height),
            "Closed book, by relation. Far to the right, answers are known of popular subjects alone.",
        ),
        *(
            Drawing(f"cost_{name}", to_svg(partial(draw_bars, bars=bars, label=label), WIDTH, 3.6), said)
            for name, label, said, bars in _costs(measured, prices)
        ),
    ]


def _adaptive_bars(lm: MeasuredLM) -> dict[str, Interval]:
    best = max(lm.accuracy.values(), key=lambda one: one.value)
    return {BEST: best, **{way.pair.policy_name: way.by_popularity().worth.accuracy for way in lm.ways}}


def drawings_of_lm(lm: MeasuredLM) -> list[Drawing]:
    """One LM's answers by popularity, among all questions and among those of the same relation."""
    of_all = partial(draw_popularity, bins=lm.bins, label=SCALES[lm.answered.popularity_signal])
    of_relation = partial(draw_relative_popularity, bins=lm.relative_bins)
    said = "with Wilson's 95% intervals."
    return [
        Drawing(
            f"popularity_{_slug(lm.name)}", to_svg(of_all, WIDTH, 3.8), f"Right answers against popularity, {said}"
        ),
        Drawing(
            f"relative_popularity_{_slug(lm.name)}",
            to_svg(of_relation, WIDTH, 3.8),
            f"Right answers against popularity among the questions of the same relation, {said}",
        ),
    ]


def drawings_of_way(lm: MeasuredLM, way: MeasuredWay) -> list[Drawing]:
    """Two ways to answer: the policy by popularity, what policies are worth, and where that one retrieves."""
    name, scale = f"{_slug(way.pair.name)}_{_slug(lm.name)}", SCALES[way.popularity_signal]
    policies = partial(draw_policies, compared=way.compared)
    rows = len({one.name for one in way.compared})
    thresholds = partial(
        draw_thresholds,
        thresholds=way.thresholds,
        popularity=popularity_of(lm.answered),
        relations=lm.answered.relations,
        label=scale,
    )
    return [
        Drawing(
            f"adaptive_{name}",
            to_svg(partial(draw_popularity, bins=way.bins, label=scale), WIDTH, 3.8),
            "Two ways to answer, and a policy by popularity on questions left out of fitting (dashed).",
        ),
        Drawing(
            f"policies_{name}",
            to_svg(policies, WIDTH, 0.9 + 0.36 * rows),
            "Policies on questions left out of fitting. The dotted line is the better of never and always; the oracle "
            "takes whichever answer is right.",
        ),
        Drawing(
            f"thresholds_{name}",
            to_svg(thresholds, WIDTH, 0.9 + 0.3 * len(way.thresholds)),
            "Thresholds of a policy by popularity, fitted to all questions. A dot is a question.",
        ),
    ]


def _share_bars(bars: Bars, label: str) -> str:
    return to_svg(partial(draw_bars, bars=bars, label=label, is_share=True), WIDTH, 3.6)


def _costs(measured: Sequence[MeasuredLM], prices: Prices | None) -> Iterator[tuple[str, str, str, Bars]]:
    """Name, label, caption and bars of each cost that was measured."""
    of_policy = "Each way for every question, and under a policy by popularity (adaptive)."
    kinds: list[tuple[str, str, str, Callable[[Costs], float]]] = [
        ("seconds", "seconds a question", of_policy, lambda costs: costs.seconds),
        ("prompt_tokens", "prompt tokens a question", of_policy, lambda costs: costs.prompt_tokens),
    ]
    if prices is not None:
        said = f"{of_policy} {paper.COST}"
        kinds.append(("dollars", "dollars for 1,000 questions", said, lambda costs: costs.dollars(prices)))
    for name, label, said, value in kinds:
        bars = {lm.name: _cost_bars(lm, value) for lm in measured}
        if any(bars.values()):
            yield name, label, said, {lm: of for lm, of in bars.items() if of}


def _cost_bars(lm: MeasuredLM, value: Callable[[Costs], float]) -> dict[str, float]:
    """By way to answer, and by policy; what was not measured is left out."""
    bars = {named(name): value(of.costs().mean()) for name, of in lm.answered.methods.items()}
    for way in lm.ways:
        costs = way.by_popularity().costs
        assert costs is not None, "a policy by a signal has costs"
        bars[way.pair.policy_name] = value(costs)
    return {name: one for name, one in bars.items() if not math.isnan(one)}


def _slug(name: str) -> str:
    """A part of a file's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)
