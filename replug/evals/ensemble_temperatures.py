"""The temperature of each retriever's ensemble in an evaluation: given, saved with the retriever, or fitted.

A fitted one is each retriever's own, for the LM that is asked and as many documents as its largest ensemble has. It is
fitted to the development texts of the prepared set, as language modelling; what is measured is never looked at.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.config.rules import FIT
from replug.data.folder import read_mark, write_mark
from replug.data.progress import Progress
from replug.data.records import Example
from replug.data.store import Corpus, CorpusStore, PreparedSet
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.folder import EvaluationFolder
from replug.evals.language_modelling import LanguageModelling
from replug.evals.loop import PromptedLM, outcome_rows
from replug.evals.search import find_all, query_folder
from replug.evals.temperature_fit import DocumentScores, ensemble_bits, fit_temperature
from replug.models.ensemble_temperature import PAPER, EnsembleTemperature, temperature_in

log = logging.getLogger(__name__)

Temperatures = Mapping[str, EnsembleTemperature]  # by source
AGAIN = "remove it, and temperatures are settled again"


def settled_temperatures(
    config: EvaluationConfig,
    corpus: Corpus | None,
    methods: Sequence[Method],
    lm: PromptedLM | None,
    folder: EvaluationFolder,
) -> Temperatures:
    """Return the temperature of every source whose similarities weigh documents, and keep it in a file.

    Raises UserError where they are to be fitted, and there are no development texts.
    """
    if folder.temperatures.is_file():
        return _read(folder.temperatures)
    largest: dict[str, Method] = {}  # by source, of those whose similarities weigh documents, that of most documents
    for method in methods:
        if method.is_weighted and method.takes_from_corpus:
            largest[method.source] = max(largest.get(method.source, method), method, key=lambda one: one.k)
    given = config.ensemble.temperature
    if given == FIT and largest:
        assert lm is not None, "what fits asks an LM"
        if not isinstance(corpus, PreparedSet):
            raise UserError(
                "ensemble.temperature is fit, and documents alone have no development texts; expected a prepared set "
                "with some (data.num_dev, data.dev), or a number"
            )
        examples = corpus.require_dev().examples()
        queries = [example.query for example in examples]
        own = [example.source for example in examples] if config.exclude_own_source else []
        searched = find_all(config, corpus, queries, [*largest.values()], folder.found, own=own, texts="development")
        found = {
            source: fit_ensemble(lm, examples, corpus.corpus, searched[source], method)
            for source, method in largest.items()
        }
    elif given is None:
        found = {source: temperature_in(query_folder(config, source)) or PAPER for source in largest}
    else:
        found = {source: EnsembleTemperature(float(given)) for source in largest}
    write_mark(folder.temperatures, {source: asdict(one) for source, one in found.items()})
    return found


def with_temperatures(
    found: Mapping[str, RetrievedDocuments], temperatures: Temperatures
) -> dict[str, RetrievedDocuments]:
    """Give what sources found the temperature of their ensembles."""
    return {source: replace(of, temperature=temperatures.get(source, PAPER)) for source, of in found.items()}


def fit_ensemble(
    lm: PromptedLM, examples: Sequence[Example], corpus: CorpusStore, found: RetrievedDocuments, method: Method
) -> EnsembleTemperature:
    """Fit the temperature of a method's retriever to what it finds for development texts, and log its worth there."""
    book = EvidenceBook([method], corpus, {method.source: found}, [True] * len(examples))
    task, scores = LanguageModelling(examples, keeps_documents=True), []
    task.open(lm, book)
    progress = Progress(f"development texts with {method.source}", len(examples))
    for row, outcome in enumerate(outcome_rows(task, book)):
        given = outcome["methods"][method.name]["detail"]["document_logprobs"]
        scores.append(DocumentScores(given, found.similarities[row, : method.k]))
        progress.advance()
    fit = fit_temperature(scores)
    num_bytes = sum(len(example.continuation.encode()) for example in examples)
    if fit.stays:
        log.warning(f"{method.source}: ensemble temperature stays 1 ({len(examples)} texts): {fit.stays}")
    else:
        log.info(
            f"{method.source}: ensemble temperature {fit.temperature:g} by {len(examples)} development texts "
            f"({fit.bits / num_bytes:.4f} bits per byte, {ensemble_bits(scores, 1.0) / num_bytes:.4f} at 1)"
        )
    return PAPER if fit.stays else EnsembleTemperature(fit.temperature, lm.lm.identity, method.k, len(examples))


def _read(path: Path) -> dict[str, EnsembleTemperature]:
    content = read_mark(path, AGAIN)
    return {source: EnsembleTemperature(**of) for source, of in content.items() if isinstance(of, dict)}
