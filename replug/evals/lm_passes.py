"""Passes of the LM over the questions before it answers them: it writes documents and reranks them.

GenRead: the LM writes a document for a question, and reads it as if it was retrieved (Yu et al. 2023). Reranking orders
documents by how likely the LM finds the whole query after each (Ram et al. 2023, who take the last 16 tokens of a
context).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from replug.answering.genread import WRITING, WrittenDocument, writing_prompt, written_document
from replug.config.methods import Method
from replug.data.progress import Progress
from replug.data.store import CorpusStore
from replug.evals.evidence import RetrievedDocuments
from replug.evals.kinds import PromptedLM
from replug.evals.loop import in_order
from replug.evals.outcomes import OutcomeFile

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
