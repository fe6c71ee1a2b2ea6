"""Several LMs' results of one evaluation as a table: LMs down, methods across, and what each method changes."""

from collections.abc import Iterator, Mapping

from replug.evals.comparison import Results, difference_text, markdown_line


def lm_table(results: Mapping[str, Results], title: str, metric: str) -> str:
    """The metric over all examples, and each method's difference from the first one with its interval."""
    methods = list(next(iter(results.values())))
    n = next(iter(results.values()))[methods[0]][metric]["n"]
    rows = [[lm, *(f"{of[method][metric]['value']:.4f}" for method in methods)] for lm, of in results.items()]
    head = ["LM", *methods]
    lines = [f"{title}: {metric}, n = {n}", "", *map(markdown_line, (head, ["---"] * len(head), *rows)), ""]
    return "\n".join([*lines, *_differences(results, metric)]) + "\n"


def _differences(results: Mapping[str, Results], metric: str) -> Iterator[str]:
    for lm, of in results.items():
        first, *others = of
        for method in others:
            difference = difference_text(of[method][f"{metric} - {first}"])
            yield f"- {lm}: {metric} of {method} − {first}: {difference}"
