"""Answer questions from searched passages (Lazaridou et al. 2022): closed book, with gold evidence, by rerankers.

Every question is searched for before the LM is opened, on the web or in a corpus. One pass over the questions then
measures what all methods need: a method that reads N passages has the candidates and factors of the first N.

A row of outcomes.jsonl holds the answers of `none` and `gold`, what each reranking method costs, and `passages`: the
factors of all candidates. When all is measured, weights are fitted on the validation part, and every method is decided
by them without asking again. The results are of the test part; an entry `validation` of each method that reranks says
which weights were fitted, on how many questions, and what the metric was there with them and with the default weights.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replug.answering.answerer import Answered, Answerer, AnsweringOptions
from replug.answering.factors import Factors
from replug.answering.few_shot import DROPPED
from replug.answering.prompts import AnswerPrompts
from replug.answering.rerankers import MIN_QUESTIONS, RERANKERS, best_answer, fit_weights, write_weights
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import BM25, GOLD, NONE, REPLUG, Method
from replug.config.rules import evaluation_methods, has_rerank_lm
from replug.config.schema import LMConfig
from replug.data.answers import exact_match, has_answer, normalize_answer, token_f1
from replug.data.files import replace_file
from replug.data.progress import Progress
from replug.data.store import Corpus
from replug.evals.charts import draw_costs, sweeps_of, to_svg
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.few_shot import dropped_shots
from replug.evals.folder import EvaluationFolder
from replug.evals.internet_costs import (
    FittingPrompts,
    LineCounter,
    LineTokens,
    Parameters,
    cost_numbers,
    reranking_costs,
)
from replug.evals.internet_sets import (
    EXACT_MATCH,
    QUESTION_SETS,
    InternetQuestion,
    Prepared,
    is_validation,
    prepare,
)
from replug.evals.kinds import EvalDataset, EvaluationKind, Finished, PromptedLM
from replug.evals.loop import Item, Metric, Outcome, Outcomes, Task
from replug.evals.outcomes import OutcomeFile, Row
from replug.evals.questions import queries_of, question_problems
from replug.evals.results import main_metric
from replug.evals.tables import Block, Table
from replug.planning.model_sizes import lm_size
from replug.web import require_web
from replug.web.records import EngineResult, FoundEvidence, SearchEngine

if TYPE_CHECKING:
    from replug.web.evidence import EvidenceFinder

log = logging.getLogger(__name__)

LOCAL, SEARCH, PASSAGES = "local", "search", "passages"  # an engine; what is found by it; an outcome's name
# `answer_in_evidence`: a passage has an accepted answer; `copied`: it has the prediction. No passage has a label.
# `best_candidate`: no reranker can be better.
# `gold_overlap`: the largest share of the gold evidence's words that a passage has, where answers are labels.
FREE_ANSWER_METRICS = ("f1", "answer_in_evidence", "copied")
OTHER_METRICS = (
    "best_candidate", "gold_overlap", "retrieval_recall", "passages", "shots",
    "lm_calls", "prompt_tokens", "generated_tokens", "flop",
)  # fmt: skip
FACTORS = ("answer_given_question", "question_given_answer", "answer_alone", "question_alone", "passage")


def metrics_of(metric: str) -> dict[str, Metric]:
    """Return all metrics of a set whose answers are judged by this one."""
    names = (*(FREE_ANSWER_METRICS if metric == EXACT_MATCH else ()), *OTHER_METRICS)
    return {metric: Metric(metric), **{name: Metric(name, may_be_unknown=name != "f1") for name in names}}


# Before the LM is opened ------------------------------------------------------------------------------------------


def internet_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Draw the questions; those of an engine on the web are searched for here, before anything heavy starts."""
    prepared = prepare(config, corpus.corpus if corpus else None)
    queries = queries_of(config, [question.example for question in prepared.questions])
    on_web = prepared.num_passages > 0 and config.web.engine != LOCAL
    if on_web:
        prepared = _with_evidence(config, prepared, queries)

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> InternetQa:
        assert asked is not None
        found = prepared
        for method in searches(config):
            found = _with_evidence(config, prepared, queries, CorpusEngine(method, book, queries))
        lm = _parameters(config.lm)
        parameters = lm, _parameters(config.rerank_lm) if has_rerank_lm(config) else lm
        return InternetQa(found, asked, config.questions.max_new_tokens, config.seed, parameters)

    return EvalDataset([""] * len(queries) if on_web else queries, make_task)


