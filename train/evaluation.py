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

import numpy as np

from replug.config.choices import TrainedSide
from replug.config.methods import RANDOM, Method, parse_methods
from replug.config.rules import FIT
from replug.config.schema import Config
from replug.data.files import write_json
from replug.data.records import Example
from replug.data.store import PreparedSet
from replug.evals.comparison import Measurements
from replug.evals.ensemble_temperatures import fit_ensemble
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, random_documents
from replug.evals.kinds import PromptedLM
from replug.evals.loop import Task, outcome_rows, run_task
from replug.evals.outcomes import Row, outcomes_of
from replug.evals.outcomes import write_examples as write_outcomes
from replug.evals.retrieval import RECALL_DEPTH, gold_rows
from replug.evals.tasks.lm import BITS_PER_BYTE, LanguageModelling, items_of
from replug.evals.tasks.retrieval import Retrieval
from replug.index_workers.build import build_version, document_search
from replug.index_workers.build_plan import IndexState
from replug.index_workers.service import IndexService
from replug.models.build import load_encoder
from replug.models.encoder import Encoder, require_finite_vectors
from replug.models.ensemble_temperature import EnsembleTemperature, own_temperature, write_temperature
from replug.train.results import bpb_results, ensemble_results, headroom_results, retrieval_results
from replug.train.run_dir import RunDirectory
from replug.train.workers import Workers

log = logging.getLogger(__name__)

NUM_EXAMPLES = 6  # held-out texts shown in the report with what each retriever finds
Found = Mapping[str, RetrievedDocuments]  # by method, for all held-out texts


def evaluate_heldout(config: Config, data: PreparedSet, workers: Workers, found: Found, folder: Path) -> dict:
    """What results.json holds. Outcomes lie in `folder`: interrupted, it goes on after those that are there."""
    everything = data.heldout.examples()
    examples = everything[: config.evaluate.max_examples]
    if len(examples) < len(everything):
        log.info(
            f"bits per byte on the first {len(examples)} of {len(everything)} held-out texts (evaluate.max_examples)"
        )
    rows = _predict(config, data, workers, examples, found, folder / "lm")
    results = bpb_results(rows, config.evaluate.num_resamples, config.seed)
    k = min(len(data.corpus), config.evaluate.k)
    results |= {"ensemble": ensemble_results(found, k), "headroom": headroom_results(rows, [*found], k)}
    with_gold = [row for row, example in enumerate(everything) if example.gold]
    if not with_gold:
        return results
    of_gold = {name: of.of(with_gold) for name, of in found.items()}
    rows = _retrieve(data, [everything[row] for row in with_gold], of_gold, folder / "retrieval")
    return {**results, "retrieval": retrieval_results(rows)}


def heldout_bpb(config: Config, data: PreparedSet, workers: Workers, version: int, count: int) -> float:
    """Bits per byte of the last `count` held-out texts, given the documents that a version and its weights find.

    The last ones, since the table at the end begins with the first.
    """
    examples = data.heldout.examples(range(len(data.heldout) - count, len(data.heldout)))
    encoder = load_encoder(config.retriever, workers.index.store.encoder_folder(version), config.index.dims)
    searched = _search(config, data, workers.index, encoder, version, examples, config.evaluate.k)
    found = {"version": replace(searched, temperature=own_temperature(encoder))}
    book = EvidenceBook(_methods([*found], config.evaluate.k), data.corpus, found, [True] * count)
    measured = Measurements(list(outcome_rows(LanguageModelling(workers.lm, workers.template, examples), book)))
    return measured.value("version", BITS_PER_BYTE, measured.all)


def _search(
    config: Config,
    data: PreparedSet,
    index: IndexService,
    encoder: Encoder,
    version: int,
    examples: Sequence[Example],
    k: int,
) -> RetrievedDocuments:
    vectors = encoder.encode_query([example.context for example in examples]).numpy()
    require_finite_vectors(vectors, [example.id for example in examples])
    exclude = [example.source for example in examples] if config.retrieve.exclude_own_source else None
    found = document_search(config, encoder, data, index)(version, vectors, k, exclude)
    return RetrievedDocuments(found.doc_rows, found.similarities)


def _predict(
    config: Config, data: PreparedSet, workers: Workers, examples: Sequence[Example], found: Found, folder: Path
) -> list[Row]:
    """Every method's prediction of every text. The LM and how it is prompted are part of what was measured."""
    k, lm = config.evaluate.k, config.lm
    drawn = {RANDOM: random_documents(len(data.corpus), len(examples), k, config.seed)}
    methods = _methods(["none", RANDOM, *found], k)
    book = EvidenceBook(methods, data.corpus, {**drawn, **found}, [True] * len(examples))
    task = LanguageModelling(workers.lm, workers.template, examples, beta=config.loss.beta)
    prompts = {
        "lm": workers.lm.identity,
        "separator": lm.separator,
        "too_long": lm.too_long.value,
        "beta": str(config.loss.beta),
    }
    return _measure(task, book, folder, {**_identity(data, examples, book), **prompts}, "bits per byte")


