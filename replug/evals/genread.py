"""GenRead: the LM itself writes the document that a question is answered from (Yu et al. 2023; Mallen et al. 2023).

All are written before the questions are asked, and kept in a file, so that an interrupted evaluation goes on after the
last one. As PopQA's official code has it, a document is the first line of at most 150 tokens, greedily.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, fields
from pathlib import Path

from replug.data.progress import Progress
from replug.evals.evidence import WrittenDocument
from replug.evals.kinds import PromptedLM
from replug.evals.loop import EXAMPLES_IN_FLIGHT
from replug.evals.outcomes import OutcomeFile, Row
from replug.evals.popqa.prompts import first_line, genread_prompt
from replug.models.generation import Generated, GenerationOptions

MAX_NEW_TOKENS = 150
FIELDS = [field.name for field in fields(WrittenDocument)]


def write_documents(lm: PromptedLM, questions: Sequence[str], path: Path) -> list[WrittenDocument]:
    """A document for each question; nobody is asked for a blank one, nor for what the file at `path` holds.

    Raises UserError where the file is of other questions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, asked = OutcomeFile(path), list(dict.fromkeys(questions))
    known = file.by("question", set(asked))
    progress = Progress("documents written by the LM", len(asked), len(known))
    for row in _written_rows(lm, [question for question in asked if question not in known]):
        file.append(row)
        known[row["question"]] = row
        progress.advance()
    return [WrittenDocument(**{name: known[question][name] for name in FIELDS}) for question in questions]


def _written_rows(lm: PromptedLM, questions: Sequence[str]) -> Iterator[Row]:
    """In the questions' order, some at a time."""
    in_flight: deque[tuple[str, Future[Generated] | None]] = deque()
    for question in questions:
        in_flight.append((question, _submit(lm, question)))
        if len(in_flight) > EXAMPLES_IN_FLIGHT:
            yield _row(*in_flight.popleft())
    while in_flight:
        yield _row(*in_flight.popleft())


def _row(question: str, future: "Future[Generated] | None") -> Row:
    return {"question": question, **asdict(_written(future))}


def write_document(lm: PromptedLM, question: str) -> WrittenDocument:
    """The document of one question, now."""
    return _written(_submit(lm, question))


def _submit(lm: PromptedLM, question: str) -> "Future[Generated] | None":
    if not question.strip():
        return None
    prompt = lm.template.fit(None, lambda _: genread_prompt(question), MAX_NEW_TOKENS)
    return lm.lm.submit_ensemble([prompt], [1.0], GenerationOptions(MAX_NEW_TOKENS))


def _written(future: "Future[Generated] | None") -> WrittenDocument:
    if future is None:
        return WrittenDocument(None, 0, 0)
    answer = future.result()
    return WrittenDocument(first_line(answer.text) or None, answer.prompt_tokens, answer.num_tokens)