def _parameters(lm: LMConfig) -> float | None:
    """Return the size of an LM by a table or by its own files; None means that neither has it."""
    try:
        return float(lm_size(lm.path or lm.model or "").parameters)
    except UserError:
        return None


def searches(config: EvaluationConfig) -> list[Method]:
    """Return what the local engine searches by: `retriever.path` or else BM25. Empty for other engines."""
    if config.web.engine != LOCAL or not any(name not in (NONE, GOLD) for name in config.methods):
        return []
    return [Method(SEARCH, REPLUG if config.retriever.path else BM25, config.web.num_results, False)]


class CorpusEngine:
    """A `SearchEngine` over the documents that a method found for every query."""

    def __init__(self, method: Method, book: EvidenceBook, queries: Sequence[str]) -> None:
        self.identity = f"local {method.source}"
        self._results: dict[str, list[EngineResult]] = {}
        for row, query in enumerate(queries):
            evidence = book.of(row)[method.name]
            found = zip(book.ids(evidence.doc_rows), evidence.texts, book.similarities(method, row), strict=False)
            self._results[query] = [
                EngineResult(f"document:{name}", "", rank, text, name, float(similarity))
                for rank, (name, text, similarity) in enumerate(found, start=1)
                if method.source != BM25 or similarity > 0  # BM25 finds no word of the query in the others
            ]

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        return self._results[query][:num_results]


def _with_evidence(
    config: EvaluationConfig, prepared: Prepared, queries: Sequence[str], local: SearchEngine | None = None
) -> Prepared:
    require_web("evaluation=internet_qa")
    from replug.web.evidence import evidence_finder

    folder = EvaluationFolder(Path(config.out).expanduser())
    ids = [question.example.id for question in prepared.questions]
    with closing(evidence_finder(config.web, folder.snapshot, local)) as finder:
        return replace(prepared, found=find_for_all(finder, dict(zip(ids, queries, strict=True))))


def find_for_all(finder: "EvidenceFinder", queries: Mapping[str, str]) -> dict[str, FoundEvidence]:
    """Return the evidence of every question by its id, given what is searched for by id."""
    progress, found = Progress("search", len(queries)), {}
    for identifier, query in queries.items():
        found[identifier] = finder.find(query)
        progress.advance()
    without = sum(not evidence.passages for evidence in found.values())
    if without:
        counts = sum((Counter(evidence.failures) for evidence in found.values()), Counter())
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        log.warning(
            f"{without} of {len(found)} questions have no passage, so methods that rerank answer them with nothing"
            f"{f'; what went wrong: {reasons}' if reasons else ''}"
        )
    return found


# Asking -----------------------------------------------------------------------------------------------------------


