"""PopQA: short answers about subjects of known popularity, closed book or from documents (Mallen et al. 2023).

A set is one of

FILE.tsv            the published table: tab-separated, with a header
FILE.jsonl[.gz]     JSON Lines of the same fields
akariasai/PopQA     the same on the hub

The fields are `subj`, `prop` (one of TEMPLATES), `obj`, `possible_answers` (or `answers`; in a table a JSON list),
`s_pop` (monthly page views), and optional `question`, `id` and `gold`. A `question` must be its template's.

Prompts follow the official code (`run_model.py`): a question is `Q: ... A:`, after its passage, if any, and a blank
line. The paper does not state whether demonstrations have passages: the code looks up theirs by the lower-case question
without "?", and the question's by its exact text, so one file of passages serves only one of the two. Besides accuracy
an outcome has the costs of the answer, the popularity, by which a policy decides whether to retrieve
(`evals.adaptive`), the LM's confidence and the first document's similarity.

In the results, entries of `accuracy` get `most_frequent_answer`: the accuracy of always answering with the most
frequent answer of the relation's other questions, which needs no LM. `correlation`, also by relation, is Pearson's
correlation of accuracy with log10 of popularity (figure 4).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from replug.answering.prompts import BETWEEN_BLOCKS, STOP
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.data.answers import contains_answer, has_answer
from replug.data.rows import list_in, one_line, read_rows
from replug.evals.evidence import Evidence
from replug.evals.loop import Metric, Outcome, Row
from replug.evals.questions import (
    PUBLISHED_SETS,
    FewShotTask,
    OpenQuestion,
    answers_field,
    draw_demonstrations,
    draw_questions,
    first_line,
    hold_out_demonstrations,
    open_question,
    questions_of_rows,
    text_of,
)
from replug.evals.results import Results
from replug.evals.tables import Blocks, Table
from replug.models.generation import Generated

NUM_SHOTS = 15
LEAST_POPULAR = 4000  # questions: section 1 reports the accuracy on them
# relation (the field `prop`) -> question with braces for the subject
TEMPLATES: dict[str, str] = PUBLISHED_SETS["popqa_templates"]


def question_of(relation: str, subject: str) -> str:
    """Return the question about a relation of a subject; `relation` is a key of TEMPLATES."""
    before, after = TEMPLATES[relation].split("{}")
    return f"{before}{subject}{after}"


@dataclass(frozen=True, slots=True)
class PopQuestion(OpenQuestion):
    """A question of the relation `example.group`; `object` is its answer in shots.

    `popularity` is the monthly page views of the subject. `most_frequent_answer` is the most frequent object among the
    other questions of the relation.
    """

    subject: str
    object: str
    popularity: float
    most_frequent_answer: str = ""

    @property
    def relation(self) -> str:
        return self.example.group


# Reading and shots ----------------------------------------------------------------------------------------------------


def read_popqa(source: str | Path) -> list[PopQuestion]:
    """Return every question of a file or of the set on the hub, in order.

    Raises UserError with file and line for a missing or malformed field, an unknown relation, and a question that
    differs from its template.
    """
    return questions_of_rows(read_rows(source), _question, source)


def _question(row: Mapping[str, Any], where: str) -> PopQuestion:
    relation, subject = text_of(row, "prop", where), text_of(row, "subj", where)
    if relation not in TEMPLATES:
        raise UserError(f"{where}: prop {relation!r} is unknown; expected one of {', '.join(TEMPLATES)}")
    expected = question_of(relation, subject)
    question = row.get("question") or expected
    if one_line(str(question)) != one_line(expected):
        raise UserError(f"{where}: question {question!r} does not match prop {relation!r}; expected {expected!r}")
    field = answers_field(row, ("possible_answers", "answers"), where)
    answers = row[field]
    if isinstance(answers, str):  # in PopQA's tables; open_question refuses a text that is not a list
        answers = list_in(answers)
    read = open_question({**row, "question": question, "domain": relation, field: answers}, where, field)
    views = row.get("s_pop")
    if isinstance(views, str):  # in a table; the check below refuses other texts
        with suppress(ValueError):
            views = float(views)
    if isinstance(views, bool) or not isinstance(views, int | float) or not 0 <= views < math.inf:
        raise UserError(f"{where}: field 's_pop' must be a count, 0 or more, found {views!r}")
    return PopQuestion(read.example, read.answers, subject, text_of(row, "obj", where), float(views))


def plan_shots(
    pool: Sequence[PopQuestion], evaluated: Sequence[PopQuestion] | None, num_shots: int, seed: int
) -> tuple[list[PopQuestion], dict[str, tuple[PopQuestion, ...]]]:
    """Return the questions to ask, by relation, and the shots before the questions of each relation.

    A relation's shots are `num_shots` // (number of other relations) of each other relation, shuffled. The official
    code draws new shots for every question; here the questions of a relation share their shots, and so an opening.
    Shots come from the pool and are never evaluated; `evaluated` None means the rest of the pool. Raises UserError if
    too few questions are left or there is no other relation.
    """
    relations = sorted({question.relation for question in (pool if evaluated is None else evaluated)})
    questions, shots = list(pool if evaluated is None else evaluated), dict[str, tuple[PopQuestion, ...]]()
    if num_shots == 0:
        return sorted(questions, key=lambda question: question.relation), dict.fromkeys(relations, ())
    by_relation: dict[str, list[PopQuestion]] = {}
    for question in sorted(pool, key=lambda question: question.relation):
        by_relation.setdefault(question.relation, []).append(question)
    numbers = {}
    for relation in relations:
        others = len(by_relation.keys() - {relation})
        if not others:
            raise UserError(
                f"shots come from other relations, but all questions are of {relation!r}; expected questions.shots=0, "
                "or questions.demonstrations=FILE with questions of other relations"
            )
        if num_shots < others:
            raise UserError(
                f"questions.shots is {num_shots}, but shots come equally from {others} other relations; expected "
                f"{others} or more, or 0"
            )
        numbers[relation] = num_shots // others
    drawn, questions = _draw(by_relation, evaluated, max(numbers.values()), seed)
    for relation, number in numbers.items():
        given = [shot for other in drawn if other != relation for shot in drawn[other][:number]]
        order = np.random.default_rng([seed, 4]).permutation(len(given))
        shots[relation] = tuple(given[place] for place in order)
    return sorted(questions, key=lambda question: question.relation), shots


def _draw(
    pool: Mapping[str, Sequence[PopQuestion]], evaluated: Sequence[PopQuestion] | None, number: int, seed: int
) -> tuple[dict[str, list[PopQuestion]], list[PopQuestion]]:
    """Return `number` questions of each relation of the pool, and the questions left to evaluate."""
    drawn, rest = {}, list(evaluated or ())
    for relation, questions in pool.items():
        if len(questions) < number + (evaluated is None):
            raise UserError(
                f"{len(questions)} questions of relation {relation!r}, but {number} are shown as shots"
                f"{' and at least one must be left to evaluate' if evaluated is None else ''}; ask for fewer "
                "(questions.shots), or give another file of shots (questions.demonstrations)"
            )
        if evaluated is not None:
            drawn[relation] = draw_demonstrations(questions, evaluated, number, seed)
        else:
            drawn[relation], left = hold_out_demonstrations(questions, number, seed)
            rest += left
    return drawn, rest


# Popularity -----------------------------------------------------------------------------------------------------------


def popularity_bin(popularity: float) -> str:
    """Return the bin, a power of ten like `popularity 10^2-10^3` (including its lower end), or `popularity 0`."""
    if popularity < 1:
        return "popularity 0"
    power = len(str(int(popularity))) - 1  # a logarithm may round 1,000 down
    return f"popularity 10^{power}-10^{power + 1}"


def popularity_correlation(popularity: np.ndarray, right: np.ndarray) -> float | None:
    """Return Pearson's correlation of being right with log10 of popularity, both [N]; popularity below 1 counts as 1.

    None means that one of the two is constant.
    """
    logs = np.log10(np.maximum(np.asarray(popularity, dtype=np.float64), 1.0))
    right = np.asarray(right, dtype=np.float64)
    if len(logs) < 2 or np.ptp(logs) == 0 or np.ptp(right) == 0:
        return None
    deviations = logs - logs.mean(), right - right.mean()
    return float(
        (deviations[0] @ deviations[1]) / math.sqrt((deviations[0] @ deviations[0]) * (deviations[1] @ deviations[1]))
    )


# The evaluation -------------------------------------------------------------------------------------------------------


class PopQa(FewShotTask):
    """PopQA's questions, ordered by relation, so that a local LM reads each opening once.

    Few-shot answers end at the first newline. Zero-shot answers do not, since LMs may begin with a blank line, which
    the official code skips; their confidence covers all tokens.
    """

    reads = (
        *(*FewShotTask.reads, "questions.demonstrations", "questions.max_new_tokens"),
        "questions.documents_in_shots",
    )
    metrics: Mapping[str, Metric] = {
        "accuracy": Metric("accuracy"),
        "answer_recall": Metric("answer_recall"),  # some document holds an accepted answer
        "lm_calls": Metric("lm_calls"),
        "retriever_calls": Metric("retriever_calls"),
        "prompt_tokens": Metric("prompt_tokens", may_be_unknown=True),
        "generated_tokens": Metric("generated_tokens"),
        "shots": Metric("shots"),  # demonstrations that fit
    }

    @classmethod
    def read(cls, config: EvaluationConfig) -> Self:
        """Draw the questions, and the shots of each relation."""
        keys = config.questions
        num_shots = NUM_SHOTS if keys.shots is None else keys.shots
        drawn = read_popqa(str(keys.path))
        if keys.demonstrations:
            drawn = draw_questions(drawn, keys.max_questions, config.seed)
            drawn, shots = plan_shots(read_popqa(keys.demonstrations), drawn, num_shots, config.seed)
        else:
            drawn, shots = plan_shots(drawn, None, num_shots, config.seed)
            drawn = draw_questions(drawn, keys.max_questions, config.seed)
        return cls(with_most_frequent_answers(drawn), shots, keys.max_new_tokens, keys.documents_in_shots)

    @staticmethod
    def block(question: OpenQuestion, document: str | None) -> str:
        return (
            f"{'' if document is None else document.strip() + BETWEEN_BLOCKS}Q: {one_line(question.example.query)} A:"
        )

    @staticmethod
    def answer_of(question: PopQuestion) -> str:
        return one_line(question.object)

    def groups(self, row: int) -> tuple[str, ...]:
        return (self.questions[row].relation, popularity_bin(self.questions[row].popularity))

    def stop(self, row: int) -> str | None:
        return STOP if self._shots[self.questions[row].relation] else None

    def outcome(self, row: int, method: str, evidence: Evidence, generated: Generated) -> Outcome:
        question, by = self.questions[row], {one.name: one for one in self.book.methods}[method]
        prediction = first_line(generated.text)
        calls, prompt, new = generated.num_prompts, generated.prompt_tokens, generated.num_tokens
        if written := self.book.written(by, row):  # count the document written by the LM
            known_tokens = prompt is not None and written.prompt_tokens is not None
            calls, new = calls + 1, new + written.generated_tokens
            prompt = (prompt or 0) + (written.prompt_tokens or 0) if known_tokens else None
        similarities = self.book.similarities(by, row)
        known = {
            "accuracy": float(contains_answer(prediction, question.answers)),
            "answer_recall": float(any(has_answer(text, question.answers) for text in evidence.texts if text)),
            "most_frequent_accuracy": float(contains_answer(question.most_frequent_answer, question.answers)),
            "popularity": question.popularity,
            "lm_calls": calls,
            "retriever_calls": len(similarities) > 0,
            "prompt_tokens": prompt,
            "generated_tokens": new,
            "mean_logprob": generated.mean_logprob,
            "mean_entropy": generated.mean_entropy,
            "top_score": next(iter(similarities), None),
        }
        detail = {
            "answer": prediction,
            "relation": question.relation,
            "subject": question.subject,
            "most_frequent_answer": question.most_frequent_answer,
            **evidence.final(generated.weights),
        }
        return Outcome({name: float(value) for name, value in known.items() if value is not None}, detail)

    def findings(self, rows: Sequence[Row], results: Results, folder: Any) -> Blocks:
        """Add the most frequent answer and correlations to the results; return their tables."""
        questions = [next(iter(row["methods"].values())) for row in rows]  # the same under every method
        relations: dict[str, list[int]] = {}
        bins: dict[str, list[int]] = {}
        for row, question in enumerate(questions):
            relations.setdefault(question["detail"]["relation"], []).append(row)
            bins.setdefault(popularity_bin(question["numbers"]["popularity"]), []).append(row)
        table = []
        for group, own in {
            "": [*range(len(rows))],
            **dict(sorted(relations.items())),
            **dict(sorted(bins.items())),
        }.items():
            popularity = np.array([questions[row]["numbers"]["popularity"] for row in own])
            frequent = float(np.mean([questions[row]["numbers"]["most_frequent_accuracy"] for row in own]))
            suffix, shown = f"/{group}" if group else "", []
            for method, entries in results.items():
                if entry := entries.get(f"accuracy{suffix}"):
                    entry["most_frequent_answer"] = frequent
                right = np.array([rows[row]["methods"][method]["numbers"]["accuracy"] for row in own])
                correlation = None if group in bins else popularity_correlation(popularity, right)
                if correlation is not None:
                    entries[f"correlation{suffix}"] = {"value": correlation, "n": len(own)}
                shown.append("" if correlation is None else f"{correlation:+.2f}")
            table.append([group or "all", str(len(own)), f"{frequent:.3f}", *shown])
        by_relative = _relative_table(questions, rows, list(results))
        correlations = [f"correlation with log popularity, {name}" for name in results]
        head = ["", "n", "accuracy of the most frequent answer of the relation's other questions", *correlations]
        scale = "Popularity is monthly page views of the subject (s_pop)."
        return [scale, *super().findings(rows, results, folder), Table(head, table), by_relative]


def with_most_frequent_answers(questions: Sequence[PopQuestion]) -> list[PopQuestion]:
    """Return the questions with the most frequent answer among the others of their relation."""
    objects: dict[str, Counter[str]] = {}
    for question in questions:
        objects.setdefault(question.relation, Counter())[question.object] += 1
    counted = []
    for question in questions:
        others = objects[question.relation] - Counter([question.object])  # without its own answer
        counted.append(replace(question, most_frequent_answer=others.most_common(1)[0][0] if others else ""))
    return counted


def relative_popularity(popularity: np.ndarray, relations: Sequence[str]) -> np.ndarray:
    """Return log10 popularity [N], standardised within its relation (figure 8); 0 if all are equal."""
    logs, names = np.log10(np.maximum(np.asarray(popularity, dtype=np.float64), 1.0)), np.array(relations)
    relative = np.zeros(len(logs))
    for name in set(relations):
        own = logs[names == name]
        relative[names == name] = (own - own.mean()) / own.std() if np.ptp(own) else 0.0
    return relative


def _relative_table(questions: Sequence[dict], rows: Sequence[Row], methods: Sequence[str]) -> Table:
    """Return accuracy by popularity relative to the relation (figure 8), and on the least popular questions."""
    popularity = np.array([question["numbers"]["popularity"] for question in questions])
    relative = np.floor(relative_popularity(popularity, [question["detail"]["relation"] for question in questions]))
    bins = {f"{low:+.0f} to {low + 1:+.0f} deviations": np.flatnonzero(relative == low) for low in np.unique(relative)}
    if len(rows) > LEAST_POPULAR:
        bins[f"the {LEAST_POPULAR:,} least popular"] = np.argsort(popularity, kind="stable")[:LEAST_POPULAR]
    right = np.array([[row["methods"][name]["numbers"]["accuracy"] for name in methods] for row in rows])
    means = [[name, str(len(own)), *(f"{mean:.4f}" for mean in right[own].mean(axis=0))] for name, own in bins.items()]
    return Table(["log popularity relative to the relation", "n", *methods], means)
