"""The temperature of each retriever's ensemble in an evaluation: given, saved with the retriever, or fitted.

Each retriever's temperature is fitted for the LM and for the number of documents in the retriever's largest ensemble,
by language modelling on the development texts of the prepared set, never on the evaluated texts.

    bits(T) = - sum over texts and tokens t of log2 sum over d of softmax_d(similarity_d / T) p(y_t | d, x, y_<t)

A grid over log T, from nearly the first document alone to nearly even weights, finds the valley, and halving its step
round the best point finds the minimum. The grid's unit is the spread of a text's similarities, about 0.01 for a tuned
encoder with cosines and 10 for an encoder with inner products.

`ask` and `serve` use the temperature too. So it stays 1 with fewer than MIN_TEXTS texts, and if the best grid point is
an end of the grid, where similarities do not inform the weights.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.config.rules import FIT
from replug.data.progress import Progress
from replug.data.records import Example
from replug.data.store import Corpus, CorpusStore, PreparedSet
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.intervals import bits_of
from replug.evals.language_modelling import LanguageModelling
from replug.evals.loop import PromptedLM, outcome_rows
from replug.evals.search import find_all
from replug.models.ensemble import MIN_TEXTS, can_fit, mix, prior_log_weights
from replug.models.ensemble_temperature import PAPER, EnsembleTemperature

log = logging.getLogger(__name__)

LOWEST, HIGHEST, STEP = -5.0, 10.0, 0.5  # of the grid: log2 of the temperature over the similarities' spread
TOLERANCE = 1e-4  # in log2 of the temperature
DIGITS = 4  # of a fitted temperature: rounding hides differences in the last bits of scores


def with_temperatures(
    config: EvaluationConfig,
    corpus: Corpus | None,
    methods: Sequence[Method],
    lm: PromptedLM | None,
    folder: Path,
    found: Mapping[str, RetrievedDocuments],
) -> Mapping[str, RetrievedDocuments]:
    """Return the retrieved documents of each source with the temperature that is given or fitted, else as saved.

    A fit searches the development texts into `folder`; the cache of the LM makes it the same in a resumed evaluation.
    Raises UserError if there are no development texts.
    """
    given = config.ensemble.temperature
    if given is None:
        return found
    if given != FIT:
        return {source: replace(of, temperature=EnsembleTemperature(float(given))) for source, of in found.items()}
    largest: dict[str, Method] = {}  # source -> its weighted method with the most documents
    for method in methods:
        if method.is_weighted:
            largest[method.source] = max(largest.get(method.source, method), method, key=lambda one: one.k)
    if not largest:
        return found
    assert lm is not None, "fitting needs an LM"
    if not isinstance(corpus, PreparedSet):
        raise UserError(
            "ensemble.temperature is fit, and documents alone have no development texts; expected a prepared set "
            "with some (data.num_dev, data.dev), or a number"
        )
    examples = corpus.require_dev().examples()
    queries = [example.query for example in examples]
    searched = find_all(config, corpus, queries, [*largest.values()], folder, texts="development")
    fitted = {
        source: replace(found[source], temperature=fit_ensemble(lm, examples, corpus.corpus, searched[source], method))
        for source, method in largest.items()
    }
    return {**found, **fitted}


def fit_ensemble(
    lm: PromptedLM, examples: Sequence[Example], corpus: CorpusStore, found: RetrievedDocuments, method: Method
) -> EnsembleTemperature:
    """Fit the temperature of a method's retriever on development texts, and log the bits per byte there."""
    book = EvidenceBook([method], corpus, {method.source: found}, [True] * len(examples))
    task, scores = LanguageModelling(examples, keeps_documents=True), []
    task.open(lm, book)
    progress = Progress(f"development texts with {method.source}", len(examples))
    for row, outcome in enumerate(outcome_rows(task, book)):
        given = outcome["methods"][method.name]["detail"]["document_logprobs"]
        scores.append(DocumentScores(given, found.similarities[row, : method.k]))
        progress.advance()
    temperature, stays = fit_temperature(scores)
    if stays:
        log.warning(f"{method.source}: ensemble temperature stays 1 ({len(examples)} texts): {stays}")
        return PAPER
    num_bytes = sum(len(example.continuation.encode()) for example in examples)
    fitted, at_1 = (ensemble_bits(scores, one) / num_bytes for one in (temperature, 1.0))
    log.info(
        f"{method.source}: ensemble temperature {temperature:g} by {len(examples)} development texts "
        f"({fitted:.4f} bits per byte, {at_1:.4f} at 1)"
    )
    return EnsembleTemperature(temperature, lm.lm.identity, method.k, len(examples))


# Fitting --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DocumentScores:
    """Log-probs [K, T] (nats) of one text's tokens given each document, and the documents' similarities [K]."""

    token_logprobs: np.ndarray
    similarities: np.ndarray


def ensemble_bits(texts: Sequence[DocumentScores], temperature: float) -> float:
    """Return the bits of all texts together."""
    return sum(bits_of(mix(text.token_logprobs, prior_log_weights(text.similarities, temperature))) for text in texts)


def fit_temperature(texts: Sequence[DocumentScores]) -> tuple[float, str]:
    """Return the best temperature, and the reason if it stays 1 without a fit. Deterministic in the order of texts.

    If the documents of every text are equally similar, no temperature changes the weights, and the result is 1.
    """
    if not can_fit(len(texts)):
        return 1.0, f"a fit needs {MIN_TEXTS} development texts or more"
    # The mean over texts of the standard deviation of a text's similarities.
    spread = float(np.mean([np.std(np.asarray(text.similarities, dtype=np.float64)) for text in texts]))
    if not spread:
        return 1.0, ""

    def bits(log2: float) -> float:
        return ensemble_bits(texts, spread * 2.0**log2)

    grid = np.arange(LOWEST, HIGHEST + STEP / 2, STEP).tolist()
    values = [bits(point) for point in grid]
    best = int(np.argmin(values))
    if best in (0, len(grid) - 1):
        which = "the first document alone" if best == 0 else "even weights"
        return 1.0, f"{which} would predict the development texts best"
    point, step = grid[best], STEP
    while step > TOLERANCE:
        step /= 2
        point = min((point - step, point, point + step), key=bits)
    return float(f"{spread * 2.0**point:.{DIGITS}g}"), ""
