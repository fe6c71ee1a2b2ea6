"""Answering from searched passages (Lazaridou et al. 2022): closed book, gold evidence, rerankers by their passages.

Every question is searched for before the LM is opened. One pass over the questions then measures what all methods
need; weights are fitted on the validation part when all is measured, and the results are of the rest.

The task that asks: closed book, with gold evidence, and for candidates and factors from passages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from replug.answering.answerer import Answered, AnsweredAlone, Answerer, AnsweringOptions
from replug.answering.prompts import AnswerPrompts
from replug.answering.rerankers import WeightsFile
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import GOLD, NONE, Method
from replug.config.rules import evaluation_methods, has_rerank_lm
from replug.config.schema import LMConfig
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.folder import EvaluationFolder
from replug.evals.internet_costs import (
    PASSAGES,
    AnswerCosts,
    LineCounter,
    measured_passages,
    passages_outcome,
)
from replug.evals.internet_deciding import add_internet_findings, decide, metrics_beside
from replug.evals.internet_preparing import (
    LOCAL,
    Prepared,
    corpus_engine,
    find_for_all,
    fitting_prompts,
    plan,
    searches,
    texts_by_id,
    token_counter,
)
from replug.evals.internet_sets import QUESTION_SETS, InternetQuestion
from replug.evals.kinds import EvalDataset, EvaluationKind, PromptedLM
from replug.evals.loop import Item, Measured, Metric, Outcome, Outcomes, Task
from replug.evals.outcomes import Row
from replug.evals.questions import queries_of, question_problems
from replug.planning.model_sizes import lm_size
from replug.web import require_web
from replug.web.records import SearchEngine


class InternetQa:
    """A `Task`. Its outcomes are named by what was asked (`evals.internet_costs`), not by method.

    Nothing of `evidence` is read: passages come from a search engine, which was asked before.
    """

    def __init__(self, prepared: Prepared, asked: PromptedLM, options: AnsweringOptions) -> None:
        self.prepared, self._options = prepared, options
        scorer = asked.reranker or asked
        self._prompts = prompts = fitting_prompts(prepared, asked, options.max_new_tokens)
        of_scorer = fitting_prompts(prepared, scorer, options.max_new_tokens) if asked.reranker else prompts
        self._answerer = Answerer(asked.lm, prompts, options, scorer.lm, of_scorer)
        self.lm, self.reranker = asked.lm.identity, scorer.lm.identity
        self._asked, self._scored = _counter(asked, prompts), _counter(scorer, of_scorer)
        self._sources = {method.source for method in prepared.methods}
        self.examples = [question.example for question in prepared.questions]
        self.metrics: Mapping[str, Metric] = {
            prepared.metric: Metric(prepared.metric),
            **metrics_beside(prepared.metric),
        }

    def groups(self, example: Item) -> tuple[str, ...]:
        return (example.group,)

    def compared(self, row: int) -> tuple[str, ...]:
        question = self.prepared.questions[row]
        return question.example.query, *question.answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question = self.prepared.questions[row]
        alone = {
            source: self._answerer.submit_alone(question.example.query, text)
            for source, text in ((NONE, None), (GOLD, self.prepared.gold.get(question.example.id)))
            if source in self._sources
        }
        reranked = None
        if self.prepared.num_passages:
            reranked = self._answerer.submit(question.example.query, self.prepared.passages(question))

        def outcomes() -> Outcomes:
            told = {}
            for source, wait in alone.items():
                text, answered = self.prepared.gold[question.example.id] if source == GOLD else None, wait()
                costs = self._costs_alone(question.example.query, text, answered)
                told[source] = Outcome({}, {"answer": answered.answer, "costs": asdict(costs) if costs else None})
            return {**told, PASSAGES: self._passages(question, reranked())} if reranked else told

        return outcomes

    def _costs_alone(self, question: str, text: str | None, answered: AnsweredAlone) -> AnswerCosts | None:
        """Of samples, or of labels, which the LM that reranks scores."""
        if self._asked is None or self._scored is None:
            return None
        if not self._options.labels:
            return AnswerCosts(1, self._asked.alone(question, text), answered.written_tokens)
        prompt = self._scored.alone(question, text)
        ends = [self._scored.answer(label) for label in self._options.labels]
        return AnswerCosts(len(ends), 0, 0, prompt * len(ends) + sum(ends))

    def _passages(self, question: InternetQuestion, answered: Answered) -> Outcome:
        found = self.prepared.found[question.example.id]
        distinct = answered.factors.distinct
        texts = [passage.text for passage in self.prepared.passages(question)]
        asked, scored = (
            counter.lines(question.example.query, texts, distinct) if counter else None
            for counter in (self._asked, self._scored)
        )
        return passages_outcome(measured_passages(answered, question.answers, asked, scored), found.failures)


def _counter(lm: PromptedLM, prompts: AnswerPrompts) -> LineCounter | None:
    count = token_counter(lm.source)
    return LineCounter(count, prompts) if count else None


def internet_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Questions drawn; those of an engine on the web are searched for here, before anything heavy starts."""
    assert config.questions.dataset is not None, "problems are looked for first"
    texts = texts_by_id(corpus.corpus) if corpus else None
    prepared = plan(config, evaluation_methods(config), QUESTION_SETS[config.questions.dataset], texts)
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
        return InternetQa(found, asked, options)

    return EvalDataset([""] * len(queries) if on_web else queries, make_task)


def _with_evidence(
    config: EvaluationConfig, prepared: Prepared, queries: Sequence[str], local: SearchEngine | None = None
) -> Prepared:
    require_web("evaluation=internet_qa")
    from replug.web.evidence import evidence_finder

    folder = EvaluationFolder(Path(config.out).expanduser())
    ids = [question.example.id for question in prepared.questions]
    with closing(evidence_finder(config.web, folder.snapshot, local)) as finder:
        return replace(prepared, found=find_for_all(finder, dict(zip(ids, queries, strict=True))))


def settle(
    config: EvaluationConfig, folder: EvaluationFolder, task: Task, rows: Sequence[Row]
) -> tuple[Measured, Sequence[Row]]:
    """The test part under every method, by weights fitted on the validation part."""
    assert isinstance(task, InternetQa)
    lm = _parameters(config.lm)
    parameters = lm, _parameters(config.rerank_lm) if has_rerank_lm(config) else lm
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
    data, num_passages = config.data, max(method.k for method in methods)
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
