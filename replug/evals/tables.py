"""The tables of all evaluations and of training: one form, rendered on the terminal, as Markdown and as HTML.

A report is a list of blocks. A block is a sentence, a list of sentences, a `Table`, or `Html`, which only pages show.
Cells are escaped, so a group's or a document's name is never markup.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup
from rich.console import Console
from rich.markdown import Markdown

from replug.config.plain_text import plain_line
from replug.evals.intervals import FEW_CLUSTERS, FEWEST_CLUSTERS, LEVEL, NO_DIFFERENCE, sign_shown
from replug.evals.results import Entry, Results, correct_for_many, main_metric, num_clusters

MARKUP = re.compile(r"[\\`*\[\]<>|~&!]|(?<!\w)_|_(?!\w)")  # in Markdown; an underscore within a word is not markup
MOST_DIFFERENCES = 20  # above this number, list only significant differences
PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    Path(__file__).with_name("page.html.j2").read_text()
)
Html = Markup  # HTML inserted into a page without escaping, such as a figure


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; head and rows have equal lengths."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Block = str | Sequence[str] | Table
Blocks = Sequence[Block]


def to_markdown(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown, without HTML blocks."""
    return "\n\n".join(_markdown(block) for block in blocks if not isinstance(block, Html)) + "\n"


def print_blocks(blocks: Iterable[Block], width: int = 120) -> None:
    """Print blocks to the terminal."""
    print_markdown(to_markdown(blocks), width)


def print_markdown(text: str, width: int = 120) -> None:
    """Print the output of `to_markdown` to the terminal."""
    Console(width=width).print(Markdown(text))


def html_page(title: str, sections: Mapping[str, Blocks]) -> str:
    """Return a self-contained page with a heading for each section that has blocks; the section "" has no heading."""
    return PAGE.render(title=title, sections=sections)


def figure(svg: str, caption: str = "", is_wide: bool = False) -> Html:
    """Return a drawing with its caption. A wide one scrolls on a narrow screen instead of shrinking."""
    drawn = Html(f"<div class=wide>{svg}</div>" if is_wide else svg)
    return Html("<figure>{}{}</figure>").format(
        drawn, Html("<figcaption>{}</figcaption>").format(caption) if caption else ""
    )


def grid(figures: Sequence[Html]) -> Html:
    """Return drawings side by side."""
    return Html("<div class=grid>{}</div>").format(Html().join(figures))


def markdown_text(text: str) -> str:
    """Return a text on one line, escaped for Markdown and the terminal."""
    return MARKUP.sub(r"\\\g<0>", plain_line(text))


def _markdown(block: Block) -> str:
    if isinstance(block, str):
        return plain_line(block)
    if isinstance(block, Table):
        head, *rows = (f"| {' | '.join(map(markdown_text, cells))} |" for cells in (block.head, *block.rows))
        return "\n".join([head, f"| {' | '.join(['---'] * len(block.head))} |", *rows])
    return "\n".join(f"- {plain_line(line)}" for line in block)


# The tables of results -------------------------------------------------------------------------------------------


def result_blocks(results: Results, title: str) -> list[Block]:
    """Show methods down and metrics over all examples across, then differences and groups.

    The first metric has its intervals. Oracles (`bpb_...`) are not columns: they do not fit on a terminal, and the
    headroom lines report them.
    """
    named = dict.fromkeys(name for of in results.values() for name in of)
    metrics = [name for name in named if "/" not in name and " - " not in name and not name.startswith("bpb_")]
    main, first = metrics[0], next(iter(results.values()))
    rows = []
    for method, of in results.items():
        others = [f"{of[name]['value']:.4g}" if name in of else "" for name in metrics[1:]]
        rows.append([method, f"{of[main]['value']:.4f}", interval_text(of[main]), *others])
    num = sum("p_holm" in entry for of in results.values() for entry in of.values())
    blocks: list[Block] = [
        f"{title}, {size_text(first[main])}",
        Table(["method", main, "95% interval", *metrics[1:]], rows),
        _difference_lines(results),
        *_group_tables(results, main),
        reading_line(num, first[main], _tested_alone(results, main)),
    ]
    return [block for block in blocks if block]


