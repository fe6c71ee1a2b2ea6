"""Answer questions from searched passages (Lazaridou et al. 2022): closed book, with gold evidence, by rerankers.

Every question is searched for before the LM is opened, on the web or in a corpus. One pass over the questions then
measures what all methods need: a method that reads N passages has the candidates and factors of the first N.

A row of outcomes.jsonl holds the answers of `none` and `gold`, what each reranking method costs, and `passages`: the
factors of all candidates. When all is measured, weights are fitted on the validation part, and every method is decided
by them without asking again. The results are of the test part; an entry `validation` of each method that reranks says
which weights were fitted, on how many questions, and what the metric was there with them and with the default weights.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from replug.answering.answerer import Answered, Answerer, AnsweringOptions
from replug.answering.prompts import AnswerPrompts, FittingPrompts
from replug.answering.rerankers import best_answer
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import BM25, GOLD, NONE, REPLUG, Method
from replug.config.rules import has_rerank_lm
from replug.data.answers import has_answer
from replug.data.progress import Progress
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.few_shot import DROPPED
from replug.evals.folder import EvaluationFolder
from replug.evals.internet_deciding import (
    Parameters,
    add_internet_findings,
    answer_numbers,
    best_first,
    cost_numbers,
    decide,
    evidence_line,
    line_tokens,
    metrics_of,
    question_line,
    reranked_outcomes,
    token_counter,
)
from replug.evals.internet_sets import QUESTION_SETS, Prepared, prepare
from replug.evals.kinds import DRAWS_QUESTIONS, EvalDataset, EvaluationKind, PromptedLM
from replug.evals.loop import Metric, Outcome, Outcomes, Task
from replug.evals.outcomes import Row
from replug.evals.questions import queries_of
from replug.models.ensemble import Retrieved
from replug.planning.model_sizes import known_parameters
from replug.web import require_web
from replug.web.records import FoundEvidence

log = logging.getLogger(__name__)

LOCAL, SEARCH = "local", "search"  # an engine; what is found by it


# Before the LM is opened ------------------------------------------------------------------------------------------


def internet_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Draw the questions; those of an engine on the web are searched for here, before anything heavy starts."""
    prepared = prepare(config, corpus.corpus if corpus else None)
    queries = queries_of(config, [question.example for question in prepared.questions])
    on_web = prepared.num_passages > 0 and config.web.engine != LOCAL
    if on_web:
        require_web("evaluation=internet_qa")
        from replug.web.evidence import evidence_finder

        snapshot = EvaluationFolder(Path(config.out).expanduser()).snapshot
        with closing(evidence_finder(config.web, snapshot)) as finder:
            prepared = with_evidence(prepared, map(finder.find, queries))

    def make_task(prompted: PromptedLM | None, book: EvidenceBook) -> InternetQa:
        assert prompted is not None
        found = prepared
        for method in searches(config):
            require_web("evaluation=internet_qa")
            from replug.web.evidence import found_in_documents

            documents = (documents_of(method, book, row) for row in range(len(queries)))
            pairs, most = zip(queries, documents, strict=True), config.web.max_passages
            found = with_evidence(prepared, (found_in_documents(*pair, most) for pair in pairs))
        lm = known_parameters(config.lm)
        parameters = lm, known_parameters(config.rerank_lm) if has_rerank_lm(config) else lm
        return InternetQa(found, prompted, config.questions.max_new_tokens, config.seed, parameters)

    return EvalDataset([""] * len(queries) if on_web else queries, make_task)


def searches(config: EvaluationConfig) -> list[Method]:
    """Return what the local engine searches by: `retriever.path` or else BM25. Empty for other engines."""
    if config.web.engine != LOCAL or not any(name not in (NONE, GOLD) for name in config.methods):
        return []
    return [Method(SEARCH, REPLUG if config.retriever.path else BM25, config.web.num_results, False)]


