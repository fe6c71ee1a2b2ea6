"""Passes of the LM over the questions beside answering them: it writes documents, reranks them, and is timed.

GenRead: the LM writes a document for a question, and reads it as if it was retrieved (Yu et al. 2023). Reranking orders
documents by how likely the LM finds the whole query after each (Ram et al. 2023, who take the last 16 tokens of a
context). Latency is what a question takes, retriever and LM together: asked one at a time, without a
cache, since the loop keeps several questions in flight.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from replug.answering.genread import WRITING, WrittenDocument, writing_prompt, written_document
from replug.config.methods import GENREAD, Method
from replug.data.progress import Progress
from replug.data.store import CorpusStore
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.kinds import EvalDataset, PromptedLM
from replug.evals.loop import Metric, in_order
from replug.evals.outcomes import OutcomeFile, Row

FIELDS = ("text", "prompt_tokens", "generated_tokens")  # of a written document


def write_documents(lm: PromptedLM, questions: Sequence[str], path: Path) -> list[WrittenDocument]:
    """Write a document for each question that is not blank and that the file at `path` lacks.

    Raises UserError where the file is of other questions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, asked = OutcomeFile(path), list(dict.fromkeys(questions))
    known = file.by("question", set(asked))
    progress = Progress("documents written by the LM", len(asked), len(known))
    missing = [question for question in asked if question not in known]
    begun = (_begin_writing(lm, question) for question in missing)
    for question, document in zip(missing, in_order(begun, lm.num_in_flight), strict=True):
        known[question] = {"question": question, **asdict(document)}
        file.append(known[question])
        progress.advance()
    return [WrittenDocument(*(known[question][name] for name in FIELDS)) for question in questions]


def _begin_writing(lm: PromptedLM, question: str) -> Callable[[], WrittenDocument]:
    """Ask for the document of a question; what is returned waits for it."""
    if not question.strip():
        return lambda: WrittenDocument(None, 0, 0)
    future = lm.lm.submit_answer(writing_prompt(question, lm.template), WRITING)
    return lambda: written_document(future.result())


def reranked(
    asked: PromptedLM,
    methods: Sequence[Method],
    corpus: CorpusStore,
    found: Mapping[str, RetrievedDocuments],
    queries: Sequence[str],
) -> dict[str, RetrievedDocuments]:
    """Return what each reranked method reads: its source's first k documents, the likeliest query first."""
    ordered = {}
    for method in (method for method in methods if method.is_reranked):
        rows = found[method.source].doc_rows[:, : method.k]
        progress = Progress(f"reranking: {method.name}", len(queries))
        begun = (
            _begin_scoring(asked, corpus.texts(documents), query)
            for documents, query in zip(rows, queries, strict=True)
        )
        best_first = []
        for row, scores in enumerate(in_order(begun, asked.num_in_flight)):
            best_first.append(rows[row][np.argsort(-scores, kind="stable")])
            progress.advance()
        ordered[method.name] = RetrievedDocuments(np.stack(best_first), np.zeros(rows.shape))
    return ordered


def _begin_scoring(asked: PromptedLM, documents: Sequence[str], query: str) -> Callable[[], np.ndarray]:
    """Ask for log-probs [K] of a query after each document; all are alike for a blank query, which reads nothing."""
    if not query.strip():
        return lambda: np.zeros(len(documents))
    prefixes = [asked.template.prefix(document, "", query) for document in documents]
    future = asked.lm.submit(prefixes, [query] * len(prefixes))
    return lambda: np.array([score.sum_logprob for score in future.result()])


SECONDS = Metric("seconds")
Search = Callable[[str, int], object]  # for the k nearest documents of a text


def measure_latencies(
    dataset: EvalDataset,
    lm: PromptedLM,
    book: EvidenceBook,
    searches: Mapping[str, Search],
    file: OutcomeFile,
    num_questions: int,
) -> list[Row]:
    """Return the seconds of the first questions; those that the file lacks are asked again, each method in turn.

    `lm.lm` is to be an LM without a cache. The documents that are read are those of the evaluation; searching for them
    again is what is timed. Each method's first question is asked once before, untimed: what begins all prompts is
    computed then, and never again.
    """
    task = dataset.make_task(lm, book)

    def measure(row: int) -> Row:
        example = task.examples[row]
        timed = {method.name: {"numbers": time_method(method, row), "detail": {}} for method in book.methods}
        return {"id": example.id, "group": example.group, "methods": timed}

    def time_method(method: Method, row: int) -> dict[str, float]:
        evidence, query = {method.name: book.of(row)[method.name]}, dataset.queries[row]
        begin = time.perf_counter()
        if method.source in searches and query.strip():
            searches[method.source](query, method.k)
        if method.source == GENREAD:
            _begin_writing(lm, dataset.questions[row])()
        found = time.perf_counter()
        task.submit(row, evidence)()
        return {"seconds": time.perf_counter() - begin, "evidence_seconds": found - begin}

    asked = [example.id for example in task.examples[:num_questions]]
    known = file.by("id", {example.id for example in task.examples})
    progress = Progress("latency", len(asked), sum(name in known for name in asked))
    if not known.keys() >= set(asked):
        measure(0)
    for row, name in enumerate(asked):
        if name not in known:
            known[name] = measure(row)
            file.append(known[name])
            progress.advance()
    return [known[name] for name in asked]