def joined_blocks(title: str, results: Mapping[str, Results]) -> list[Block]:
    """Show the main metric over all examples by folder and method, and the differences within each folder.

    Verdicts are corrected for all comparisons in this table.
    """
    first = next(iter(results.values()))
    metric = main_metric(first)
    methods = list(dict.fromkeys(method for of in results.values() for method in of))
    rows = [
        [name, *(f"{of[method][metric]['value']:.4f}" if method in of else "" for method in methods)]
        for name, of in results.items()
    ]
    differences = {}
    for name, of in results.items():
        base, *others = of
        for method in others:
            differences[f"{name}: {metric} of {method} − {base}"] = dict(of[method][f"{metric} - {base}"])
    correct_for_many(list(differences.values()))
    size = next(iter(first.values()))[metric]
    return [
        f"{title}: {metric}, {size_text(size)}",
        Table(["", *methods], rows),
        [f"{name}: {difference_text(entry)}" for name, entry in differences.items()],
        reading_line(len(differences), size),
    ]


def size_text(entry: Entry) -> str:
    """Return the number of examples, and the number of sources if examples share them."""
    return f"n = {entry['n']}" + (f" of {entry['clusters']} sources" if "clusters" in entry else "")


def interval_text(entry: Entry) -> str:
    """Return the 95% interval of an entry; empty if it has none."""
    return "{:.4f} to {:.4f}".format(*entry["interval"]) if "interval" in entry else ""


def difference_text(entry: Entry) -> str:
    """Return a difference with its interval, and the verdict, corrected for all comparisons of the table."""
    low, high = entry["interval"]
    sign = sign_shown(low, high, num_clusters(entry))
    says = {-1: "lower", 0: NO_DIFFERENCE, 1: "higher"}[sign]
    says += " if it were the only comparison" if sign and entry.get("p_holm", 0.0) >= LEVEL else ""
    return f"{entry['value']:+.4f} ({low:+.4f} to {high:+.4f}: {says})"


def _tested_alone(results: Results, main: str) -> str | None:
    """Return the planned comparison of a table, which is tested without correction."""
    for method, of in results.items():
        for other, entry in differences_of(of, main):
            if "p" in entry and "p_holm" not in entry:
                return f"{method} − {other}"
    return None


def differences_of(of: Mapping[str, Entry], metric: str) -> Iterator[tuple[str, Entry]]:
    """Yield (other method, entry) for a method's differences in a metric."""
    for name, entry in of.items():
        own, separator, other = name.partition(" - ")
        if separator and own == metric:
            yield other, entry


def reading_line(num_comparisons: int, entry: Entry, tested_alone: str | None = None) -> str:
    """Return the line that explains intervals and verdicts; `entry` is a metric over all examples.

    `tested_alone` is the planned comparison.
    """
    num, what = num_clusters(entry), "sources" if "clusters" in entry else "examples"
    lines = [f"Intervals: 95%, each by itself, over {num} {what}."]
    if num_comparisons > 1:
        of = f"{num_comparisons} others" if tested_alone else f"{num_comparisons} comparisons"
        first = f"{tested_alone} is tested alone; " if tested_alone else ""
        lines.append(f"Verdicts: {first}p < {LEVEL} after Holm's correction for {of}.")
    if num < FEWEST_CLUSTERS:
        lines.append(f"Fewer than {FEWEST_CLUSTERS} {what} show no difference.")
    elif num < FEW_CLUSTERS:
        lines.append(f"Intervals over fewer than {FEW_CLUSTERS} {what} are too narrow.")
    return " ".join(lines)


def row_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of folders, or their paths if two have the same name."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _difference_lines(results: Results) -> list[str]:
    """Return the lines of all differences, or above MOST_DIFFERENCES only of significant ones."""
    lines, metric = {}, main_metric(results)
    for method, of in results.items():
        for other, entry in differences_of(of, metric):
            text = difference_text(entry)
            lines[f"{metric} of {method} − {other}: {text}"] = NO_DIFFERENCE not in text
    if len(lines) <= MOST_DIFFERENCES or all(lines.values()):
        return list(lines)
    hidden = len(lines) - sum(lines.values())
    return [line for line in lines if lines[line]] + [f"{hidden} others show no difference; results.json has them."]


def _group_tables(results: Results, main: str) -> list[Table]:
    first = next(iter(results.values()))
    groups = [name for name in first if name.startswith(f"{main}/") and " - " not in name]
    rows = [
        [name.removeprefix(f"{main}/"), str(first[name]["n"]), *(f"{of[name]['value']:.4f}" for of in results.values())]
        for name in groups
    ]
    return [Table([main, "n", *results], rows)] if groups else []
