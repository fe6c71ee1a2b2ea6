"""What a sweep leaves for a reader: a table of its trials, best first, and a figure with a panel for each key."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes

from replug.config.sweep_space import Choices, Range, Space, Value
from replug.evals.comparison import markdown_line
from replug.evals.figures import COLOURS, panels_to_svg, plain_log_scale
from replug.train.sweep.baselines import Baselines
from replug.train.sweep.records import Trial, TrialResult

PANEL_WIDTH, HEIGHT = 3.2, 3.0
MORE = ("at step", "of steps", "temperature", "seconds")
Results = Mapping[int, TrialResult]


def best_first(trials: Sequence[Trial], results: Results) -> list[Trial]:
    """Those that ended well, by bits per byte on development texts, then by number; then all others."""
    return sorted(trials, key=lambda trial: (_value(results.get(trial.number)), trial.number))


def sweep_table(space: Space, trials: Sequence[Trial], results: Results, known: Baselines) -> str:
    """As Markdown, with what the trials are compared with below."""
    head = ["trial", *space, "dev bits per byte", "of headroom", "scored", *MORE, ""]
    rows = [_row(trial, space, results.get(trial.number), known) for trial in best_first(trials, results)]
    ended = sum(result.error is None for result in results.values())
    title = f"{ended} of {len(trials)} trials, bits per byte on labelled development texts (lower is better)"
    lines = [title, "", *map(markdown_line, (head, ["---"] * len(head), *rows)), "", *_baseline_lines(known), ""]
    scored = "scored: of the nearest documents, those that the LM has scored. Where few are, a search finds others."
    note = "Chosen by development texts, the best of many is flattered by them: held-out texts say what it is worth."
    return "\n".join([*lines, scored, note]) + "\n"


def _baseline_lines(known: Baselines) -> list[str]:
    start = known.start
    return [
        f"- without documents: {known.alone:.4f}",
        f"- the retriever that found the candidates, temperature {known.temperature:.3g}: {start.ensemble:.4f}",
        f"- its documents weighed by the LM's own scores: {start.q_weighted:.4f}; the headroom is what they gain",
        f"- its best document alone: {start.best_document:.4f}",
    ]


def sweep_figure(space: Space, trials: Sequence[Trial], results: Results) -> str:
    """An SVG."""
    known = [trial for trial in trials if _ended_well(results.get(trial.number))]
    draws = [partial(_draw_key, key=key, tried=tried, trials=known, results=results) for key, tried in space.items()]
    return panels_to_svg(draws, PANEL_WIDTH, HEIGHT)


def _draw_key(axes: Axes, key: str, tried: Choices | Range, trials: Sequence[Trial], results: Results) -> None:
    """A dot for each trial, over the key's value; numbers on an axis, other values side by side."""
    values = [trial.settings[key] for trial in trials]
    bits = [_value(results[trial.number]) for trial in trials]
    if isinstance(tried, Range):
        axes.plot(values, bits, "o", color=COLOURS["lsr"], alpha=0.7)
        if tried.is_log:
            plain_log_scale(axes)
    else:
        names = list(dict.fromkeys(map(_text, tried.values)))
        axes.plot([names.index(_text(value)) for value in values], bits, "o", color=COLOURS["lsr"], alpha=0.7)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_title(key, fontsize=10)


def _row(trial: Trial, space: Space, result: TrialResult | None, known: Baselines) -> list[str]:
    settings = [_text(trial.settings[key]) for key in space]
    if result is None or result.dev_bpb is None:
        return [trial.name, *settings, *[""] * 7, "not yet" if result is None else str(result.error)]
    share = known.start.share(result.dev_bpb)
    bits = [f"{result.dev_bpb:.4f}", "" if share is None else f"{share:.0%}", f"{result.scored_share:.0%}"]
    steps = [str(result.step), str(result.num_steps)]
    return [trial.name, *settings, *bits, *steps, f"{result.temperature:.3g}", f"{result.seconds:.0f}", ""]


def _text(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _value(result: TrialResult | None) -> float:
    return result.dev_bpb if result is not None and result.dev_bpb is not None else float("inf")


def _ended_well(result: TrialResult | None) -> bool:
    return result is not None and result.dev_bpb is not None
