"""Retrieval alone: how well the documents that are found fit the gold ones, by `ir-measures`. No LM takes part.

Two recalls go by the name R@k. Here `Success@k` is whether any gold document is among the first k (DPR's top-k
accuracy); `R@k` is the share of a query's gold documents that are among the first k, as in trec_eval. They are equal
where every query has one gold document.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import ir_measures
import numpy as np
from ir_measures import RR, R, Success, nDCG

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.data.store import Corpus
from replug.evals.evidence import Evidence
from replug.evals.kinds import EvalDataset, EvaluationKind
from replug.evals.loop import Item, Metric, Outcome, Outcomes, Task
from replug.evals.questions import draw_questions, queries_of, question_problems, read_questions, unasked_problems

RECALL_AT = (1, 5, 20)
RANKED_AT = 10
RECALL_DEPTH = max(RECALL_AT)  # documents that recall needs
_MEASURES = [*(measure @ k for measure in (Success, R) for k in RECALL_AT), RR @ RANKED_AT, nDCG @ RANKED_AT]


class Retrieval(Task):
    """Measures what was found by `gold`, the rows of each example's gold documents."""

    metrics: Mapping[str, Metric] = {
        ("M" if name.startswith("RR") else "") + name: Metric(name) for name in map(str, _MEASURES)
    }

    def __init__(self, examples: Sequence[Item], gold: Sequence[set[int]]) -> None:
        self.examples, self._gold = list(examples), gold

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        found = np.array([one.doc_rows for one in evidence.values()])
        values = retrieval_metrics(found, [self._gold[row]] * len(found))
        outcomes = {
            name: Outcome({metric: float(of[place]) for metric, of in values.items()})
            for place, name in enumerate(evidence)
        }
        return lambda: outcomes


def retrieval_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Draw questions among those that name gold documents."""
    assert corpus is not None
    if len(corpus.corpus) < RECALL_DEPTH:
        raise UserError(f"data: {len(corpus.corpus)} documents; evaluation=retrieval expects {RECALL_DEPTH} or more")
    pool = [q for q in read_questions(Path(str(config.questions.path)).expanduser()) if q.example.gold]
    if not pool:
        raise UserError(f"questions.path: no question of {config.questions.path} names gold documents")
    examples = [question.example for question in draw_questions(pool, config.questions.max_questions, config.seed)]
    rows_of = corpus.corpus.rows_of(doc for example in examples for doc in example.gold)
    gold = gold_rows([example.gold for example in examples], rows_of)
    return EvalDataset(queries_of(config, examples), lambda asked, book: Retrieval(examples, gold))


def retrieval_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    yield from unasked_problems(config, methods)
    if wrong := [method.name for method in methods if method.k == 0 or method.is_concatenated]:
        yield f"methods: {wrong[0]} ranks no documents; evaluation=retrieval expects retrievers"
    if weighted := [method for method in methods if method.weighting]:
        name, way = weighted[0].name, weighted[0].weighting
        yield f"methods: {name}; weights change no ranking; expected {name.removesuffix(f'/{way}')}"
    if shallow := [method.name for method in methods if method.k < RECALL_DEPTH]:
        yield f"k: {shallow[0]} ranks too few documents; evaluation=retrieval expects k={RECALL_DEPTH} or more"
    yield from question_problems(config, methods)


def retrieval_metrics(found: np.ndarray, gold: Sequence[Collection[int]]) -> dict[str, np.ndarray]:
    """Return values [N] of every measure for rows [N, K], best first.

    A gold document counts 1, any other 0. A query without gold documents gets 0 by every measure. Gold documents
    that are not in the corpus are negative numbers, one for each (`gold_rows`): they count, and are never found.
    """
    qrels = {str(query): dict.fromkeys(map(str, rows), 1) for query, rows in enumerate(gold) if rows}
    values = {str(measure): np.zeros(len(gold)) for measure in _MEASURES}
    # `ir-measures` orders by score, so scores must not be equal: they are the ranks.
    run = {
        str(query): {str(row): -float(rank) for rank, row in enumerate(rows)}
        for query, rows in enumerate(found.tolist())
    }
    for metric in ir_measures.iter_calc(_MEASURES, qrels, run) if qrels else ():
        values[str(metric.measure)][int(metric.query_id)] = metric.value
    return values


def gold_rows(gold: Iterable[Sequence[str]], rows_of: Mapping[str, int]) -> list[set[int]]:
    """Return rows of each query's gold documents; an id that the corpus lacks gets a negative number of its own."""
    return [{rows_of.get(doc, -1 - place) for place, doc in enumerate(dict.fromkeys(ids))} for ids in gold]


EVALUATION = EvaluationKind(retrieval_dataset, retrieval_problems, asks_lm=False)
