"""Several LMs' results of one evaluation as a table: LMs down, methods across, and what each method changes."""

from collections.abc import Mapping

from replug.evals.comparison import (
    Entry,
    Results,
    correct_for_many,
    difference_text,
    foot_lines,
    markdown_line,
    size_text,
)


def lm_table(results: Mapping[str, Results], title: str, metric: str) -> str:
    """The metric over all examples, and each method's difference from the first one with its interval.

    Verdicts are corrected for the comparisons that this table shows.
    """
    methods = list(next(iter(results.values())))
    of_first = next(iter(results.values()))[methods[0]][metric]
    rows = [[lm, *(f"{of[method][metric]['value']:.4f}" for method in methods)] for lm, of in results.items()]
    head = ["LM", *methods]
    lines = [
        f"{title}: {metric}, {size_text(of_first)}",
        "",
        *map(markdown_line, (head, ["---"] * len(head), *rows)),
        "",
    ]
    differences = _differences(results, metric)
    shown = [f"- {name}: {difference_text(entry)}" for name, entry in differences.items()]
    return "\n".join([*lines, *shown, "", *foot_lines(len(differences), of_first)]) + "\n"


def _differences(results: Mapping[str, Results], metric: str) -> dict[str, Entry]:
    found = {}
    for lm, of in results.items():
        first, *others = of
        for method in others:
            found[f"{lm}: {metric} of {method} − {first}"] = dict(of[method][f"{metric} - {first}"])
    correct_for_many(list(found.values()))
    return found
