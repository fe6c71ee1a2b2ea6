"""PopQA: short answers about subjects of known popularity, closed book or from documents (Mallen et al. 2023).

Prompts are those of the official code (`run_model.py`): a question is `Q: ... A:`, with its passage and a blank line
before it where there is one. Besides whether an answer is right, an outcome holds its costs and the signals by which a
policy may decide whether to retrieve (`evals.adaptive`): popularity, the LM's confidence, the retriever's scores, how
many documents name the subject.

In the results, entries of `accuracy` get `most_frequent_answer`: how often the answer that is most frequent among the
other questions of the relation is right, which needs no LM. `correlation`, also by relation, is Pearson's, of accuracy
with log10 of popularity (figure 4).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replug.answering.genread import first_line
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.data.answers import contains_answer, has_answer
from replug.data.files import write_json
from replug.data.folder import require_checksums, write_checksums
from replug.data.rows import one_line
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.few_shot import Asking, FewShotTask, PromptForm, dropped_shots, few_shot_dataset
from replug.evals.folder import EvaluationFolder
from replug.evals.kinds import ANSWERS_QUESTIONS, EvalDataset, EvaluationKind, Finished
from replug.evals.loop import Item, Metric, Outcome
from replug.evals.outcomes import Row
from replug.evals.popqa_sets import (
    DOCUMENTS,
    NUM_SHOTS,
    PAGE_VIEWS,
    PopQuestion,
    document_frequencies,
    plan_shots,
    popularity_bin,
    popularity_correlation,
    read_popqa,
)
from replug.evals.questions import BETWEEN_BLOCKS, STOP, OpenQuestion, draw_questions
from replug.evals.results import Results
from replug.evals.tables import Block, Table
from replug.models.generation import Generated

SCALES = {
    PAGE_VIEWS: "Popularity is monthly page views of the subject (s_pop).",
    DOCUMENTS: "Popularity is the number of documents in the corpus that name the subject: the questions tell none.",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with what is known before the LM answers.

    `frequency` is the number of documents that name the subject, None without a corpus. `most_frequent_answer` is the
    object that most other questions of the relation have.
    """

    question: PopQuestion
    frequency: int | None
    most_frequent_answer: str

    @property
    def popularity(self) -> float:
        """Return the subject's page views, or the number of documents that name it where the set gives no views."""
        views = self.question.subject_popularity
        if views is None:
            assert self.frequency is not None, "neither page views nor a corpus"
            return float(self.frequency)
        return views


def _block(question: OpenQuestion, passage: str | None) -> str:
    return f"{'' if passage is None else passage.strip() + BETWEEN_BLOCKS}Q: {one_line(question.example.query)} A:"


FORM = PromptForm(_block, lambda question: one_line(question.object))


class PopQa(FewShotTask):
    """Questions are ordered by relation, so that local weights read each opening once.

    Few-shot answers end at the first newline. Zero-shot answers are read on, since LMs may begin with a blank line,
    which the official code skips; their confidence is that of all tokens.
    """

    metrics: Mapping[str, Metric] = {
        "accuracy": Metric("accuracy"),
        "answer_recall": Metric("answer_recall"),  # some document holds an accepted answer
        "lm_calls": Metric("lm_calls"),
        "retriever_calls": Metric("retriever_calls"),
        "prompt_tokens": Metric("prompt_tokens", may_be_unknown=True),
        "generated_tokens": Metric("generated_tokens"),
        "shots": Metric("shots"),  # demonstrations that the LM had room for
    }

    def __init__(self, asking: Asking, asked: Sequence[Asked], book: EvidenceBook, max_new_tokens: int) -> None:
        super().__init__(asking, [one.question for one in asked], max_new_tokens)
        self._asked, self._book = asked, book
        self._methods = {method.name: method for method in book.methods}
        self._popularity = {one.question.example.id: one.popularity for one in asked}

    def groups(self, example: Item) -> tuple[str, ...]:
        return (example.group, popularity_bin(self._popularity[example.id]))

    def stop(self, row: int, method: str) -> str | None:
        return STOP if self.asking.shots[method, self.questions[row].relation] else None

    def outcome(self, row: int, method: str, evidence: Evidence, generated: Generated) -> Outcome:
        asked, by = self._asked[row], self._methods[method]
        prediction = first_line(generated.text)
        known = {
            "accuracy": float(contains_answer(prediction, asked.question.answers)),
            "answer_recall": float(any(has_answer(text, asked.question.answers) for text in evidence.texts if text)),
            "most_frequent_accuracy": float(contains_answer(asked.most_frequent_answer, asked.question.answers)),
            "popularity": asked.popularity,
            "frequency": asked.frequency,
            **self._costs(row, by, generated),
            "mean_logprob": generated.mean_logprob,
            "mean_entropy": generated.mean_entropy,
        }
        known["top_score"] = next(iter(self._book.similarities(by, row)), None)
        detail = {
            "answer": prediction,
            "relation": asked.question.relation,
            "subject": asked.question.subject,
            "popularity_from": DOCUMENTS if asked.question.subject_popularity is None else PAGE_VIEWS,
            "most_frequent_answer": asked.most_frequent_answer,
            **evidence.final(generated.weights),
        }
        return Outcome({name: float(value) for name, value in known.items() if value is not None}, detail)

    def _costs(self, row: int, method: Method, generated: Generated) -> dict[str, float | None]:
        """Return the costs of the answer, and of the document that the LM wrote for it."""
        calls, prompt, new = generated.num_prompts, generated.prompt_tokens, generated.num_tokens
        if written := self._book.written(method, row):
            known = prompt is not None and written.prompt_tokens is not None
            calls, new = calls + 1, new + written.generated_tokens
            prompt = (prompt or 0) + (written.prompt_tokens or 0) if known else None
        retrieved = len(self._book.similarities(method, row)) > 0
        return {"lm_calls": calls, "retriever_calls": retrieved, "prompt_tokens": prompt, "generated_tokens": new}


