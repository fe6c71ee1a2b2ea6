"""Retrieval quality without an LM: retrieved documents against gold ones, measured by `ir-measures`.

Two recalls are called R@k. Here `Success@k` is whether any gold document is among the first k (DPR's top-k accuracy);
`R@k` is the share of a query's gold documents among the first k, as in trec_eval. They are equal if every query has one
gold document. Judgements (`questions.qrels`, BEIR) may have grades, which nDCG uses. For questions with only answers,
documents that hold an answer are relevant (DPR, Karpukhin et al. 2020).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import ir_measures
import numpy as np
from ir_measures import AP, RR, R, Success, nDCG

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.config.rules import evaluation_methods
from replug.data.answers import has_answer
from replug.data.rows import TEST, Grades, beir_folder, qrels_file, read_qrels
from replug.data.store import Corpus, CorpusStore, StoredCorpus
from replug.evals.evidence import Evidence
from replug.evals.loop import Item, Metric, Outcome, Outcomes, Task
from replug.evals.questions import DRAWS_QUESTIONS, draw_questions, queries_of, read_questions
from replug.models.lm_source import LMSource

log = logging.getLogger(__name__)

RECALL_AT = (1, 5, 20)
RANKED_AT = 10
RECALL_DEPTH = max(RECALL_AT)  # documents for recall
DEEP = 100  # documents for BEIR's measures
MEASURES = [*(measure @ k for measure in (Success, R) for k in RECALL_AT), RR @ RANKED_AT, nDCG @ RANKED_AT]
DEEP_MEASURES = [R @ DEEP, AP @ DEEP]
FIRST_MEASURES = [RR @ RECALL_DEPTH, *(Success @ k for k in RECALL_AT)]  # determined by the first relevant document


class Retrieval(Task):
    """Measure retrieved documents by `gold`, the grades of each example's documents by row.

    For an example without gold documents, documents that hold one of its `answers` are relevant.
    """

    reads = ("retrievers", "questions.qrels", *DRAWS_QUESTIONS)
    asks_lm = False
    compares_all = True

    def __init__(
        self,
        examples: Sequence[Item],
        gold: Sequence[Mapping[int, int]],
        measures: Sequence = MEASURES,
        answers: Sequence[Sequence[str]] = (),
    ) -> None:
        self.examples, self._gold, self._measures, self._answers = list(examples), gold, measures, answers
        self.metrics: Mapping[str, Metric] = {
            ("M" if name.startswith(("RR", "AP")) else "") + name: Metric(name) for name in map(str, measures)
        }

    @classmethod
    def problems(cls, config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
        if wrong := [method.name for method in methods if method.k == 0 or method.is_concatenated]:
            yield f"methods: {wrong[0]} ranks no documents; evaluation=retrieval expects retrievers"
        if weighted := [method for method in methods if method.weighting]:
            name, way = weighted[0].name, weighted[0].weighting
            yield f"methods: {name}; weights change no ranking; expected {name.removesuffix(f'/{way}')}"
        if shallow := [method.name for method in methods if method.k < RECALL_DEPTH]:
            yield f"k: {shallow[0]} ranks too few documents; evaluation=retrieval expects k={RECALL_DEPTH} or more"

    @classmethod
    def of(cls, config: EvaluationConfig, corpus: Corpus | None, source: LMSource | None) -> Self:
        """Draw questions with judgements or gold documents; if there are none, questions with answers."""
        assert corpus is not None
        if len(corpus.corpus) < RECALL_DEPTH:
            raise UserError(
                f"data: {len(corpus.corpus)} documents; evaluation=retrieval expects {RECALL_DEPTH} or more"
            )
        questions = read_questions(str(config.questions.path), config.data.fields, needs_answers=False)
        is_judged, grades = _grades(config, [question.example for question in questions])
        pool = [question for question in questions if grades.get(question.example.id)]
        by_answers = not pool
        pool = pool or [question for question in questions if question.answers]
        if not pool:
            raise UserError(f"questions.path: no question of {config.questions.path} has gold documents or answers")
        chosen = draw_questions(pool, config.questions.max_questions, config.seed)
        drawn = [question.example for question in chosen]
        judged: list[Mapping[str, int]] = [grades.get(example.id, {}) for example in drawn]
        right = (tuple(doc for doc, grade in of.items() if grade > 0) for of in judged)
        examples = [replace(example, gold=gold) for example, gold in zip(drawn, right, strict=True)]
        rows_of = corpus.corpus.rows_of(doc for of in judged for doc in of)
        _say_unknown("documents", {doc for of in judged for doc in of}, rows_of.keys(), "they count as never found")
        depth = min(method.k for method in evaluation_methods(config))
        measures = [*MEASURES, RR @ RECALL_DEPTH] + (DEEP_MEASURES if depth >= min(DEEP, len(corpus.corpus)) else [])
        if by_answers:
            log.info(f"{config.questions.path} names no gold documents: documents that hold an answer are right")
            measures = FIRST_MEASURES
        elif is_judged:  # the first measure compares methods
            measures = [nDCG @ RANKED_AT, *(measure for measure in measures if measure != nDCG @ RANKED_AT)]
        gold = gold_rows(judged, rows_of)
        own = own_documents(corpus.corpus, examples)
        if count := sum(map(bool, own)):
            log.info(f"questions that are also documents, by id and words: {count}; none finds itself, as in MTEB")
        task = cls(examples, gold, measures, [question.answers for question in chosen])
        task.queries, task.sources = queries_of(config, examples), own
        return task

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        outcomes, gold = {}, self._gold[row]
        if not gold and self._answers:
            found = (pair for one in evidence.values() for pair in zip(one.doc_rows, one.texts, strict=True))
            gold = {doc: 1 for doc, text in found if has_answer(text or "", self._answers[row])}
        for name, one in evidence.items():
            values = retrieval_metrics(np.array([one.doc_rows]), [gold], self._measures)
            outcomes[name] = Outcome({metric: float(of[0]) for metric, of in values.items()})
        return lambda: outcomes


def own_documents(corpus: CorpusStore, examples: Sequence[Item]) -> list[str | None]:
    """Return for each question its id if it is a document too (ArguAna, Quora), with or without a title, else None."""
    if isinstance(corpus, StoredCorpus):  # ids may be bare numbers, and documents stay in the store
        return []
    rows = corpus.rows_of(example.id for example in examples)
    words = dict(zip(rows, corpus.texts([*rows.values()]), strict=True))
    return [
        example.id if words.get(example.id, "").strip().endswith(example.query.strip()) else None
        for example in examples
    ]


def _grades(config: EvaluationConfig, questions: Sequence[Item]) -> tuple[bool, Grades]:
    """Return whether there are judgements, and the grades of each question: judged, or 1 for gold documents."""
    folder, path = beir_folder(str(config.questions.path)), config.questions.qrels
    if path is None and folder is not None:
        path = str(qrels_file(folder, TEST))
    if path is None:
        return False, {question.id: dict.fromkeys(question.gold, 1) for question in questions}
    grades = read_qrels(path)
    _say_unknown("queries", set(grades), {question.id for question in questions}, "they are left out")
    return True, grades


def _say_unknown(what: str, judged: Collection[str], known: Collection[str], follows: str) -> None:
    """Warn of judged ids without a match. Raises UserError if no id matches: the files belong to different sets."""
    unknown = sorted(set(judged) - set(known))
    if not unknown:
        return
    key = "questions.path" if what == "queries" else "data.corpus"
    message = f"{len(unknown)} of {len(judged)} judged {what} are not in {key}, such as {unknown[0]!r}"
    if len(unknown) == len(judged):
        raise UserError(f"{message}; expected judgements of these {what}")
    log.warning(f"{message}; {follows}")


def retrieval_metrics(
    found: np.ndarray, gold: Sequence[Mapping[int, int]], measures: Sequence = MEASURES
) -> dict[str, np.ndarray]:
    """Return values [N] of every measure for rows [N, K], best first.

    `gold` has the grades of each query's documents. A query without any gets 0 by every measure. Gold documents missing
    from the corpus have distinct negative rows (`gold_rows`): they count, and are never found.
    """
    qrels = {str(query): {str(row): grade for row, grade in of.items()} for query, of in enumerate(gold) if of}
    values = {str(measure): np.zeros(len(gold)) for measure in measures}
    # `ir-measures` sorts by score, so ranks serve as scores without ties.
    run = {
        str(query): {str(row): -float(rank) for rank, row in enumerate(rows)}
        for query, rows in enumerate(found.tolist())
    }
    for metric in ir_measures.iter_calc(measures, qrels, run) if qrels else ():
        values[str(metric.measure)][int(metric.query_id)] = metric.value
    return values


def gold_rows(gold: Iterable[Mapping[str, int]], rows_of: Mapping[str, int]) -> list[dict[int, int]]:
    """Return grades by row for each query; ids missing from the corpus get distinct negative numbers."""
    return [{rows_of.get(doc, -1 - place): grade for place, (doc, grade) in enumerate(of.items())} for of in gold]