def _retrieve(data: PreparedSet, examples: Sequence[Example], found: Found, folder: Path) -> list[Row]:
    """How each retriever ranks the gold documents."""
    k = min(of.doc_rows.shape[1] for of in found.values())
    book = EvidenceBook(_methods([*found], k), data.corpus, found, [True] * len(examples))
    task = Retrieval(
        items_of(examples),
        gold_rows([example.gold for example in examples], data.corpus.rows_of(d for w in examples for d in w.gold)),
        finds_all=k < RECALL_DEPTH,
    )
    return _measure(task, book, folder, _identity(data, examples, book), "gold documents")


def _methods(names: list[str], k: int) -> list[Method]:
    return parse_methods(names, k, dict.fromkeys(names, ""))


def _identity(data: PreparedSet, examples: Sequence[Example], book: EvidenceBook) -> dict[str, str]:
    texts = json.dumps([asdict(example) for example in examples])
    return {
        "texts": hashlib.sha256(texts.encode()).hexdigest(),
        "corpus": data.corpus_sha256,
        "documents": book.digest(),
    }


def _measure(task: Task, book: EvidenceBook, folder: Path, measured: dict[str, str], what: str) -> list[Row]:
    """The outcomes of every example, those that the folder holds of the same measurement included."""
    outcomes = outcomes_of(folder, json.dumps(measured))
    rows = run_task(task, book, outcomes, what)
    write_outcomes(folder / "examples.parquet", rows, book, task)
    return rows


def measured_encoder(config: Config, path: Path | None = None) -> Encoder:
    """Return the retriever of the configuration, or another of its kind, with the temperature that is asked for.

    One that is to be fitted has none until then.
    """
    encoder, asked = load_encoder(config.retriever, path, config.index.dims), config.ensemble.temperature
    if asked is not None:
        encoder.temperature = None if asked == FIT else EnsembleTemperature(float(asked))
    return encoder


def found_before(config: Config, run: RunDirectory, data: PreparedSet, workers: Workers) -> RetrievedDocuments:
    """Return what the retriever finds for the held-out texts as it was: index version 0."""
    saved = run.found_before
    if saved.exists():
        return RetrievedDocuments.load(saved)
    found = found_by(config, data, workers, measured_encoder(config), IndexState(0, 0), "replug")
    found.save(saved)
    return found


def found_best(config: Config, run: RunDirectory, data: PreparedSet, workers: Workers) -> dict[str, RetrievedDocuments]:
    """Return what the weights find that did best while training, where they are asked for and are not the last ones."""
    best = run.best_weights() if config.evaluate.best else None
    if best is None or best["step"] == config.train.max_steps:
        return {}
    version = workers.index.store.versions()[-1] + 1
    index = IndexState(version, best["step"])
    found = found_by(config, data, workers, measured_encoder(config, run.best), index, "best")
    workers.index.store.remove_all_but({*workers.index.store.versions()} - {version})
    return {"best": found}


def found_by(
    config: Config, data: PreparedSet, workers: Workers, encoder: Encoder, index: IndexState, name: str = "lsr"
) -> RetrievedDocuments:
    """Return what an encoder finds for the held-out texts in an index of its own, and its ensemble's temperature.

    Where documents stay as they are, the index is version 0, which is theirs. A temperature that is fitted, to the
    development texts and what is found for them, becomes the encoder's. It is saved with the encoder where the index's
    version is, too. `name` is what readers call the encoder.
    """
    is_built = config.retriever.train is not TrainedSide.query or index.version == 0
    if is_built:
        build_version(config, encoder, data, workers.index, index)
    version, k = index.version if is_built else 0, min(len(data.corpus), config.evaluate.k)
    if config.ensemble.temperature == FIT:
        examples = data.require_dev().examples()
        found = _search(config, data, workers.index, encoder, version, examples, k)
        asked = PromptedLM(workers.lm, workers.template, workers.lm)
        encoder.temperature = fit_ensemble(asked, examples, data.corpus, found, Method(name, name, k, False))
        if is_built:
            write_temperature(workers.index.store.encoder_folder(version), encoder.temperature, is_listed=False)
    most = min(len(data.corpus), max(config.evaluate.k, RECALL_DEPTH))  # as many as any measurement needs
    found = _search(config, data, workers.index, encoder, version, data.heldout.examples(), most)
    return replace(found, temperature=own_temperature(encoder))


def write_examples(run: RunDirectory, data: PreparedSet, before: RetrievedDocuments, after: RetrievedDocuments) -> None:
    """Write a few held-out texts with the documents that each retriever ranks first, those that changed most first."""
    is_same = before.doc_rows[:, 0] == after.doc_rows[:, 0]
    rows = np.argsort(is_same, kind="stable")[:NUM_EXAMPLES].tolist()
    examples = []
    for row, example in zip(rows, data.heldout.examples(rows), strict=True):
        found = {name: _shown(data, of, row) for name, of in (("before", before), ("after", after))}
        examples.append({"context": example.context, "continuation": example.continuation, **found})
    write_json(run.examples, examples)


def _shown(data: PreparedSet, found: RetrievedDocuments, row: int, k: int = 3) -> list[dict]:
    documents = data.corpus.documents(found.doc_rows[row, :k])
    return [
        {"id": doc.id, "text": doc.text, "similarity": float(similarity)}
        for doc, similarity in zip(documents, found.similarities[row], strict=False)
    ]
