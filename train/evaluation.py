"""The evaluation at the end of a training; `replug evaluate TRAINING_CONFIG` repeats it.

It runs `language_modelling` on all held-out texts, and `retrieval` on texts that name gold documents, with the methods

none          the LM alone
replug        the untuned retriever
lsr           the tuned retriever
X/posterior   the documents of replug or lsr with weights that follow the text, from the same LM scores
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.choices import TrainedSide
from replug.config.methods import POSTERIOR, Method, parse_methods
from replug.config.rules import FIT
from replug.config.schema import Config
from replug.data.files import write_json
from replug.data.records import Example
from replug.data.rows import one_line, question_prompt
from replug.data.store import PreparedSet
from replug.evals.ensemble_temperatures import fit_ensemble
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.language_modelling import LanguageModelling, items_of, token_texts
from replug.evals.loop import Item, PromptedLM, Row, Task, outcomes_of, run_task, write_examples
from replug.evals.questions import OpenQuestion
from replug.evals.results import Results, add_temperatures, compare
from replug.evals.retrieval import FIRST_MEASURES, RECALL_DEPTH, Retrieval, gold_rows
from replug.index_workers.build import build_version
from replug.index_workers.build_plan import IndexState
from replug.index_workers.service import IndexService
from replug.models.build import has_tokenizer, load_encoder, posterior_weighting
from replug.models.encoder import Encoder, require_finite_vectors
from replug.models.ensemble import can_fit, mix_and_weigh
from replug.models.ensemble_temperature import PAPER, EnsembleTemperature, own_temperature, write_temperature
from replug.train.workers import Workers

log = logging.getLogger(__name__)

LANGUAGE_MODELLING, RETRIEVAL, QUESTIONS, ANSWERS = "language_modelling", "retrieval", "questions", "answers"
PICTURE, MOST_TOKENS = "document_weights.json", 48  # of the text in the picture
NUM_EXAMPLES, NUM_SHOWN = 6, 3  # texts or questions in the report, and documents of each retriever
QUESTION = "replug", "lsr"  # the run's question: does the tuned retriever help more than the untuned one?
Found = Mapping[str, RetrievedDocuments]  # by method, for all held-out texts


def evaluate_heldout(
    config: Config, data: PreparedSet, workers: Workers, found: Found, folder: Path
) -> dict[str, Results]:
    """Return the results of `language_modelling`, and of `retrieval` where texts name gold documents.

    `folder` keeps the outcomes, so an interrupted evaluation resumes after the stored ones.
    """
    everything = data.heldout.examples()
    examples = everything[: config.evaluate.max_examples]
    if len(examples) < len(everything):
        log.info(
            f"bits per byte on the first {len(examples)} of {len(everything)} held-out texts (evaluate.max_examples)"
        )
    results = {LANGUAGE_MODELLING: _predict(config, data, workers, examples, found, folder / LANGUAGE_MODELLING)}
    with_gold = [row for row, example in enumerate(everything) if example.gold]
    if with_gold:
        of_gold = {name: of.of(with_gold) for name, of in found.items()}
        texts = [everything[row] for row in with_gold]
        task, rows = Retrieval(items_of(texts), _gold_rows(data, texts)), [text.as_row() for text in texts]
        results[RETRIEVAL] = _rank(config, data, task, rows, of_gold, folder / RETRIEVAL, "gold documents")
    return results


def search_examples(
    config: Config,
    data: PreparedSet,
    index: IndexService,
    encoder: Encoder,
    version: int,
    examples: Sequence[Example] | Sequence[Item],
    k: int,
    are_questions: bool = False,
) -> RetrievedDocuments:
    """Return the `k` nearest documents of every example in an index version; a question may find its own source."""
    vectors = encoder.encode_query([example.query for example in examples]).numpy()
    require_finite_vectors(vectors, [example.id for example in examples])
    excludes = config.retrieve.exclude_own_source and not are_questions
    exclude = [example.source for example in examples] if excludes else None
    found = index.search(version, vectors, k, exclude)
    return RetrievedDocuments(found.doc_rows, found.similarities)


def evaluate_answers(
    config: Config,
    data: PreparedSet,
    workers: Workers,
    questions: Sequence[OpenQuestion],
    found: Found,
    folder: Path,
) -> Results:
    """Return bits per byte of the first answer to each question that has one; posterior weights read the question."""
    rows = [row for row, question in enumerate(questions) if question.answers]
    examples = []
    for row in rows:
        of, answer = questions[row].example, f" {one_line(questions[row].answers[0])}"
        examples.append(Example(of.id, question_prompt(of.query), answer, of.group, of.source, query=of.query))
    with_answer = {name: of.of(rows) for name, of in found.items()}
    return _predict(config, data, workers, examples, with_answer, folder, is_asked=True)


def _predict(
    config: Config,
    data: PreparedSet,
    workers: Workers,
    examples: Sequence[Example],
    found: Found,
    folder: Path,
    is_asked: bool = False,
) -> Results:
    """Measure every method on every text. Outcomes are reused only for the same LM and prompt settings."""
    k, lm = config.evaluate.k, config.lm
    methods = _methods(["none", *found, *(f"{name}/{POSTERIOR}" for name in found)], k)
    weighting = posterior_weighting(config.ensemble, config.lm, is_asked)
    book = EvidenceBook(methods, data.corpus, found, [True] * len(examples), posterior=weighting)
    task = LanguageModelling(examples, beta=config.loss.beta)
    task.open(PromptedLM(workers.lm, workers.template), book)
    measured = {
        **_identity(data, [example.as_row() for example in examples], book),
        "lm": workers.lm.identity,
        "too_long": lm.too_long.value,
        "beta": str(config.loss.beta),
    }
    rows = _outcomes(task, book, folder, measured, "bits per byte")
    results = compare(task, rows, methods, config.seed, question=QUESTION)
    add_temperatures(results, book, len(examples))
    if not is_asked:
        write_json(folder / PICTURE, document_weights_picture(config, workers, examples, book, rows, list(found)[-1]))
    return results


def document_weights_picture(
    config: Config,
    workers: Workers,
    examples: Sequence[Example],
    book: EvidenceBook,
    rows: Sequence[Row],
    fixed: str,
) -> dict[str, Any]:
    """Return the posterior weights along the text with the largest gain per byte, for `evals.charts`.

    The cache holds the scores; the first `MOST_TOKENS` tokens are shown. Tokens have no text if the tokenizer of a
    server is unknown, or splits the text differently from the server.
    """
    moving, lm = f"{fixed}/{POSTERIOR}", config.lm

    def gain(row: int) -> float:
        before, after = (rows[row]["methods"][name]["numbers"] for name in (fixed, moving))
        return (before["bits"] - after["bits"]) / before["bytes"]

    row = max(range(len(rows)), key=gain)
    evidence = {name: of for name, of in book.of(row).items() if name in (fixed, moving)}
    tokens_of = token_texts(lm) if has_tokenizer(lm) else None
    task = LanguageModelling([examples[row]], tokens_of, keeps_documents=True)
    task.open(PromptedLM(workers.lm, workers.template), book)
    details = {name: outcome.detail for name, outcome in task.submit(0, evidence)().items()}
    of = evidence[moving]
    given = details[moving]["document_logprobs"]
    weights = mix_and_weigh(given, of.log_prior, of.weighting)[1][:, :-1]
    after, before = (np.array(details[name]["token_logprobs"]) for name in (moving, fixed))
    tokens = details[moving].get("token_texts", ())
    members = book.ids(of.doc_rows)
    return {
        "id": examples[row].id,
        "method": moving,
        "gain_bits_per_byte": gain(row),
        "num_tokens": len(after),
        "documents": members,
        "tokens": (tokens if len(tokens) == len(after) else [""] * len(after))[:MOST_TOKENS],
        "weights": weights[:, :MOST_TOKENS].round(4).tolist(),
        "gain_bits": ((after - before) / math.log(2))[:MOST_TOKENS].round(4).tolist(),
    }


def judge_by_questions(
    config: Config, data: PreparedSet, questions: Sequence[OpenQuestion], found: Found, folder: Path
) -> Results:
    """Measure the rank at which each retriever finds the first right document of held-out questions.

    A question's gold documents count; without any, passages that hold an answer (DPR, Karpukhin et al. 2020).
    """
    examples, answers = [question.example for question in questions], [question.answers for question in questions]
    rows = [[of.query, of.gold, right] for of, right in zip(examples, answers, strict=True)]
    task = Retrieval(examples, _gold_rows(data, examples), FIRST_MEASURES, answers)
    return _rank(config, data, task, rows, found, folder, "questions", QUESTION)


def _rank(
    config: Config,
    data: PreparedSet,
    task: Retrieval,
    rows: list[Any],
    found: Found,
    folder: Path,
    what: str,
    question: tuple[str, str] | None = None,
) -> Results:
    """Measure how each retriever ranks the right documents of the examples; `rows` identify the examples."""
    k = min(of.doc_rows.shape[1] for of in found.values())
    book = EvidenceBook(_methods([*found], k), data.corpus, found, [True] * len(rows))
    outcomes = _outcomes(task, book, folder, _identity(data, rows, book), what)
    return compare(task, outcomes, book.methods, config.seed, question=question)


def _gold_rows(data: PreparedSet, examples: Sequence[Example] | Sequence[Item]) -> list[dict[int, int]]:
    rows_of = data.corpus.rows_of(document for example in examples for document in example.gold)
    return gold_rows((dict.fromkeys(example.gold, 1) for example in examples), rows_of)


def _methods(names: list[str], k: int) -> list[Method]:
    return parse_methods(names, k, dict.fromkeys(("replug", "lsr"), ""))


def _identity(data: PreparedSet, rows: list[Any], book: EvidenceBook) -> dict[str, str]:
    return {
        "texts": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "corpus": data.corpus_sha256,
        "documents": book.digest(),
    }


def _outcomes(task: Task, book: EvidenceBook, folder: Path, measured: dict[str, str], what: str) -> list[Row]:
    """Return the outcome of every example, reusing stored outcomes of the same measurement."""
    rows = run_task(task, book, outcomes_of(folder, json.dumps(measured)), what)
    write_examples(folder / "examples.parquet", rows, book, task)
    return rows


def measured_encoder(config: Config, path: Path | None = None) -> Encoder:
    """Return the retriever of the configuration, or another of its kind, with `ensemble.temperature`.

    With `fit`, the temperature is None until fitted.
    """
    encoder, requested = load_encoder(config.retriever, path, config.index.dims), config.ensemble.temperature
    if requested is not None:
        encoder.temperature = None if requested == FIT else EnsembleTemperature(float(requested))
    return encoder


def search_heldout(
    config: Config, data: PreparedSet, workers: Workers, encoder: Encoder, index: IndexState, name: str = "lsr"
) -> RetrievedDocuments:
    """Search the held-out texts with an encoder in its own index; returns documents with the ensemble's temperature.

    If documents do not learn, the index is version 0. With `ensemble.temperature=fit` the temperature is fitted to
    the development texts and their documents, becomes the encoder's, and is saved with the index version's encoder.
    `name` names the encoder in messages.
    """
    version, k = searched_version(config, index.version), min(len(data.corpus), config.evaluate.k)
    is_built = version == index.version
    if is_built:
        build_version(config, encoder, data, workers.index, index)
    if config.ensemble.temperature == FIT and not can_fit(len(data.require_dev())):
        encoder.temperature = PAPER
    elif config.ensemble.temperature == FIT:
        examples = data.require_dev().examples()
        retrieved = search_examples(config, data, workers.index, encoder, version, examples, k)
        lm = PromptedLM(workers.lm, workers.template)
        encoder.temperature = fit_ensemble(lm, examples, data.corpus, retrieved, Method(name, name, k, False))
        if is_built:
            write_temperature(workers.index.store.encoder_folder(version), encoder.temperature, is_listed=False)
    most = min(len(data.corpus), max(config.evaluate.k, RECALL_DEPTH))  # the depth of the deepest measurement
    retrieved = search_examples(config, data, workers.index, encoder, version, data.heldout.examples(), most)
    return replace(retrieved, temperature=own_temperature(encoder))


def searched_version(config: Config, version: int) -> int:
    """Return the index version that an encoder searches: version 0 if documents do not learn."""
    return 0 if config.retriever.train is TrainedSide.query else version


def first_documents(data: PreparedSet, found: Found, texts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a few of the texts or questions with each retriever's first documents, starting with changed ones."""
    before, after = (found[name] for name in QUESTION)
    rows = np.argsort(before.doc_rows[:, 0] == after.doc_rows[:, 0], kind="stable")[:NUM_EXAMPLES].tolist()

    def shown(of: RetrievedDocuments, row: int) -> list[dict[str, Any]]:
        documents = data.corpus.documents(of.doc_rows[row, :NUM_SHOWN])
        similarities = of.similarities[row].tolist()
        return [
            {"id": doc.id, "text": doc.text, "similarity": value}
            for doc, value in zip(documents, similarities, strict=False)
        ]

    return [{**texts[row], "before": shown(before, row), "after": shown(after, row)} for row in rows]
