"""Read the public question sets of the Internet-augmented system, and draw their shots with gold evidence.

A row of any set may have `gold_evidence`, a text or a list of texts that answers the question. It replaces the set's
own evidence, and is required if the set has none and `data.corpus` lacks the gold documents.

nq           NQ-open (Lee et al. 2019): JSONL of `question` and `answer` (or `answers`). Evidence is the first of DPR's
             `positive_ctxs` (its files are JSON arrays), else the first document of `gold`, by its id in the corpus
hotpotqa     HotpotQA (Yang et al. 2018): its JSON array. Evidence is the paragraphs that `supporting_facts` name
fever        FEVER (Thorne et al. 2018): JSONL of claims with one of three labels. Evidence is the documents of the
             corpus with the page names of the first evidence set as ids. A claim with NOT ENOUGH INFO has none
strategyqa   StrategyQA (Geva et al. 2021): yes or no. Evidence is the `facts` of its JSON array, or of JSON Lines
situatedqa   SituatedQA (Zhang and Choi 2021): questions of Natural Questions with a date, or with a place; JSONL of its
             qa_data. The question is `edited_question`, with the date or place. Rows with one `id` are a question at
             several dates. They have no evidence: `questions.demonstrations` are Natural Questions, read like `nq`

Variants of one question (`InternetQuestion.origin`) stay together in every split: shots, test part, or the validation
part, on which weights are fitted.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.config.evaluation_schema import QuestionsConfig
from replug.data.answers import normalize_answer
from replug.data.rows import read_rows, texts_of
from replug.data.store import CorpusStore
from replug.data.words import hash64
from replug.evals.loop import Item
from replug.evals.questions import (
    OpenQuestion,
    answers_field,
    draw_demonstrations,
    draw_questions,
    name_of,
    not_among,
    open_question,
    questions_of_rows,
    text_of,
)

GOLD_EVIDENCE = "gold_evidence"


@dataclass(frozen=True, slots=True)
class InternetQuestion(OpenQuestion):
    """A question with its accepted answers; the first one is shown in shots.

    `evidence` are texts that answer it; without them `evidence_ids` are ids of such documents in the corpus. Both are
    empty for an unanswerable question and in a set without evidence. `labels` are all possible answers in
    classification; empty means free answers.
    """

    evidence: tuple[str, ...] = ()
    evidence_ids: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Return the id shared by the variants of a question, which stay together in every split."""
        return self.example.source or self.example.id


