"""A paper's figures beside ours: by method with the gain in percent, by group, and those of others in the same table.

They are of the paper's LM, texts and corpus. Where ours are others, the two columns compare nothing but the sign of
the gains. Pure.
"""

from collections.abc import Iterator

from replug.config.evaluation_schema import PaperConfig
from replug.config.methods import NONE
from replug.evals.comparison import Results, main_metric, markdown_line

LOWER_IS_BETTER = ("bpb", "token_perplexity", "word_perplexity")


def add_paper_figures(results: Results, paper: PaperConfig) -> str:
    """Put the paper's figures by group among ours; returns lines for the table, none where the paper has no figures."""
    if not (paper.values or paper.groups or paper.others):
        return ""
    main = main_metric(results)
    for group, values in paper.groups.items():
        for method in values.keys() & results.keys():
            if entry := results[method].get(f"{main}/{group}"):
                entry["paper"] = values[method]
    rows = [*_by_method(results, paper, main), *_by_group(results, paper, main), *_others(paper)]
    if not rows:
        return ""
    head = [f"{main}, {paper.table or 'the paper'}", "ours", "paper", "gain, ours", "gain, paper"]
    return "\n" + "".join(f"{markdown_line(cells)}\n" for cells in (head, ["---"] * len(head), *rows))


def _by_method(results: Results, paper: PaperConfig, main: str) -> Iterator[list[str]]:
    ours = {method: of[main]["value"] for method, of in results.items()}
    for method in ours:
        if method in paper.values:
            gains = (_gain(ours, method, main), _gain(paper.values, method, main))
            yield [method, f"{ours[method]:.4f}", f"{paper.values[method]:g}", *gains]


def _by_group(results: Results, paper: PaperConfig, main: str) -> Iterator[list[str]]:
    for group, values in paper.groups.items():
        ours = {method: of[f"{main}/{group}"]["value"] for method, of in results.items() if f"{main}/{group}" in of}
        for method in ours:
            if method in values:
                gains = (_gain(ours, method, main), _gain(values, method, main))
                yield [f"{method}, {group}", f"{ours[method]:.4f}", f"{values[method]:g}", *gains]


def _others(paper: PaperConfig) -> Iterator[list[str]]:
    for name, value in paper.others.items():
        yield [name, "", f"{value:g}", "", ""]


def _gain(values: dict[str, float], method: str, main: str) -> str:
    """Of a method over no retrieval in percent of that, as the paper's tables have it; above 0 is better."""
    if method == NONE or not values.get(NONE):
        return ""
    change = 100 * (values[method] / values[NONE] - 1)
    return f"{-change if main in LOWER_IS_BETTER else change:+.1f}%"
