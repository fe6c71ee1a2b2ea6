"""MMLU (Hendrycks et al. 2021) as REPLUG asks it: five demonstrations, a retrieved document, the letter's probability.

Each demonstration has the first document found for it before it (REPLUG, section 6.2, and the appendix's prompt).

The questions are files `dev/<subject>_dev.csv` and `test/<subject>_test.csv` of question, four choices and answer: the
official ones without a header and with letters, or with a header row and the answer as a letter or as 0 to 3.
Given K documents, the LM's probability of each letter is mixed over them (`models.ensemble`); the largest answers.

Where the LM holds fewer tokens, the last demonstrations are dropped until all prompts of a question fit, as Hendrycks
et al.'s code does. Only where none is left is a document cut (`lm.too_long`). All documents of a question stand behind
the same demonstrations: the ensemble mixes what documents change, and nothing else.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from replug.config.errors import RunError, UserError
from replug.evals.evidence import Evidence
from replug.evals.loop import Item
from replug.evals.questions import BETWEEN_BLOCKS, knowledge_line
from replug.models.ensemble import log_softmax, mix_token_logprobs
from replug.models.prompt import PromptTemplate

SUBCATEGORIES = {
    "physics": ("astronomy", "college_physics", "conceptual_physics", "high_school_physics"),
    "chemistry": ("college_chemistry", "high_school_chemistry"),
    "biology": ("college_biology", "high_school_biology"),
    "computer science": (
        "college_computer_science",
        "computer_security",
        "high_school_computer_science",
        "machine_learning",
    ),
    "math": (
        "abstract_algebra",
        "college_mathematics",
        "elementary_mathematics",
        "high_school_mathematics",
        "high_school_statistics",
    ),
    "engineering": ("electrical_engineering",),
    "history": ("high_school_european_history", "high_school_us_history", "high_school_world_history", "prehistory"),
    "philosophy": (
        "formal_logic",
        "logical_fallacies",
        "moral_disputes",
        "moral_scenarios",
        "philosophy",
        "world_religions",
    ),
    "law": ("international_law", "jurisprudence", "professional_law"),
    "politics": (
        "high_school_government_and_politics",
        "public_relations",
        "security_studies",
        "us_foreign_policy",
    ),
    "culture": ("human_sexuality", "sociology"),
    "economics": ("econometrics", "high_school_macroeconomics", "high_school_microeconomics"),
    "geography": ("high_school_geography",),
    "psychology": ("high_school_psychology", "professional_psychology"),
    "other": ("global_facts", "miscellaneous", "professional_accounting"),
    "business": ("business_ethics", "management", "marketing"),
    "health": (
        "anatomy",
        "clinical_knowledge",
        "college_medicine",
        "human_aging",
        "medical_genetics",
        "nutrition",
        "professional_medicine",
        "virology",
    ),
}
CATEGORIES = {
    "STEM": ("physics", "chemistry", "biology", "computer science", "math", "engineering"),
    "humanities": ("history", "philosophy", "law"),
    "social sciences": ("politics", "culture", "economics", "geography", "psychology"),
    "other": ("other", "business", "health"),
}
CATEGORY_OF = {
    subject: category
    for category, subcategories in CATEGORIES.items()
    for subcategory in subcategories
    for subject in SUBCATEGORIES[subcategory]
}


LETTERS = ("A", "B", "C", "D")
CONTINUATIONS = tuple(f" {letter}" for letter in LETTERS)
NUM_DEMONSTRATIONS = 5
FIELDS = "question, A, B, C, D, answer"


@dataclass(frozen=True, slots=True)
class MmluQuestion:
    """A question, `example.query`, of the subject `example.group`; `answer` is the right choice's place, 0 to 3."""

    example: Item
    choices: tuple[str, str, str, str]
    answer: int


@dataclass(frozen=True, slots=True)
class MmluSet:
    """The questions that are asked, in the order of subjects and files, and each subject's demonstrations."""

    questions: tuple[MmluQuestion, ...]
    demonstrations: dict[str, tuple[MmluQuestion, ...]]


def read_mmlu(folder: Path, num_demonstrations: int = NUM_DEMONSTRATIONS) -> MmluSet:
    """Every subject that `test/` holds, with the first questions of its `dev/` file as demonstrations.

    Raises UserError with file and line where a file is missing, has another form, or holds too few demonstrations.
    """
    questions: list[MmluQuestion] = []
    demonstrations = {}
    paths = sorted((folder / "test").glob("*_test.csv"))
    if not paths:
        raise UserError(f"{folder} holds no MMLU: expected files test/<subject>_test.csv and dev/<subject>_dev.csv")
    for path in paths:
        subject = path.name.removesuffix("_test.csv")
        if subject not in CATEGORY_OF:
            raise UserError(f"{path}: {subject!r} is none of MMLU's 57 subjects; rename the file or take it away")
        questions += _read_file(path, subject, "test")
        demonstrations[subject] = _read_demonstrations(folder, subject, num_demonstrations)
    return MmluSet(tuple(questions), demonstrations)


def mmlu_prompt(
    question: MmluQuestion,
    demonstrations: Sequence[MmluQuestion],
    document: str | None = None,
    demonstration_documents: Sequence[str | None] | None = None,
) -> str:
    """What the LM reads before one of CONTINUATIONS: opening, document, question. Raises what `mmlu_opening` does."""
    opening = mmlu_opening(question.example.group, demonstrations, demonstration_documents)
    return opening + _block(question, document)