class InternetQa(Task):
    """Reads nothing of `evidence`: its passages were searched for before."""

    def __init__(
        self, prepared: Prepared, asked: PromptedLM, max_new_tokens: int, seed: int, parameters: Parameters
    ) -> None:
        self.prepared, self._parameters, scorer = prepared, parameters, asked.reranker or asked
        self._reranking = [method for method in prepared.methods if method.k]
        self._alone = {method.source for method in prepared.methods if not method.k}
        rerankers = tuple(dict.fromkeys(method.source for method in self._reranking))
        self._options = AnsweringOptions(rerankers, max_new_tokens=max_new_tokens, seed=seed, labels=prepared.labels)
        self._lms = asked.lm, scorer.lm
        prompts = FittingPrompts(prepared, asked, max_new_tokens)
        self._prompts = prompts, FittingPrompts(prepared, scorer, max_new_tokens) if asked.reranker else prompts
        self.lm, self.reranker = asked.lm.identity, scorer.lm.identity
        counts = [one.num_tokens for one in self._prompts]
        self._counters = [LineCounter(count) for count in counts if count]  # both, or costs are unknown
        self.examples = [question.example for question in prepared.questions]
        self.metrics: Mapping[str, Metric] = metrics_of(prepared.metric)

    def compared(self, row: int) -> tuple[str, ...]:
        question = self.prepared.questions[row]
        return question.example.query, *question.answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Outcomes]:
        question, prepared = self.prepared.questions[row], self.prepared
        query, texts = question.example.query, {NONE: None, GOLD: prepared.gold.get(question.example.id)}
        prompts = {source: self._prompts[0].of(query, [texts[source]]) for source in texts if source in self._alone}
        alone = {source: self._answerer(of).submit_alone(query, texts[source]) for source, of in prompts.items()}
        passages = prepared.passages(question) if self._reranking else ()
        read = [passage.text for passage in passages]
        fitting = [prompts.of(query, read) for prompts in self._prompts] if self._reranking else []
        reranked = self._answerer(*fitting).submit(query, passages) if self._reranking else None

        def outcomes() -> Outcomes:
            alone_outcomes = {}
            for source, wait in alone.items():
                answered = wait()
                numbers = answer_numbers(prepared.metric, answered.answer, question)
                numbers |= self._costs_alone(prompts[source], query, texts[source], answered.written_tokens)
                numbers |= self._shots([prompts[source]])
                ranked = _best_first(answered.logprobs)
                detail = {"answer": answered.answer, "candidates": ranked, "documents": [], "weights": []}
                alone_outcomes[source] = Outcome(numbers, detail)
            if reranked is None:
                return alone_outcomes
            found = reranked()
            lines = [
                counter.lines(one, query, read, found.factors.distinct)
                for counter, one in zip(self._counters, fitting, strict=False)
            ]
            by_method = reranked_outcomes(prepared, question, found, lines, self._parameters)
            for method in self._reranking:
                by_method[method.name].numbers.update(self._shots(fitting))
            return {**alone_outcomes, **by_method}

        return outcomes

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        question = self.prepared.questions[row]
        passages = self.prepared.passages(question) if method not in (NONE, GOLD) else ()
        texts = [passage.text for passage in passages] or [
            self.prepared.gold[question.example.id] if method == GOLD else None
        ]
        prompt = self._prompts[0].of(question.example.query, texts).ask(question.example.query, texts[0])
        return {"references": list(question.answers), "prompt": prompt}

    def _answerer(self, prompts: AnswerPrompts, scorer_prompts: AnswerPrompts | None = None) -> Answerer:
        lm, scorer = self._lms
        return Answerer(lm, prompts, self._options, scorer, scorer_prompts)

    def _shots(self, prompts: Sequence[AnswerPrompts]) -> dict[str, float]:
        """Return how many shots the prompts of the LM that answers, or else of the one that reranks, have and lack."""
        dropped = max(fitting.num_dropped(one) for fitting, one in zip(self._prompts, prompts, strict=False))
        return {"shots": float(len(self.prepared.shots) - dropped), DROPPED: float(dropped)}

    def _costs_alone(self, prompts: AnswerPrompts, query: str, text: str | None, written: int) -> dict[str, float]:
        """Return the costs of samples, or of labels, which the LM that answers scores."""
        if len(self._counters) < 2:
            return {}
        asked, labels = self._counters[0], self.prepared.labels
        prompt = asked.alone(prompts, query, text)
        if not labels:
            return cost_numbers(self._parameters, 1, prompt, written)
        return cost_numbers(self._parameters, len(labels), prompt * len(labels) + sum(map(asked.answer, labels)), 0)


