"""The evaluation that training ends with, which `replug evaluate TRAINING_CONFIG` runs again.

It is the evaluation `lm` of the held-out texts, and `retrieval` of those that name gold documents, under the methods

none, random   the LM alone, and with documents that nobody chose
replug         the retriever as it was
lsr            the tuned one

A refresh is measured by the same task, on the last held-out texts under the new version alone.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from replug.config.methods import RANDOM, Method, parse_methods
from replug.config.schema import Config
from replug.data.records import Window
from replug.data.store import PreparedSet
from replug.evals.comparison import Measurements
from replug.evals.ensemble_temperatures import fit_ensemble
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, random_documents
from replug.evals.kinds import PromptedLM
from replug.evals.loop import Task, outcome_rows, run_task
from replug.evals.outcomes import Row, outcomes_of, write_examples
from replug.evals.retrieval import RECALL_DEPTH, gold_rows
from replug.evals.tasks.lm import BITS_PER_BYTE, LanguageModelling, window_examples
from replug.evals.tasks.retrieval import Retrieval
from replug.index_workers.build import document_search
from replug.index_workers.service import IndexService
from replug.models.build import load_encoder
from replug.models.encoder import Encoder, require_finite_vectors
from replug.models.ensemble_temperature import EnsembleTemperature, own_temperature
from replug.train.results import bpb_results, ensemble_results, headroom_results, retrieval_results
from replug.train.workers import Workers

log = logging.getLogger(__name__)

Found = Mapping[str, RetrievedDocuments]  # by method, for all held-out texts


def search_heldout(
    config: Config, data: PreparedSet, index: IndexService, encoder: Encoder, version: int
) -> RetrievedDocuments:
    """The documents of every held-out text, as many as any measurement needs."""
    k = min(len(data.corpus), max(config.evaluate.k, RECALL_DEPTH))
    return _search(config, data, index, encoder, version, data.heldout.windows(), k)


def evaluate_heldout(config: Config, data: PreparedSet, workers: Workers, found: Found, folder: Path) -> dict:
    """What results.json holds. Outcomes lie in `folder`: interrupted, it goes on after those that are there."""
    everything = data.heldout.windows()
    windows = everything[: config.evaluate.max_windows]
    if len(windows) < len(everything):
        log.info(
            f"bits per byte on the first {len(windows)} of {len(everything)} held-out texts (evaluate.max_windows)"
        )
    rows = _predict(config, data, workers, windows, found, folder / "lm")
    results = bpb_results(rows, config.evaluate.num_resamples, config.seed)
    k = min(len(data.corpus), config.evaluate.k)
    results |= {"ensemble": ensemble_results(found, k), "headroom": headroom_results(rows, [*found], k)}
    with_gold = [row for row, window in enumerate(everything) if window.gold]
    if not with_gold:
        return results
    of_gold = {name: of.of(with_gold) for name, of in found.items()}
    rows = _retrieve(data, [everything[row] for row in with_gold], of_gold, folder / "retrieval")
    return {**results, "retrieval": retrieval_results(rows)}


def fit_on_development(
    config: Config, data: PreparedSet, workers: Workers, encoder: Encoder, version: int, name: str
) -> EnsembleTemperature:
    """The temperature of an encoder's ensemble by the development texts, whose documents are of an index version.

    `name` is what readers call the encoder.
    """
    windows = data.require_dev().windows()
    k = min(len(data.corpus), config.evaluate.k)
    found = _search(config, data, workers.index, encoder, version, windows, k)
    asked = PromptedLM(workers.lm, workers.template, workers.lm)
    return fit_ensemble(asked, windows, data.corpus, found, Method(name, name, k, False))


def heldout_bpb(config: Config, data: PreparedSet, workers: Workers, version: int, count: int) -> float:
    """Bits per byte of the last `count` held-out texts, given the documents that a version and its weights find.

    The last ones, since the table at the end begins with the first.
    """
    windows = data.heldout.windows(range(len(data.heldout) - count, len(data.heldout)))
    encoder = load_encoder(config.retriever, workers.index.store.encoder_folder(version), config.index.dims)
    searched = _search(config, data, workers.index, encoder, version, windows, config.evaluate.k)
    found = {"version": replace(searched, temperature=own_temperature(encoder))}
    book = EvidenceBook(_methods([*found], config.evaluate.k), data.corpus, found, [True] * count)
    measured = Measurements(list(outcome_rows(LanguageModelling(workers.lm, workers.template, windows), book)))
    return measured.value("version", BITS_PER_BYTE, measured.all)


def _search(
    config: Config,
    data: PreparedSet,
    index: IndexService,
    encoder: Encoder,
    version: int,
    windows: Sequence[Window],
    k: int,
) -> RetrievedDocuments:
    vectors = encoder.encode_query([window.context for window in windows]).numpy()
    require_finite_vectors(vectors, [window.id for window in windows])
    exclude = [window.source for window in windows] if config.retrieve.exclude_own_source else None
    found = document_search(config, encoder, data, index)(version, vectors, k, exclude)
    return RetrievedDocuments(found.doc_rows, found.similarities)


def _predict(
    config: Config, data: PreparedSet, workers: Workers, windows: Sequence[Window], found: Found, folder: Path
) -> list[Row]:
    """Every method's prediction of every text. The LM and how it is prompted are part of what was measured."""
    k, lm = config.evaluate.k, config.lm
    drawn = {RANDOM: random_documents(len(data.corpus), len(windows), k, config.seed)}
    methods = _methods(["none", RANDOM, *found], k)
    book = EvidenceBook(methods, data.corpus, {**drawn, **found}, [True] * len(windows))
    task = LanguageModelling(workers.lm, workers.template, windows, beta=config.loss.beta)
    prompts = {
        "lm": workers.lm.identity,
        "separator": lm.separator,
        "too_long": lm.too_long.value,
        "beta": str(config.loss.beta),
    }
    return _measure(task, book, folder, {**_identity(data, windows, book), **prompts}, "bits per byte")


def _retrieve(data: PreparedSet, windows: Sequence[Window], found: Found, folder: Path) -> list[Row]:
    """How each retriever ranks the gold documents."""
    k = min(of.doc_rows.shape[1] for of in found.values())
    book = EvidenceBook(_methods([*found], k), data.corpus, found, [True] * len(windows))
    task = Retrieval(
        window_examples(windows),
        gold_rows([window.gold for window in windows], data.corpus.rows_of(d for w in windows for d in w.gold)),
        finds_all=k < RECALL_DEPTH,
    )
    return _measure(task, book, folder, _identity(data, windows, book), "gold documents")


def _methods(names: list[str], k: int) -> list[Method]:
    return parse_methods(names, k, dict.fromkeys(names, ""))


def _identity(data: PreparedSet, windows: Sequence[Window], book: EvidenceBook) -> dict[str, str]:
    texts = json.dumps([asdict(window) for window in windows])
    return {
        "texts": hashlib.sha256(texts.encode()).hexdigest(),
        "corpus": data.corpus_sha256,
        "documents": book.digest(),
    }


def _measure(task: Task, book: EvidenceBook, folder: Path, measured: dict[str, str], what: str) -> list[Row]:
    """The outcomes of every example, those that the folder holds of the same measurement included."""
    outcomes = outcomes_of(folder, json.dumps(measured))
    rows = run_task(task, book, outcomes, what)
    write_examples(folder / "examples.parquet", rows, book, task)
    return rows