def mmlu_opening(
    subject: str, demonstrations: Sequence[MmluQuestion], documents: Sequence[str | None] | None = None
) -> str:
    """What the prompts of a subject begin with: header, and demonstrations with their documents and answers.

    Raises ValueError where there are documents for the demonstrations, but not one for each.
    """
    header = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
    given = [None] * len(demonstrations) if documents is None else documents
    shots = (f"{_block(shot, text)} {LETTERS[shot.answer]}" for shot, text in zip(demonstrations, given, strict=True))
    return "".join(f"{block}{BETWEEN_BLOCKS}" for block in (header, *shots))


def mmlu_choice(question: MmluQuestion, letter_logprobs: np.ndarray, similarities: np.ndarray) -> tuple[int, float]:
    """Return the mixture's choice, 0 to 3, and how probable it holds the right one among the four letters.

    From log-probs [K, 4] of CONTINUATIONS (nats) and similarities [K] of K documents; without documents K is 1. The
    letters' raw probabilities are mixed, and normalised only after; of equal ones the first letter is taken. Raises
    ValueError for other shapes, RunError for log-probs that are not finite.
    """
    if letter_logprobs.shape != (len(similarities), len(LETTERS)):
        raise ValueError(f"{letter_logprobs.shape} log-probs of four letters for {len(similarities)} documents")
    if not np.isfinite(letter_logprobs).all():
        raise RunError(f"{question.example.id}: the LM gave a letter a log-probability that is not finite")
    mixed = mix_token_logprobs(letter_logprobs, similarities)  # [4]
    return int(np.argmax(mixed)), float(np.exp(log_softmax(mixed)[question.answer]))


def _block(question: MmluQuestion, document: str | None) -> str:
    choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, question.choices, strict=True))
    return f"{knowledge_line(document)}Question: {question.example.query}\n{choices}Answer:"


def _read_demonstrations(folder: Path, subject: str, num: int) -> tuple[MmluQuestion, ...]:
    if num == 0:
        return ()
    path = folder / "dev" / f"{subject}_dev.csv"
    questions = _read_file(path, subject, "dev")
    if len(questions) < num:
        raise UserError(f"{path} holds {len(questions)} questions, {num} demonstrations are asked for; ask for fewer")
    return tuple(questions[:num])


def _read_file(path: Path, subject: str, split: str) -> list[MmluQuestion]:
    rows = list(_rows(path))
    has_header = bool(rows) and rows[0][1][0].lower() == "question" and rows[0][1][-1].lower() == "answer"
    answers = {letter: place for place, letter in enumerate(LETTERS)}
    if has_header:
        answers |= {str(place): place for place in range(len(LETTERS))}
    questions = [
        _question(where, row, answers, subject, f"{subject}/{split}/{number}")
        for number, (where, row) in enumerate(rows[has_header:])
    ]
    if not questions:
        raise UserError(f"{path} holds no questions; expected rows of {FIELDS}")
    return questions


def _question(where: str, row: list[str], answers: dict[str, int], subject: str, identifier: str) -> MmluQuestion:
    """Spaces and newlines at the ends of fields go: a line of the prompt would begin or end with them."""
    if len(row) != 6:
        raise UserError(f"{where}: expected 6 fields ({FIELDS}), found {len(row)}")
    question, a, b, c, d, answer = (field.strip() for field in row)
    if not question:
        raise UserError(f"{where}: the question is empty")
    if answer not in answers:
        raise UserError(f"{where}: expected as answer one of {', '.join(answers)}, found {answer!r}")
    return MmluQuestion(Item(identifier, question, subject), (a, b, c, d), answers[answer])


def _rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each row with where it begins (`file:line`); rows without a field are passed over."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected rows of {FIELDS}")
    line = 1
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                if row:
                    yield f"{path}:{line}", row
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}) at or after line {line}; convert the file") from error
    except csv.Error as error:
        raise UserError(f"{path}:{line}: not valid CSV ({error}); expected {FIELDS}") from error


ROOM = 4  # tokens kept free for a letter: one in all vocabularies known to us

# By method and subject, the document of each demonstration; None for demonstrations without.
ShotDocuments = Mapping[str, Mapping[str, Sequence[str | None] | None]]


@dataclass(frozen=True, slots=True)
class MmluAsked:
    """The prompts [K] of a question under a method, one for each text, which all begin with `opening`."""

    opening: str
    prompts: tuple[str, ...]
    num_shots: int


class MmluPrompts:
    """`demonstrations` by subject, their documents by method. `counting` knows the LM's limit, `template` may cut."""

    def __init__(
        self,
        template: PromptTemplate,
        counting: PromptTemplate,
        demonstrations: Mapping[str, Sequence[MmluQuestion]],
        documents: ShotDocuments,
    ) -> None:
        self._template, self._counting = template, counting
        self._demonstrations, self._documents = demonstrations, documents

    def of(self, question: MmluQuestion, method: str, evidence: Evidence) -> MmluAsked:
        """Raises UnscorableText where `lm.too_long` allows cutting and a question alone does not fit."""
        subject = question.example.group
        shots, given = self._demonstrations[subject], self._documents[method][subject]
        num = next(num for num in range(len(shots), -1, -1) if num == 0 or self._fit(question, evidence, num, method))
        shots, given = shots[:num], given and given[:num]
        build = partial(mmlu_prompt, question, shots, demonstration_documents=given)
        prompts = [self._template.fit(text, build, ROOM, evidence.is_concatenated) for text in evidence.texts]
        return MmluAsked(mmlu_opening(subject, shots, given), tuple(prompts), num)

    def _fit(self, question: MmluQuestion, evidence: Evidence, num: int, method: str) -> bool:
        subject = question.example.group
        shots, given = self._demonstrations[subject][:num], self._documents[method][subject]
        return all(
            self._counting.holds(mmlu_prompt(question, shots, text, given and given[:num]), ROOM)
            for text in evidence.texts
        )