def documents_of(method: Method, book: EvidenceBook, row: int) -> list[Retrieved]:
    """Return the documents of a method for an example, best first; of BM25's those that share a word with it."""
    evidence = book.of(row)[method.name]
    rows = zip(book.ids(evidence.doc_rows), evidence.texts, book.similarities(method, row), strict=False)
    return [
        Retrieved(text, float(similarity), name)
        for name, text, similarity in rows
        if text is not None and (method.source != BM25 or similarity > 0)
    ]


def with_evidence(prepared: Prepared, evidence_of_questions: Iterable[FoundEvidence]) -> Prepared:
    """Return the questions with their evidence, in their order. Pages are not kept in memory."""
    progress, in_pages = Progress("search", len(prepared.questions)), set[str]()
    found: dict[str, FoundEvidence] = {}
    for question, evidence in zip(prepared.questions, evidence_of_questions, strict=True):
        found[question.example.id] = replace(evidence, pages=())
        if not question.labels and any(has_answer(page, question.answers) for page in evidence.pages):
            in_pages.add(question.example.id)
        progress.advance()
    without = sum(not evidence.passages for evidence in found.values())
    if without:
        counts = sum((Counter(evidence.failures) for evidence in found.values()), Counter())
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        log.warning(
            f"{without} of {len(found)} questions have no passage, so methods that rerank answer them with nothing"
            f"{f'; what went wrong: {reasons}' if reasons else ''}"
        )
    return replace(prepared, found=found, in_pages=in_pages)


# Asking -----------------------------------------------------------------------------------------------------------