def reranked_outcomes(
    prepared: Prepared,
    question: InternetQuestion,
    answered: Answered,
    lines: Sequence[LineTokens],
    parameters: Parameters,
) -> Outcomes:
    """Return what is known of each reranking method before weights are fitted, and under PASSAGES what decides then.

    `lines` are by the tokenizers of the LM that answers and of the one that reranks; fewer mean that costs are unknown.
    """
    factors, texts = answered.factors, [passage.text for passage in answered.passages]
    holds_answer = [has_answer(text, question.answers) for text in texts]
    outcomes = {}
    for method in (method for method in prepared.methods if method.k):
        read, passages = factors.of_first(method.k), answered.passages[: method.k]
        gains = [gain(answer, question) for answer in read.distinct]
        numbers = {"best_candidate": max(gains, default=0.0), "passages": float(len(passages))}
        if prepared.metric == EXACT_MATCH:
            numbers["answer_in_evidence"] = float(any(holds_answer[: method.k]))
        elif question.example.id in prepared.gold:
            numbers["gold_overlap"] = gold_overlap(prepared.gold[question.example.id], texts[: method.k])
        gold, ids = set(question.example.gold), [passage.doc_id for passage in passages]
        if gold and None not in ids:  # unknown where the set names none, or the engine's documents have no ids
            numbers["retrieval_recall"] = len(gold.intersection(ids)) / len(gold)
        if len(lines) == 2:
            costs = reranking_costs(RERANKERS[method.source], read, lines[0], lines[1], answered.written_tokens)
            numbers |= cost_numbers(parameters, *costs)
        documents = [passage.doc_id or passage.url for passage in passages]
        detail = {"documents": documents, "weights": [passage.probability for passage in passages]}
        outcomes[method.name] = Outcome(numbers, detail)
    held_by = {answer: [has_answer(text, [answer]) for text in texts] for answer in factors.distinct}
    kept = ("url", "title", "fetched", "rank", "cosine", "probability", "doc_id")  # the snapshot has the texts
    found = [{name: getattr(passage, name) for name in kept} for passage in answered.passages]
    failures = dict(prepared.found[question.example.id].failures)
    detail = {"factors": factors_as_json(factors), "held_by": held_by, "passages": found, "failures": failures}
    return {**outcomes, PASSAGES: Outcome({}, detail)}


