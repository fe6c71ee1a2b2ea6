"""Bits per byte of held-out continuations under several choices of documents (REPLUG, section 6.1).

For every text each method gives documents and similarities; the LM's predictions given each are
mixed (`models.ensemble`). A document that several methods chose is scored once.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from replug.data.progress import Progress
from replug.data.records import Window
from replug.data.store import CorpusStore
from replug.evals.metrics import bits_of
from replug.models.black_box_lm import AsyncLM, ContinuationScore
from replug.models.ensemble import mix_token_logprobs
from replug.models.prompt import PromptTemplate

WINDOWS_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """Documents of one method for all W texts: rows [W, K] and similarities [W, K]."""

    doc_rows: np.ndarray
    similarities: np.ndarray


def measure_bits(
    lm: AsyncLM, corpus: CorpusStore, windows: Sequence[Window], choices: Mapping[str, Choice], template: PromptTemplate
) -> dict[str, np.ndarray]:
    """Bits [W] of each continuation for each method; `none` is the LM without documents."""
    bits = {method: np.empty(len(windows)) for method in ("none", *choices)}
    progress = Progress("bits per byte", len(windows))
    for row, scores in enumerate(_score(lm, corpus, windows, choices, template, with_none=True)):
        for method, value in _bits_of_window(scores[1:], choices, row).items():
            bits[method][row] = value
        bits["none"][row] = bits_of(scores[0].token_logprobs)
        progress.advance()
    return bits


def ensemble_bits(
    lm: AsyncLM, corpus: CorpusStore, windows: Sequence[Window], choice: Choice, template: PromptTemplate
) -> np.ndarray:
    """Bits [W] of each continuation with the documents of one choice."""
    scored = _score(lm, corpus, windows, {"": choice}, template)
    return np.array([_bits_of_window(scores, {"": choice}, row)[""] for row, scores in enumerate(scored)])


def _score(
    lm: AsyncLM,
    corpus: CorpusStore,
    windows: Sequence[Window],
    choices: Mapping[str, Choice],
    template: PromptTemplate,
    with_none: bool = False,
) -> Iterator[list[ContinuationScore]]:
    """For each text its scores after each document; first without any, if asked for."""
    pending: dict[int, Future] = {}
    for row in range(len(windows) + WINDOWS_IN_FLIGHT):
        if row < len(windows):
            pending[row] = _submit(lm, corpus, windows[row], with_none, _union(choices, row), template)
        if (ready := row - WINDOWS_IN_FLIGHT) >= 0 and ready in pending:
            yield pending.pop(ready).result()


def num_bytes(windows: Sequence[Window]) -> np.ndarray:
    """UTF-8 bytes [W] of the continuations."""
    return np.array([len(window.continuation.encode()) for window in windows])


def random_choice(num_documents: int, num_windows: int, k: int, seed: int) -> np.ndarray:
    """Rows [W, K] drawn evenly without repetition, the same for the same seed."""
    rng = np.random.default_rng([seed, 1])
    return np.stack([rng.choice(num_documents, size=k, replace=False) for _ in range(num_windows)])


def _union(choices: Mapping[str, Choice], row: int) -> np.ndarray:
    return np.unique(np.concatenate([choice.doc_rows[row] for choice in choices.values()]))


def _submit(
    lm: AsyncLM,
    corpus: CorpusStore,
    window: Window,
    with_none: bool,
    doc_rows: np.ndarray,
    template: PromptTemplate,
) -> "Future[list[ContinuationScore]]":
    documents = corpus.texts(doc_rows)
    texts = [None, *documents] if with_none else documents
    prefixes = [template.prefix(text, window.context, window.continuation) for text in texts]
    return lm.submit(prefixes, [window.continuation] * len(prefixes))


def _bits_of_window(scores: list[ContinuationScore], choices: Mapping[str, Choice], row: int) -> dict[str, float]:
    given = np.stack([score.token_logprobs for score in scores])  # [documents, T]
    place = {int(doc): i for i, doc in enumerate(_union(choices, row))}
    bits = {}
    for method, choice in choices.items():
        chosen = given[[place[int(doc)] for doc in choice.doc_rows[row]]]
        bits[method] = bits_of(mix_token_logprobs(chosen, choice.similarities[row]))
    return bits
