"""Passes of the LM over the questions before it answers them: it writes documents and reranks them.

GenRead: the LM writes a document for a question, and reads it as if it was retrieved (Yu et al. 2023). The prompt, and
what is kept of the answer, are those of the official code of PopQA (Mallen et al. 2023). Reranking orders
documents by how likely the LM finds the whole query after each (Ram et al. 2023, who take the last 16 tokens of a
context).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from replug.answering.prompts import BETWEEN_BLOCKS
from replug.config.methods import Method
from replug.data.progress import Progress
from replug.data.rows import one_line
from replug.data.store import CorpusStore
from replug.evals.evidence import RetrievedDocuments, WrittenDocument
from replug.evals.kinds import PromptedLM
from replug.evals.loop import in_order
from replug.models.generation import GenerationOptions

WRITING = GenerationOptions(150)  # tokens of a document
TEMPLATE = "Generate a background document from Wikipedia to answer the given question. {}"


def genread_prompt(question: str) -> str:
    """Return the prompt that the LM continues by a document of its own."""
    return TEMPLATE.format(one_line(question))


def first_line(generated: str) -> str:
    """Return the first line of the answer, after a blank line that it may begin with, as the official code cuts it."""
    return generated.removeprefix(BETWEEN_BLOCKS).partition("\n")[0].strip()


def write_documents(lm: PromptedLM, questions: Sequence[str]) -> list[WrittenDocument]:
    """Write a document for each question that is not blank; equal questions share one. The LM's cache keeps them.

    Raises UnscorableText for a prompt that the LM does not hold.
    """
    distinct = list(dict.fromkeys(questions))
    progress, written = Progress("documents written by the LM", len(distinct)), dict[str, WrittenDocument]()

    def begin(question: str) -> Callable[[], WrittenDocument]:
        if not question.strip():
            return lambda: WrittenDocument(None, 0, 0)
        prompt = lm.template.fit(None, lm.template.around(lambda _: genread_prompt(question)), WRITING.max_new_tokens)
        future = lm.lm.submit_answer(prompt, WRITING)

        def finish() -> WrittenDocument:
            generated = future.result()
            text = first_line(generated.text) or None
            return WrittenDocument(text, generated.prompt_tokens, generated.num_tokens)

        return finish

    for question, document in zip(distinct, in_order(map(begin, distinct), lm.num_in_flight), strict=True):
        written[question] = document
        progress.advance()
    return [written[question] for question in questions]


def reranked(
    lm: PromptedLM,
    methods: Sequence[Method],
    corpus: CorpusStore,
    retrieved: Mapping[str, RetrievedDocuments],
    queries: Sequence[str],
    cut: Callable[[str], str] = str,
) -> dict[str, RetrievedDocuments]:
    """Return what each reranked method reads: its source's first k documents, the likeliest query first.

    A blank query, which nothing is retrieved for, keeps the order. The LM reads documents as `cut` shortens them.
    """

    def begin(rows: np.ndarray, query: str) -> Callable[[], np.ndarray]:
        if not query.strip():
            return lambda: np.zeros(len(rows))
        prefixes = [lm.template.prefix(cut(document), "", query) for document in corpus.texts(rows)]
        future = lm.lm.submit(prefixes, [query] * len(prefixes))
        return lambda: np.array([score.sum_logprob for score in future.result()])

    ordered = {}
    for method in (method for method in methods if method.is_reranked):
        rows = retrieved[method.source].doc_rows[:, : method.k]
        progress = Progress(f"reranking: {method.name}", len(queries))
        best_first = []
        for row, scores in enumerate(in_order(map(begin, rows, queries), lm.num_in_flight)):
            best_first.append(rows[row][np.argsort(-scores, kind="stable")])
            progress.advance()
        ordered[method.name] = RetrievedDocuments(np.stack(best_first), np.zeros(rows.shape))
    return ordered