class InternetQa(Task):
    """Reads nothing of `evidence`: its passages were searched for before. Candidates come first, then their factors."""

    asks_twice = True

    def __init__(
        self, prepared: Prepared, prompted: PromptedLM, max_new_tokens: int, seed: int, parameters: Parameters
    ) -> None:
        self.prepared, self._parameters, scorer = prepared, parameters, prompted.reranker or prompted
        self._reranking = [method for method in prepared.methods if method.k]
        self._alone = {method.source for method in prepared.methods if not method.k}
        rerankers = tuple(dict.fromkeys(method.source for method in self._reranking))
        self._options = AnsweringOptions(rerankers, max_new_tokens=max_new_tokens, seed=seed, labels=prepared.labels)
        self._lms = prompted.lm, scorer.lm
        from replug.models.build import counting_template  # brings torch: only once the configuration is checked

        whole = AnswerPrompts(prepared.shots, prepared.question_first)
        self._prompts = [
            FittingPrompts(whole, counting_template(one.source), max_new_tokens) for one in (prompted, scorer)
        ]
        self.lm, self.reranker = prompted.lm.identity, scorer.lm.identity
        counts = [token_counter(one.source) for one in (prompted, scorer)]
        self._counters = [count for count in counts if count]  # both, or costs are unknown
        self.examples = [question.example for question in prepared.questions]
        self.metrics: Mapping[str, Metric] = metrics_of(prepared.metric)

    def compared(self, row: int) -> tuple[str, ...]:
        question = self.prepared.questions[row]
        return question.example.query, *question.answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Callable[[], Outcomes]]:
        question, prepared = self.prepared.questions[row], self.prepared
        query, texts = question.example.query, {NONE: None, GOLD: prepared.gold.get(question.example.id)}
        prompts = {source: self._prompts[0].of(query, [texts[source]]) for source in texts if source in self._alone}
        alone = {source: self._answerer(of).submit_alone(query, texts[source]) for source, of in prompts.items()}
        passages = prepared.passages(question) if self._reranking else ()
        read = [passage.text for passage in passages]
        fitting = [prompts.of(query, read) for prompts in self._prompts] if self._reranking else []
        sampled = self._answerer(*fitting).submit(query, passages) if self._reranking else None

        def outcomes(reranked: Callable[[], Answered] | None) -> Outcomes:
            alone_outcomes = {}
            for source, wait in alone.items():
                logprobs, written, scored = wait()
                answer = best_answer(logprobs)
                numbers = answer_numbers(prepared.metric, answer, question)
                numbers |= self._costs_alone(prompts[source], query, texts[source], written, scored)
                numbers |= self._shots([prompts[source]])
                detail = {"answer": answer, "candidates": best_first(logprobs), "documents": [], "weights": []}
                alone_outcomes[source] = Outcome(numbers, detail)
            if reranked is None:
                return alone_outcomes
            found = reranked()
            lines = [
                line_tokens(count, one, query, read, found.factors.distinct)
                for count, one in zip(self._counters, fitting, strict=False)
            ]
            by_method = reranked_outcomes(prepared, question, found, lines, self._parameters)
            for method in self._reranking:
                by_method[method.name].numbers.update(self._shots(fitting))
            return {**alone_outcomes, **by_method}

        return lambda: partial(outcomes, sampled() if sampled else None)

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        question = self.prepared.questions[row]
        passages = self.prepared.passages(question) if method not in (NONE, GOLD) else ()
        texts: list[str | None] = [passage.text for passage in passages]
        texts = texts or [self.prepared.gold[question.example.id] if method == GOLD else None]
        prompt = self._prompts[0].of(question.example.query, texts).ask(question.example.query, texts[0])
        return {"references": list(question.answers), "prompt": prompt}

    def _answerer(self, prompts: AnswerPrompts, scorer_prompts: AnswerPrompts | None = None) -> Answerer:
        lm, scorer = self._lms
        return Answerer(lm, prompts, self._options, scorer, scorer_prompts)

    def _shots(self, prompts: Sequence[AnswerPrompts]) -> dict[str, float]:
        """Return how many shots the prompts of the LM that answers, or else of the one that reranks, have and lack."""
        dropped = max(fitting.num_dropped(one) for fitting, one in zip(self._prompts, prompts, strict=False))
        return {"shots": float(len(self.prepared.shots) - dropped), DROPPED: float(dropped)}

    def _costs_alone(
        self, prompts: AnswerPrompts, query: str, text: str | None, written: int, scored: Sequence[str]
    ) -> dict[str, float]:
        """Return the costs of samples, and of labels and cut samples, which the LM that answers scores."""
        if len(self._counters) < 2:
            return {}
        count, calls = self._counters[0], len(scored) + (not self.prepared.labels)
        prompt = count(prompts.opening(text is not None)) + count(question_line(query))
        prompt += 0 if text is None else count(evidence_line(text))
        read = prompt * calls + sum(count(f" {answer}\n") for answer in scored)
        return cost_numbers(self._parameters, calls, read, written)


def settle(
    config: EvaluationConfig, folder: EvaluationFolder, task: Task, rows: Sequence[Row]
) -> tuple[Task, Sequence[Row]]:
    assert isinstance(task, InternetQa)
    return decide(task.prepared, rows, folder.weights, task.lm, task.reranker, task)


def internet_problems(config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
    names = ", ".join(QUESTION_SETS)
    if config.questions.dataset not in QUESTION_SETS:
        yield f"questions.dataset is {config.questions.dataset}; evaluation=internet_qa expects one of {names}"
    data, num_passages = config.data, max(method.k for method in methods)
    if num_passages and config.web.engine == LOCAL and not (data.corpus or data.prepared or data.source):
        yield "data.corpus is missing; web.engine=local expects documents to search in, another engine needs none"
    if num_passages > config.web.max_passages:
        most = config.web.max_passages
        yield f"web.max_passages is {most}, but a method reads {num_passages}; expected as many or more"


EVALUATION = EvaluationKind(
    internet_dataset,
    (
        *(*DRAWS_QUESTIONS, "questions.dataset", "questions.demonstrations", "questions.shots"),
        *("questions.question_first", "questions.max_new_tokens", "web", "rerank_lm"),
    ),
    internet_problems,
    searches=searches,
    settle=settle,
    add_findings=add_internet_findings,
)
