"""Answering from searched passages (Lazaridou et al. 2022): closed book, gold evidence, rerankers by their passages.

Every question is searched for before the LM is opened. One pass over the questions then measures what all methods
need; weights are fitted on the validation part when all is measured, and the results are of the rest.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from replug.answering.answerer import AnsweringOptions
from replug.answering.weights import WeightsFile
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method
from replug.config.rules import evaluation_methods, has_rerank_lm
from replug.config.schema import LMConfig
from replug.data.store import Corpus
from replug.evals.evidence import EvidenceBook
from replug.evals.folder import EvaluationFolder
from replug.evals.internet.deciding import ParameterCounts, decide
from replug.evals.internet.findings import add_internet_findings
from replug.evals.internet.gold import texts_by_id
from replug.evals.internet.preparing import Prepared, plan
from replug.evals.internet.question_sets import QUESTION_SETS
from replug.evals.internet.searching import LOCAL, corpus_engine, find_for_all, searches
from replug.evals.internet.task import InternetQa
from replug.evals.kinds import EvalDataset, EvaluationKind, PromptedLM
from replug.evals.loop import Measured, Task
from replug.evals.outcomes import Row
from replug.evals.questions import queries_of, question_problems
from replug.planning.model_sizes import lm_size
from replug.web.records import SearchEngine

log = logging.getLogger(__name__)


def internet_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Questions drawn; those of an engine on the web are searched for here, before anything heavy starts."""
    prepared = prepared_questions(config, corpus)
    queries = queries_of(config, [question.example for question in prepared.questions])
    on_web = prepared.num_passages > 0 and config.web.engine != LOCAL
    if on_web:
        prepared = _with_evidence(config, prepared, queries)
    options = AnsweringOptions(
        rerankers=tuple(dict.fromkeys(method.source for method in prepared.methods if method.k)),
        max_new_tokens=config.questions.max_new_tokens,
        seed=config.seed,
        labels=prepared.labels,
    )

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> InternetQa:
        assert asked is not None
        found = prepared
        for method in searches(config):
            found = _with_evidence(config, prepared, queries, corpus_engine(method, book, queries))
        task = InternetQa(found, asked, options)
        _tell_expected(task)
        return task

    return EvalDataset([""] * len(queries) if on_web else queries, make_task)


def prepared_questions(config: EvaluationConfig, corpus: Corpus | None) -> Prepared:
    """Without what is searched for."""
    assert config.questions.dataset is not None, "problems are looked for first"
    texts = texts_by_id(corpus.corpus) if corpus else None
    return plan(config, evaluation_methods(config), QUESTION_SETS[config.questions.dataset], texts)


def _with_evidence(
    config: EvaluationConfig, prepared: Prepared, queries: Sequence[str], local: SearchEngine | None = None
) -> Prepared:
    from replug.web.build import (
        evidence_finder,
    )  # scikit-learn takes seconds, which looking for problems can do without

    folder = EvaluationFolder(Path(config.out).expanduser())
    ids = [question.example.id for question in prepared.questions]
    with closing(evidence_finder(config.web, folder.snapshot, local)) as finder:
        return replace(prepared, found=find_for_all(finder, dict(zip(ids, queries, strict=True))))


def _tell_expected(task: InternetQa) -> None:
    expected = task.expected_tokens()
    if expected is not None:
        log.info(
            f"{len(task.examples)} questions: about {expected.put / 1e6:,.2f} million tokens are put to the LM; where "
            f"common beginnings are read once, about {expected.read_once / 1e6:,.2f} million are read"
        )


def settle(
    config: EvaluationConfig, folder: EvaluationFolder, task: Task, rows: Sequence[Row]
) -> tuple[Measured, Sequence[Row]]:
    """The test part under every method, by weights fitted on the validation part."""
    assert isinstance(task, InternetQa)
    lm = _parameters(config.lm)
    parameters = ParameterCounts(lm, _parameters(config.rerank_lm) if has_rerank_lm(config) else lm)
    return decide(task.prepared, rows, parameters, WeightsFile(folder.weights, task.lm, task.reranker))


def _parameters(lm: LMConfig) -> float | None:
    """Of an LM that a table or its own files tell about; FLOP are left out where none does."""
    try:
        return float(lm_size(lm.path or lm.model or "").parameters)
    except UserError:
        return None


def internet_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    yield from question_problems(config, methods)
    names = ", ".join(QUESTION_SETS)
    if config.questions.dataset not in QUESTION_SETS:
        yield f"questions.dataset is {config.questions.dataset}; evaluation=internet_qa expects one of {names}"
    if config.questions.latency_questions:
        yield f"questions.latency_questions is {config.questions.latency_questions}; internet_qa expects 0"
    if not config.questions.documents_in_shots:
        yield "questions.documents_in_shots is false; shots of internet_qa have their evidence: expected true"
    if config.retrievers:
        yield f"retrievers.{next(iter(config.retrievers))} is set; internet_qa searches by retriever.path, or by BM25"
    yield from _search_problems(config, max(method.k for method in methods))


def _search_problems(config: EvaluationConfig, num_passages: int) -> Iterator[str]:
    data = config.data
    if num_passages and config.web.engine == LOCAL and not (data.corpus or data.prepared or data.source):
        yield "data.corpus is missing; web.engine=local expects documents to search in, another engine needs none"
    if num_passages > config.web.max_passages:
        most = config.web.max_passages
        yield f"web.max_passages is {most}, but a method reads {num_passages}; expected as many or more"


EVALUATION = EvaluationKind(
    internet_dataset,
    internet_problems,
    reranks=True,
    searches=searches,
    settle=settle,
    add_findings=add_internet_findings,
)
