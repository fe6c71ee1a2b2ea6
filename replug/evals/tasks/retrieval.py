"""Retrieval alone: how often the gold documents of a question are found. No LM takes part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.data.store import Corpus
from replug.evals.evidence import Evidence
from replug.evals.kinds import EvalDataset, EvaluationKind
from replug.evals.loop import Item, Metric, Outcome, Outcomes
from replug.evals.questions import draw_questions, queries_of, question_problems, read_questions, unasked_problems
from replug.evals.retrieval import RANKED_AT, RECALL_AT, RECALL_DEPTH, gold_rows, retrieval_metrics

_NAMES = [
    *(f"Success@{k}" for k in RECALL_AT),
    *(f"R@{k}" for k in RECALL_AT),
    f"RR@{RANKED_AT}",
    f"nDCG@{RANKED_AT}",
]


class Retrieval:
    """A `Task`. `gold` are the rows of each example's gold documents.

    `finds_all` says that there are no more documents to find than were found, be they fewer than the measures are of.
    """

    metrics: Mapping[str, Metric] = {("M" if name.startswith("RR") else "") + name: Metric(name) for name in _NAMES}

    def __init__(self, examples: Sequence[Item], gold: Sequence[set[int]], finds_all: bool = False) -> None:
        self.examples, self._gold, self._finds_all = list(examples), gold, finds_all

    def groups(self, example: Item) -> tuple[str, ...]:
        return (example.group,)

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        found = np.array([one.doc_rows for one in evidence.values()])
        values = retrieval_metrics(found, [self._gold[row]] * len(found), finds_all=self._finds_all)
        outcomes = {
            name: Outcome({metric: float(of[place]) for metric, of in values.items()})
            for place, name in enumerate(evidence)
        }
        return lambda: outcomes


def retrieval_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Drawn questions among those that name gold documents."""
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
    if shallow := [method.name for method in methods if method.k < RECALL_DEPTH]:
        yield f"k: {shallow[0]} ranks too few documents; evaluation=retrieval expects k={RECALL_DEPTH} or more"
    yield from question_problems(config, methods)


EVALUATION = EvaluationKind(retrieval_dataset, retrieval_problems, asks_lm=False)
