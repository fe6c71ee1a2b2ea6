"""Answering from searched passages (Lazaridou et al. 2022): closed book, gold evidence, rerankers by their passages.

Every question is searched for before the LM is opened. One pass over the questions then measures what all methods
need; weights are fitted on the validation part when all is measured, and the results are of the rest.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from replug.answering.answerer import AnsweringOptions
from replug.configs.errors import UserError
from replug.configs.methods import Method
from replug.configs.rules import evaluation_methods, has_rerank_lm
from replug.configs.schema import EvaluationConfig, LMConfig
from replug.data.store import Corpus
from replug.evals.evidence import EvidenceBook
from replug.evals.folder import EvaluationFolder
from replug.evals.internet.deciding import Sizes, decide
from replug.evals.internet.findings import add_internet_findings
from replug.evals.internet.gold import texts_by_id
from replug.evals.internet.preparing import Prepared, plan
from replug.evals.internet.question_sets import QUESTION_SETS
from replug.evals.internet.searching import find_for_all
from replug.evals.internet.task import InternetQa
from replug.evals.kinds import EvalDataset, EvaluationKind, PromptedLM
from replug.evals.loop import Measured, Task
from replug.evals.outcomes import Row
from replug.evals.questions import queries_of, question_problems
from replug.planning.model_sizes import lm_size

log = logging.getLogger(__name__)


def internet_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Questions drawn, and searched for."""
    prepared = _prepared(config, corpus)
    rerankers = tuple(dict.fromkeys(method.source for method in prepared.methods if method.k))
    options = AnsweringOptions(
        rerankers=rerankers,
        max_new_tokens=config.questions.max_new_tokens,
        seed=config.seed,
        labels=prepared.labels,
    )

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> InternetQa:
        assert asked is not None
        task = InternetQa(prepared, asked, options)
        _tell_expected(task)
        return task

    return EvalDataset([""] * len(prepared.questions), make_task)  # no source of an EvidenceBook is asked


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
    sizes = Sizes(lm, _parameters(config.rerank_lm) if has_rerank_lm(config) else lm)
    return decide(task.prepared, rows, sizes, folder.weights)


def _parameters(lm: LMConfig) -> float | None:
    """Of an LM that a table or its own files tell about; FLOP are left out where none does."""
    try:
        return float(lm_size(lm.path or lm.model or "").parameters)
    except UserError:
        return None


def _prepared(config: EvaluationConfig, corpus: Corpus | None) -> Prepared:
    assert config.questions.dataset is not None, "problems are looked for first"
    of = QUESTION_SETS[config.questions.dataset]
    texts = texts_by_id(corpus.corpus) if corpus else None
    prepared = plan(config, evaluation_methods(config), of, texts)
    if not prepared.num_passages:
        return prepared
    examples = [question.example for question in prepared.questions]
    queries = dict(zip([example.id for example in examples], queries_of(config, examples), strict=True))
    finder = evidence_finder(config.web)
    return replace(prepared, found=find_for_all(finder, queries))


def internet_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    yield from question_problems(config, methods)
    names = ", ".join(QUESTION_SETS)
    if config.questions.dataset not in QUESTION_SETS:
        yield f"questions.dataset is {config.questions.dataset}; evaluation=internet_qa expects one of {names}"
    if config.questions.latency_questions:
        yield f"questions.latency_questions is {config.questions.latency_questions}; internet_qa expects 0"


EVALUATION = EvaluationKind(
    internet_dataset, internet_problems, reranks=True, settle=settle, add_findings=add_internet_findings
)