def popqa_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Draw the questions, and the shots of each relation."""
    questions, shots = _drawn(config)
    asked = asked_questions(questions, _frequencies(config, corpus, questions))
    num_new = config.questions.max_new_tokens
    return few_shot_dataset(
        config, FORM, questions, shots, num_new, lambda asking, book: PopQa(asking, asked, book, num_new)
    )


def _drawn(config: EvaluationConfig) -> tuple[Sequence[PopQuestion], Mapping[str, Sequence[PopQuestion]]]:
    """Return the questions that are asked, and the shots before those of each relation."""
    keys = config.questions
    num_shots = NUM_SHOTS if keys.shots is None else keys.shots
    questions = read_popqa(str(keys.path))
    if keys.demonstrations:
        pool = read_popqa(keys.demonstrations)
        drawn = draw_questions(questions, keys.max_questions, config.seed)
        return plan_shots(pool, drawn, num_shots, config.seed)
    asked, shots = plan_shots(questions, None, num_shots, config.seed)
    return draw_questions(asked, keys.max_questions, config.seed), shots


def asked_questions(questions: Sequence[PopQuestion], frequencies: Mapping[str, int] | None) -> list[Asked]:
    objects: dict[str, Counter[str]] = {}
    for question in questions:
        objects.setdefault(question.relation, Counter())[question.object] += 1
    asked = []
    for question in questions:
        others = objects[question.relation] - Counter([question.object])  # its own answer would count for itself
        frequent = others.most_common(1)[0][0] if others else ""
        asked.append(Asked(question, frequencies[question.subject] if frequencies else None, frequent))
    return asked


def _frequencies(
    config: EvaluationConfig, corpus: Corpus | None, questions: Sequence[PopQuestion]
) -> dict[str, int] | None:
    """Return how many documents name each subject, counted once and kept; None without a corpus.

    Raises UserError where neither the set nor a corpus gives the popularity of subjects.
    """
    if corpus is None:
        if questions[0].subject_popularity is None:
            raise UserError(
                f"{config.questions.path} gives no popularity (s_pop), and without a corpus subjects cannot be "
                "counted; expected one of the two: give data.corpus"
            )
        return None
    path = EvaluationFolder(Path(config.out).expanduser()).frequencies
    subjects = {question.subject for question in questions}
    require_checksums(path.parent, "remove it, and the subjects are counted again", [path.name])
    kept: dict[str, int] = json.loads(path.read_text()) if path.is_file() else {}
    if kept.keys() != subjects:
        texts = (document.text for document in corpus.corpus.iterate())
        kept = document_frequencies(sorted(subjects), texts, len(corpus.corpus))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, kept)
        write_checksums(path.parent, {path.name: path})
    return kept


def add_popqa_findings(finished: Finished) -> list[Block]:
    """Add the most frequent answer and correlations to the results; return tables of them."""
    results, members = finished.results, _members_by_group(finished.rows)
    for method, entries in results.items():
        for group, rows in members.items():
            popularity, right, frequent = (
                np.array([row["methods"][method]["numbers"][name] for row in rows])
                for name in ("popularity", "accuracy", "most_frequent_accuracy")
            )
            if entry := entries.get(_named("accuracy", group)):
                entry["most_frequent_answer"] = float(frequent.mean())
            correlation = popularity_correlation(popularity, right)
            if correlation is not None and not group.startswith("popularity "):
                entries[_named("correlation", group)] = {"value": correlation, "n": len(rows)}
    scale = SCALES[_any_outcome(finished.rows[0])["detail"]["popularity_from"]]
    return [scale, *dropped_shots(finished), _findings_table(results, members)]


def _members_by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return all rows under the empty name, those of each relation, and of each bin of popularity."""
    relations: dict[str, list[Row]] = {}
    bins: dict[str, list[Row]] = {}
    for row in rows:
        relations.setdefault(_any_outcome(row)["detail"]["relation"], []).append(row)
        bins.setdefault(popularity_bin(_any_outcome(row)["numbers"]["popularity"]), []).append(row)
    return {"": list(rows), **dict(sorted(relations.items())), **dict(sorted(bins.items()))}


def _any_outcome(row: Row) -> dict[str, Any]:
    """Return one outcome: what is known of the question is the same under every method."""
    outcome: dict[str, Any] = next(iter(row["methods"].values()))
    return outcome


def _named(metric: str, group: str) -> str:
    return f"{metric}/{group}" if group else metric


def _findings_table(results: Results, members: Mapping[str, Sequence[Row]]) -> Table:
    rows = []
    for group, own in members.items():
        frequent = float(np.mean([_any_outcome(row)["numbers"]["most_frequent_accuracy"] for row in own]))
        correlations = [of.get(_named("correlation", group)) for of in results.values()]
        shown = [f"{entry['value']:+.2f}" if entry else "" for entry in correlations]
        rows.append([group or "all", str(len(own)), f"{frequent:.3f}", *shown])
    head = [f"correlation with log popularity, {name}" for name in results]
    return Table(["", "n", "accuracy of the most frequent answer of the relation's other questions", *head], rows)


EVALUATION = EvaluationKind(popqa_dataset, ANSWERS_QUESTIONS, add_findings=add_popqa_findings)
