"""GenRead: the LM itself writes the document that a question is answered from (Yu et al. 2023; Mallen et al. 2023).

All are written before the questions are asked, and kept in a file, so that an interrupted evaluation goes on after the
last one. As PopQA's official code has it, a document is the first line of at most 150 tokens, greedily.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, fields
from pathlib import Path

from replug.configs.errors import UserError
from replug.data.progress import Progress
from replug.evals.evidence import WrittenDocument
from replug.evals.kinds import PromptedLM
from replug.evals.loop import EXAMPLES_IN_FLIGHT
from replug.evals.outcomes import OutcomeFile
from replug.evals.popqa.prompts import first_line, genread_prompt
from replug.models.generation import Generated, GenerationOptions

MAX_NEW_TOKENS = 150
FIELDS = [field.name for field in fields(WrittenDocument)]


def write_documents(lm: PromptedLM, questions: Sequence[str], path: Path) -> list[WrittenDocument]:
    """A document for each question; nobody is asked for a blank one, nor for what the file at `path` holds.

    Raises UserError where the file is of other questions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = OutcomeFile(path)
    _require_same_questions(file, questions)
    progress = Progress("documents written by the LM", len(questions), len(file.rows))
    pending: dict[int, Future[Generated] | None] = {}
    start = len(file.rows)
    for row in range(start, len(questions) + EXAMPLES_IN_FLIGHT):
        if row < len(questions):
            pending[row] = _submit(lm, questions[row])
        if (ready := row - EXAMPLES_IN_FLIGHT) in pending:
            file.append({"question": questions[ready], **asdict(_written(pending.pop(ready)))})
            progress.advance()
    return [WrittenDocument(**{name: row[name] for name in FIELDS}) for row in file.rows]


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


def _require_same_questions(file: OutcomeFile, questions: Sequence[str]) -> None:
    for number, row in enumerate(file.rows):
        if number >= len(questions) or row["question"] != questions[number]:
            raise UserError(
                f"{file.path}:{number + 1} is a document for {row['question']!r}, which is not question {number + 1} "
                "of this evaluation: bring its questions back, or give another out"
            )
