"""The comparison of policies as a table of text, for the console and for the report."""

import math
from collections.abc import Sequence

from replug.evals.adaptive.comparison import Compared
from replug.evals.adaptive.costs import Costs, Prices
from replug.evals.intervals import Interval

UNKNOWN = "–"
NOTE = (
    "Each policy is fitted to 75% of the questions and measured on the others, in 100 random splits. Intervals are "
    "95%, by fitting anew in a bootstrap over questions. The gain is that over the better of never and always. AUROC: "
    "how well the signal tells right closed-book answers from wrong ones; 0.5 is chance."
)


def comparison_table(compared: Sequence[Compared], prices: Prices | None = None) -> tuple[list[str], list[list[str]]]:
    """Heads and rows, a policy each; a column that nobody measured is left out."""
    better = compared[0].worth.better
    heads = ["policy", "accuracy", f"gain over {better}", "retrieves", "AUROC", *_cost_heads(prices)]
    rows = [[*_worth_cells(one), *_cost_cells(one.costs, prices)] for one in compared]
    shown = [place for place in range(len(heads)) if any(row[place] not in ("", UNKNOWN) for row in rows)]
    return [heads[place] for place in shown], [[row[place] for place in shown] for row in rows]


def number(value: float, digits: int) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:,.{digits}f}"


def with_interval(interval: Interval | None, sign: str = "") -> str:
    """Such as 0.31 (0.27 to 0.35)."""
    if interval is None:
        return ""
    return f"{interval.value:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _worth_cells(one: Compared) -> list[str]:
    worth = one.worth
    gain = "" if one.name == worth.better else with_interval(worth.gain, "+")
    share = f"{worth.share.value:.0%}"
    name = f"{one.name}, {one.thresholds}" if one.thresholds else one.name
    return [name, with_interval(worth.accuracy), gain, share, with_interval(one.auroc)]


def _cost_heads(prices: Prices | None) -> list[str]:
    heads = ["LM calls", "searches", "prompt tokens", "new tokens", "seconds"]
    return [*heads, "dollars per 1,000"] if prices else heads


def _cost_cells(costs: Costs | None, prices: Prices | None) -> list[str]:
    """Of a question; nothing for an oracle."""
    if costs is None:
        return [""] * len(_cost_heads(prices))
    cells = [
        number(costs.lm_calls, 2),
        number(costs.retriever_calls, 2),
        number(costs.prompt_tokens, 0),
        number(costs.generated_tokens, 1),
        number(costs.seconds, 2),
    ]
    return [*cells, number(costs.dollars(prices), 2)] if prices else cells
