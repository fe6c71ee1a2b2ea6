"""MMLU (Hendrycks et al. 2021) as in REPLUG: five demonstrations, a retrieved document, probabilities of letters.

Each demonstration follows its first retrieved document (REPLUG, section 6.2, and the appendix's prompt). The LM's
probability of each letter is mixed over K documents (`models.ensemble`); the answer is the letter with the largest.

If a prompt exceeds the LM's context, the earliest demonstrations are dropped (`evals.questions`); Hendrycks et al.'s
code drops the last. There are three means: the paper calls its "All" the mean of four categories, but its 68.3 for
Codex is the mean over subjects, with anatomy in STEM, and LLaMA's is the mean over questions.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from replug.config.errors import RunError, UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.loop import Item, Metric, Outcome, Outcomes, PromptedLM
from replug.evals.questions import PUBLISHED_SETS, FewShotTask, knowledge_line
from replug.models.ensemble import mix

# Chung et al. 2022 and Codex's figures count anatomy as STEM.
WITH_ANATOMY = {"STEM": "STEM with anatomy", "other": "other without anatomy"}
# The categories of Hendrycks et al.
CATEGORY_OF = {
    subject: category
    for category, subjects in PUBLISHED_SETS["mmlu_categories"].items()
    for subject in subjects.split()
}

LETTERS = ("A", "B", "C", "D")
ANATOMY = "anatomy"
CONTINUATIONS = tuple(f" {letter}" for letter in LETTERS)
NUM_DEMONSTRATIONS = 5
CHOICES = "{choices}"  # of `questions.query`
NO_VOTE = -1e9  # nats: finite, and below any letter's log-prob
ROOM = 4  # tokens reserved for a letter: 1 in all known vocabularies


@dataclass(frozen=True, slots=True)
class MmluQuestion:
    """A question, `example.query`, of the subject `example.group`; `answer` is the right choice, 0 to 3."""

    example: Item
    choices: tuple[str, str, str, str]
    answer: int

    @property
    def answers(self) -> tuple[str, ...]:
        """Return the right letter."""
        return (LETTERS[self.answer],)


def read_mmlu(
    folder: Path, num_demonstrations: int = NUM_DEMONSTRATIONS
) -> tuple[list[MmluQuestion], dict[str, tuple[MmluQuestion, ...]]]:
    """Read the questions of every subject in `test/`, and demonstrations, the first of its `dev/` file.

    Raises UserError with file and line for a malformed file, or too few demonstrations.
    """
    questions: list[MmluQuestion] = []
    demonstrations: dict[str, tuple[MmluQuestion, ...]] = {}
    paths = sorted((folder / "test").glob("*_test.csv"))
    if not paths:
        raise UserError(f"{folder} holds no MMLU: expected files test/<subject>_test.csv and dev/<subject>_dev.csv")
    for path in paths:
        subject = path.name.removesuffix("_test.csv")
        if subject not in CATEGORY_OF:
            raise UserError(f"{path}: {subject!r} is not one of MMLU's 57 subjects; rename or remove the file")
        questions += _read_file(path, subject, "test")
        dev = folder / "dev" / f"{subject}_dev.csv"
        shots = _read_file(dev, subject, "dev") if num_demonstrations else []
        if len(shots) < num_demonstrations:
            raise UserError(
                f"{dev} holds {len(shots)} questions, {num_demonstrations} demonstrations are asked for; ask for fewer"
            )
        demonstrations[subject] = tuple(shots[:num_demonstrations])
    return questions, demonstrations


def _read_file(path: Path, subject: str, split: str) -> list[MmluQuestion]:
    """Return the questions of a file, with fields stripped of white space."""
    questions: list[MmluQuestion] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        for row in filter(None, reader):
            if len(row) != 6 or not row[0].strip() or row[5].strip() not in LETTERS:
                raise UserError(
                    f"{path}:{reader.line_num}: expected a question, four choices and one of {', '.join(LETTERS)}, "
                    f"found {', '.join(row)[:80]!r}"
                )
            question, a, b, c, d, answer = (field.strip() for field in row)
            item = Item(f"{subject}/{split}/{len(questions)}", question, subject)
            questions.append(MmluQuestion(item, (a, b, c, d), LETTERS.index(answer)))
    if not questions:
        raise UserError(f"{path} holds no questions; expected rows of a question, four choices and a letter")
    return questions


def mmlu_choice(
    question: MmluQuestion, letter_logprobs: np.ndarray, log_weights: np.ndarray, votes: bool = False
) -> int:
    """Return the mixture's choice, 0 to 3.

    Takes log-probs [K, 4] of CONTINUATIONS (nats) and log weights [K] of K documents; without documents K is 1. The
    letters' raw probabilities are mixed; ties go to the first letter. If documents vote, only the likeliest letter of
    each counts. Raises RunError for log-probs that are not finite.
    """
    if not np.isfinite(letter_logprobs).all():
        raise RunError(f"{question.example.id}: the LM gave a letter a log-probability that is not finite")
    if votes:
        own = letter_logprobs.argmax(axis=1)
        letter_logprobs = np.where(np.arange(len(LETTERS)) == own[:, None], letter_logprobs, NO_VOTE)
    return int(np.argmax(mix(letter_logprobs, log_weights)))


def _choices(question: MmluQuestion) -> str:
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True))


class Mmlu(FewShotTask):
    """Ask for the letters of one prompt together, so that a local LM reads the prompt once."""

    # Means over questions (official evaluation), over subjects, and over the four categories (the paper's caption).
    metrics: Mapping[str, Metric] = {
        "accuracy": Metric("correct"),
        "accuracy_macro": Metric("correct_share", "share"),
        "accuracy_categories": Metric("correct_category_share", "category_share"),
        "shots": Metric("shots"),  # demonstrations that fit
    }

    def __init__(self, questions: Sequence[MmluQuestion], demonstrations: Mapping[str, Sequence[MmluQuestion]]) -> None:
        super().__init__(questions, demonstrations, ROOM)
        subjects = [question.example.group for question in questions]
        self._sizes = Counter([*subjects, *(CATEGORY_OF[subject] for subject in subjects)])

    @classmethod
    def problems(cls, config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
        if following := [method.name for method in methods if method.follows_text]:
            yield f"methods: {following[0]}; an answer of mmlu is one letter, no text to follow; expected replug"

    @classmethod
    def read(cls, config: EvaluationConfig) -> Self:
        """Read the first questions of every subject, and its demonstrations."""
        keys = config.questions
        num_shots = NUM_DEMONSTRATIONS if keys.shots is None else keys.shots
        questions, demonstrations = read_mmlu(Path(str(keys.path)).expanduser(), num_shots)
        by_subject = {name: [q for q in questions if q.example.group == name] for name in demonstrations}
        return cls([one for some in by_subject.values() for one in some[: keys.max_questions]], demonstrations)

    def queries_of(self, config: EvaluationConfig, questions: Sequence[MmluQuestion]) -> list[str]:
        queries = super().queries_of(config, questions)
        return [query.replace(CHOICES, _choices(one)) for query, one in zip(queries, questions, strict=True)]

    def open(self, lms: PromptedLM | None, book: EvidenceBook) -> None:
        super().open(lms, book)
        self._letters = [self._template.continuation(letter) for letter in CONTINUATIONS]

    @staticmethod
    def block(question: MmluQuestion, document: str | None) -> str:
        return f"{knowledge_line(document)}Question: {question.example.query}\n{_choices(question)}\nAnswer:"

    @staticmethod
    def answer_of(question: MmluQuestion) -> str:
        return question.answers[0]

    def groups(self, row: int) -> tuple[str, ...]:
        subject = self.examples[row].group
        category = CATEGORY_OF[subject]
        theirs = WITH_ANATOMY.get("STEM" if subject == ANATOMY else category)
        return (category, subject, *([theirs] if theirs and ANATOMY in self._sizes else []))

    def stratum(self, row: int) -> str:
        return self.examples[row].group

    def compared(self, row: int) -> tuple[str, ...]:
        question = self.questions[row]
        return question.example.query, " ".join((question.example.query, *question.choices))

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question = self.questions[row]
        asked = {name: self.prompts(row, name, one) for name, one in evidence.items()}
        calls = []  # sorted: the batches determine the last bits of scores
        for opening in sorted({one.opening for one in asked.values()}):
            prompts = sorted({prompt for one in asked.values() if one.opening == opening for prompt in one.prompts})
            repeated = [prompt for prompt in prompts for _ in LETTERS]
            future = self.lm.submit(repeated, self._letters * len(prompts), opening=opening)
            calls.append((opening, prompts, future))
        share = 1.0 / self._sizes[question.example.group]
        category_share = 1.0 / self._sizes[CATEGORY_OF[question.example.group]]

        def finish() -> Outcomes:
            letters: dict[tuple[str, str], np.ndarray] = {}  # log-probs [4] by opening and prompt
            for opening, prompts, future in calls:
                logprobs = np.array([score.sum_logprob for score in future.result()]).reshape(-1, len(LETTERS))
                letters |= {(opening, prompt): own for prompt, own in zip(prompts, logprobs, strict=True)}
            outcomes = {}
            for name, one in asked.items():
                own = np.stack([letters[one.opening, prompt] for prompt in one.prompts])
                choice = mmlu_choice(question, own, evidence[name].log_prior, evidence[name].votes)
                is_correct = choice == question.answer
                numbers = {
                    "correct": float(is_correct),
                    "correct_share": share * is_correct,
                    "share": share,
                    "correct_category_share": category_share * is_correct,
                    "category_share": category_share,
                    **one.numbers,
                }
                outcomes[name] = Outcome(numbers, {"answer": LETTERS[choice], "right": LETTERS[question.answer]})
            return outcomes

        return finish
