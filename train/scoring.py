"""Pairs of documents and examples put to the LM: as prompts, and in calls of a fixed number of examples.

Calls are counted from the first example, so what is scored together follows from the examples and the documents alone,
also after kill -9: the cache has what was computed, and no pair is computed twice.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from replug.cluster.interruption import wait_for
from replug.config.errors import RunError
from replug.data.records import Example
from replug.models.prompt import PromptTemplate

EXAMPLES_PER_CALL = 16


class ScoreError(RunError):
    """The LM's answer cannot be trained on; the message names the example and the document."""


def prompts_of(
    template: PromptTemplate, examples: Sequence[Example], texts: Iterable[Sequence[str | None]]
) -> tuple[list[str], list[str]]:
    """Return prefixes and continuations, one of each for every text before every example; None is no document."""
    prefixes, continuations = [], []
    for example, before in zip(examples, texts, strict=True):
        for text in before:
            prefixes.append(template.prefix(text, example.context, example.continuation))
            continuations.append(example.continuation)
    return prefixes, continuations


def score_in_calls(
    submit: Callable[..., Future[Any]],
    template: PromptTemplate,
    num_examples: int,
    load: Callable[[range], tuple[Sequence[Example], Iterable[Sequence[str | None]]]],
    calls_in_flight: int,
    check: Callable[[], None],
) -> Iterator[tuple[range, list[Any]]]:
    """Yield rows of examples and the scores of their pairs, an example's after one another.

    `load` gives the examples of some rows and the texts before each. `check` is called while waiting, to raise what
    ends it.
    """
    waiting: deque[tuple[range, Future[Any]]] = deque()
    for start in range(0, num_examples, EXAMPLES_PER_CALL):
        rows = range(start, min(start + EXAMPLES_PER_CALL, num_examples))
        waiting.append((rows, submit(*prompts_of(template, *load(rows)))))
        if len(waiting) == calls_in_flight:
            rows, scores = waiting.popleft()
            yield rows, wait_for(scores, check)
    for rows, scores in waiting:
        yield rows, wait_for(scores, check)