def given_evidence(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the texts of `gold_evidence`; empty if the row lacks the field."""
    if row.get(GOLD_EVIDENCE) is None:
        return ()
    if isinstance(row[GOLD_EVIDENCE], str):
        return (text_of(row, GOLD_EVIDENCE, where),)
    return texts_of(row, GOLD_EVIDENCE, where)


def _nq_question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    found = open_question(row, where, answers_field(row, ("answer", "answers"), where))
    contexts = (row.get("positive_ctxs") or [])[:1]
    evidence = given_evidence(row, where) or tuple(f"{one['title']}\n{one['text']}" for one in contexts)
    return InternetQuestion(found.example, found.answers, evidence, found.example.gold[:1])


def _hotpotqa_question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    example = Item(
        id=name_of(row, ("_id", "id"), where) or Path(where).name,
        query=text_of(row, "question", where),
        group=text_of(row, "type", where) if row.get("type") is not None else "all",
    )
    evidence = given_evidence(row, where)
    if not evidence:  # the paragraphs of `supporting_facts`, in order
        paragraphs, titles = dict(row["context"]), dict.fromkeys(title for title, _ in row["supporting_facts"])
        evidence = tuple(" ".join(sentence.strip() for sentence in paragraphs[title]) for title in titles)
    return InternetQuestion(example, (text_of(row, "answer", where),), evidence)


FEVER_LABELS = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")


def _claim(row: Mapping[str, Any], where: str) -> InternetQuestion:
    label = text_of(row, "label", where)
    if label not in FEVER_LABELS:
        raise UserError(f"{where}: label {label!r} is unknown; expected one of {', '.join(FEVER_LABELS)}")
    # An evidence set has entries [annotation, evidence, page, sentence]; the page is null without evidence.
    sets = [dict.fromkeys(page for _, _, page, _ in one if page is not None) for one in row.get("evidence", [])]
    example = Item(
        id=name_of(row, ("id",), where) or Path(where).name,
        query=text_of(row, "claim", where),
        group=label,
        gold=tuple(dict.fromkeys(page for pages in sets for page in pages)),
    )
    first = next(filter(None, sets), {})
    return InternetQuestion(example, (label,), given_evidence(row, where), tuple(first), FEVER_LABELS)


STRATEGYQA_LABELS = ("Yes", "No")


def _strategyqa_question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    answer = row.get("answer")
    if not isinstance(answer, bool):
        raise UserError(f"{where}: field 'answer' must be true or false, found {answer!r}")
    identifier = name_of(row, ("qid", "id"), where) or Path(where).name
    example = Item(identifier, text_of(row, "question", where), "all")
    evidence = given_evidence(row, where) or tuple(fact.strip() for fact in texts_of(row, "facts", where))
    return InternetQuestion(
        example, (STRATEGYQA_LABELS[0] if answer else STRATEGYQA_LABELS[1],), evidence, labels=STRATEGYQA_LABELS
    )


DATE = re.compile(r"(?:(\w+)\b.*\D)?(\d{4})")  # "2014", "December 2020" and "December 13, 1999"
# New facts are unknown to the paper's LM, trained on text up to November 2020 (section 5.4). Questions with a later
# date mostly ask for older facts, so the group depends on the date from which the answer is true.
NEW, OLD = "facts since December 2020", "older facts"


def _situatedqa_question(row: Mapping[str, Any], where: str) -> InternetQuestion:
    """Return the question, named by file and line: several rows with the same `id` may have the same date."""
    group = "all"  # a question about a place has no date
    if row.get("date") is None:
        text_of(row, "location", where)
    else:
        found = DATE.fullmatch(text_of(row, "date", where).strip())
        if found is None:
            raise UserError(
                f"{where}: date {row['date']!r} does not end with a year; expected a date such as December 13, 1999"
            )
        is_new = int(found[2]) > 2020 or (found[2], found[1]) == ("2020", "December")
        group = NEW if is_new and row.get("date_type") == "start" else OLD
    example = Item(
        id=Path(where).name,
        query=text_of(row, "edited_question", where),
        group=group,
        source=name_of(row, ("id", "example_id"), where) or text_of(row, "question", where),
    )
    answers = tuple(dict.fromkeys(texts_of(row, "answer", where)))
    return InternetQuestion(example, answers, given_evidence(row, where))


EXACT_MATCH, ACCURACY = "exact_match", "accuracy"

QUESTION_SETS: dict[str, tuple[str, Callable[[Mapping[str, Any], str], InternetQuestion]]] = {
    "nq": (EXACT_MATCH, _nq_question),
    "hotpotqa": (EXACT_MATCH, _hotpotqa_question),
    "fever": (ACCURACY, _claim),
    "strategyqa": (ACCURACY, _strategyqa_question),
    "situatedqa": (EXACT_MATCH, _situatedqa_question),
}  # set -> metric of its answers, reader of its rows
SHOTS_OF = {"situatedqa": "nq"}  # set without evidence -> set of its shots


def read_set(dataset: str, path: str | Path) -> list[InternetQuestion]:
    """Return every question of a file of rows, such as a JSON array or JSON Lines.

    Raises UserError with file and line for a missing or malformed field.
    """

    def read(row: Mapping[str, Any], where: str) -> InternetQuestion:
        try:
            return QUESTION_SETS[dataset][1](row, where)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # from nested lists
            raise UserError(
                f"{where}: its evidence is not as in the files of {dataset} ({type(error).__name__}: {error}); "
                f"expected their form, or the field {GOLD_EVIDENCE}"
            ) from error

    return questions_of_rows(read_rows(Path(path).expanduser()), read, path)


# Gold evidence, shots and the validation part -----------------------------------------------------------------------

NUM_SHOTS = 15
VALIDATION_PARTS = 10  # a tenth of the questions, by hash


def is_validation(question: InternetQuestion) -> bool:
    """Return whether a question is in the validation part: a tenth, by hash of its words or of its variants' id.

    Other ids depend on the file, so another copy of the set would have a different validation part.
    """
    origin = question.example.source or question.example.query
    return hash64(normalize_answer(origin)) % VALIDATION_PARTS == 0


def plan_questions(
    keys: QuestionsConfig, seed: int, with_evidence: bool = True
) -> tuple[list[InternetQuestion], list[InternetQuestion]]:
    """Return the questions to measure, in the file's order, and the shots.

    Both are drawn by the seed; `with_evidence` draws only shots with evidence. Raises UserError for too few questions.
    """
    num_shots, dataset = NUM_SHOTS if keys.shots is None else keys.shots, str(keys.dataset)
    questions = read_set(dataset, str(keys.path))
    if keys.demonstrations is not None:
        measured = draw_questions(questions, keys.max_questions, seed)
        pool = read_set(SHOTS_OF.get(dataset, dataset), keys.demonstrations)
        free = _possible_shots(pool, measured, num_shots, keys.demonstrations, with_evidence)
        return measured, draw_demonstrations(free, measured, num_shots, seed)
    free = _possible_shots(questions, (), num_shots, str(keys.path), with_evidence)
    shots = draw_demonstrations(free, (), num_shots, seed)
    rest = not_among(_without_variants(questions, shots), shots)
    if not rest:
        raise UserError(f"{num_shots} shots leave none of {len(questions)} questions to measure; ask for fewer")
    return draw_questions(rest, keys.max_questions, seed), shots


def _possible_shots(
    pool: Sequence[InternetQuestion],
    measured: Sequence[InternetQuestion],
    num: int,
    path: str,
    with_evidence: bool,
) -> list[InternetQuestion]:
    """Return unmeasured questions of the pool, one variant of each."""
    # In classification, unanswerable questions may be shots.
    free = [
        question
        for question in _without_variants(pool, measured)
        if not with_evidence or question.evidence or question.evidence_ids or question.labels
    ]
    first = list({question.origin: question for question in reversed(free)}.values())[::-1]
    if len(first) < num:
        raise UserError(
            f"{num} shots are asked for, but {len(first)} of {len(pool)} questions in {path} "
            f"{'have gold evidence and ' if with_evidence else ''}are not measured; expected more of them "
            "(questions.demonstrations), or fewer shots (questions.shots)"
        )
    return first


def _without_variants(
    questions: Sequence[InternetQuestion], others: Sequence[InternetQuestion]
) -> list[InternetQuestion]:
    origins = {other.origin for other in others}
    return [question for question in questions if question.origin not in origins]


def gold_evidence(questions: Sequence[InternetQuestion], corpus: CorpusStore | None, needed_for: str) -> dict[str, str]:
    """Return the evidence of every question by id: texts of the set, or documents of the corpus.

    An unanswerable question of classification (FEVER's NOT ENOUGH INFO) gets the evidence of another question, chosen
    by a hash of its id, like the sampling of Thorne et al. 2018. Raises UserError for a question without evidence;
    the message names `needed_for`.
    """
    known = {question.example.id: _own_evidence(question, corpus) for question in questions}
    donors = sorted({text for text in known.values() if text})
    found: dict[str, str] = {}
    for question in questions:
        text = known[question.example.id]
        if not text and question.labels and donors:
            text = donors[hash64(question.example.id) % len(donors)]
        if text is None:
            raise UserError(
                f"question {question.example.id} has no gold evidence, which {needed_for} needs; expected the field "
                f"{GOLD_EVIDENCE}, a text, or ids of documents of data.corpus (docs/evaluation.md says which)"
            )
        found[question.example.id] = text
    return found


def _own_evidence(question: InternetQuestion, corpus: CorpusStore | None) -> str | None:
    if question.evidence:
        return " ".join(question.evidence)
    if not question.evidence_ids:
        return None
    if corpus is None:
        raise UserError(
            f"question {question.example.id} names documents as its gold evidence, but there is no corpus; "
            f"expected data.corpus, or the field {GOLD_EVIDENCE}"
        )
    rows = corpus.rows_of(question.evidence_ids)
    if missing := [name for name in question.evidence_ids if name not in rows]:
        raise UserError(
            f"question {question.example.id} names the document {missing[0]} as its gold evidence, which data.corpus "
            f"does not hold; expected a corpus with it, or the field {GOLD_EVIDENCE}"
        )
    return " ".join(corpus.texts([rows[name] for name in question.evidence_ids]))