def gold_overlap(gold: str, passages: Sequence[str]) -> float:
    """Return the largest share of the gold evidence's distinct words, without stop words, that a passage has.

    The paper's "normalized word overlap" (section 4), which it defines no further.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    own, *others = (set(normalize_answer(text).split()) - ENGLISH_STOP_WORDS for text in (gold, *passages))
    return max((len(own & words) / max(1, len(own)) for words in others), default=0.0)


def factors_as_json(factors: Factors) -> dict[str, Any]:
    """Return the factors as lists, to the last bit; null is minus infinity, which JSON lacks."""
    arrays = {name: getattr(factors, name) for name in FACTORS}
    lists = {name: np.where(np.isneginf(array), np.array(None), array).tolist() for name, array in arrays.items()}
    return {"answers": list(factors.answers), "from": factors.passages.tolist(), **lists}


def read_factors(content: Mapping[str, Any]) -> Factors:
    """Return what `factors_as_json` was given."""

    def array(values: list) -> np.ndarray:
        numbers = np.array(values, dtype=np.float64)  # null is NaN here, which no factor is
        return np.where(np.isnan(numbers), -np.inf, numbers)

    of_names = {name: array(content[name]) for name in FACTORS}
    passages = np.array(content["from"], dtype=np.int64)
    return Factors(tuple(content["answers"]), passages, **of_names)


# Deciding ---------------------------------------------------------------------------------------------------------


def gain(answer: str, question: InternetQuestion) -> float:
    """Return exact match; for a label this is accuracy."""
    return exact_match(answer, question.answers) if answer else 0.0


def answer_numbers(metric: str, answer: str, question: InternetQuestion) -> dict[str, float]:
    if metric != EXACT_MATCH:
        return {metric: gain(answer, question)}
    return {metric: gain(answer, question), "f1": token_f1(answer, question.answers) if answer else 0.0}


def _best_first(scores: Mapping[str, float]) -> list[str]:
    return sorted(scores, key=lambda answer: -scores[answer])  # stable: the first of equals is the answer


class TestPart(Task):
    """The questions that methods are compared on, of all that `whole` has asked."""

    __test__ = False  # for pytest

    def __init__(self, examples: Sequence[Item], metrics: Mapping[str, Metric], whole: Task | None) -> None:
        self.examples, self.metrics, self._whole = examples, metrics, whole
        self._rows = {example.id: row for row, example in enumerate(whole.examples)} if whole else {}

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        return self._whole.shown(self._rows[self.examples[row].id], method, evidence) if self._whole else {}


def decide(
    prepared: Prepared, rows: Sequence[Row], path: Path, lm: str, reranker: str, whole: Task | None = None
) -> tuple[Task, list[Row]]:
    """Fit weights on the validation part and write them to `path`; return the test part with every method's answers.

    Raises UserError where no question is in the test part.
    """
    test: list[tuple[InternetQuestion, Row, Factors | None]] = []
    validation: list[tuple[InternetQuestion, Row, Factors | None]] = []
    for question, row in zip(prepared.questions, rows, strict=True):
        factors = read_factors(row["methods"][PASSAGES]["detail"]["factors"]) if prepared.num_passages else None
        (validation if is_validation(question) else test).append((question, row, factors))
    if not test:
        raise UserError(
            f"all {len(rows)} questions are in the validation part, which weights are fitted on; expected more "
            "(questions.max_questions)"
        )
    fitted: dict[str, dict[str, Any]] = {}
    for method in (method for method in prepared.methods if method.k):
        graded = []
        for question, _, factors in validation:
            assert factors is not None
            read = factors.of_first(method.k)
            graded.append((read, {answer: gain(answer, question) for answer in read.distinct}))
        weights, best, default = fit_weights(RERANKERS[method.source], graded)
        fitted[method.name] = {
            "weights": weights,
            "gain": best,
            "default_gain": default,
            "num_questions": len(validation),
        }
    write_weights(path, lm, reranker, fitted)
    decided = []
    for question, row, factors in test:
        outcomes = {}
        for method in prepared.methods:
            outcome = row["methods"][method.name]
            if method.k:
                assert factors is not None
                scores = RERANKERS[method.source].score(factors.of_first(method.k), fitted[method.name]["weights"])
                answer = best_answer(scores)
                numbers = answer_numbers(prepared.metric, answer, question)
                if prepared.metric == EXACT_MATCH:
                    held_by = row["methods"][PASSAGES]["detail"]["held_by"].get(answer, [])
                    numbers["copied"] = float(any(held_by[: method.k]))
                detail = {"answer": answer, "candidates": _best_first(scores), **outcome["detail"]}
                outcome = {"numbers": {**numbers, **outcome["numbers"]}, "detail": detail}
            outcomes[method.name] = outcome
        decided.append({**row, "methods": outcomes})
    return TestPart([question.example for question, _, _ in test], metrics_of(prepared.metric), whole), decided


def settle(
    config: EvaluationConfig, folder: EvaluationFolder, task: Task, rows: Sequence[Row]
) -> tuple[Task, Sequence[Row]]:
    assert isinstance(task, InternetQa)
    return decide(task.prepared, rows, folder.weights, task.lm, task.reranker, task)


def add_internet_findings(finished: Finished) -> list[Block]:
    """Add to the results, and return tables of what was added."""
    results, folder = finished.results, finished.folder
    metric = main_metric(results)
    fitted: dict[str, dict[str, Any]] = json.loads(folder.weights.read_text())["methods"]
    for method, fit in fitted.items():
        results[method]["validation"] = {
            "value": fit["gain"],
            "n": fit["num_questions"],
            "default": fit["default_gain"],
            "weights": fit["weights"],
        }
    if any("flop" in of for of in results.values()):
        sweeps = sweeps_of(evaluation_methods(finished.config), least=1)
        draw = partial(draw_costs, results=results, metric=metric, cost="flop", sweeps=sweeps)
        replace_file(folder.flop_figure, to_svg(draw, width=7, height=4).encode())
    return [
        *dropped_shots(finished),
        *_weight_blocks(fitted, metric),
        *_failure_lines(OutcomeFile(folder.outcomes).rows),
    ]


def _weight_blocks(fitted: dict[str, dict[str, Any]], metric: str) -> list[Block]:
    if not fitted:
        return []
    n = next(iter(fitted.values()))["num_questions"]
    if n < MIN_QUESTIONS:
        return [f"The validation part has {n} questions: with fewer than {MIN_QUESTIONS} rerankers have weights of 1."]
    rows = []
    for method, fit in fitted.items():
        weights = ", ".join(f"{name} {value:g}" for name, value in fit["weights"].items())
        rows.append([method, f"{fit['default_gain']:.3f}", f"{fit['gain']:.3f}", weights])
    return [
        f"Weights are fitted on the validation part (n = {n}), and on none of the questions above.",
        Table([f"method, its {metric} there", "default weights", "fitted weights", "weights"], rows),
    ]


def _failure_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Count what failed for all questions, those of the validation part too."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["methods"][PASSAGES]["detail"]["failures"] if PASSAGES in row["methods"] else {})
    if not counts:
        return []
    named = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    return [f"Pages and searches that gave nothing, over {len(rows)} questions: {named}."]


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
