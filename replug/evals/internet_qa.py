"""Answer questions from searched passages (Lazaridou et al. 2022): closed book, with gold evidence, by rerankers.

Every question is searched for before the LM is opened, on the web or in a corpus. One pass over the questions then
measures what all methods need: a method that reads N passages has the candidates and factors of the first N.

A row of outcomes.jsonl holds the answers of `none` and `gold`, and under `passages` the factors of all candidates. When
all is measured, weights are fitted on the validation part, and every method is decided by them without asking again.
The results are of the test part; an entry `validation` of each method that reranks says which weights were fitted, on
how many questions, and what the metric was there with them and with the default weights.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from replug.answering.answerer import (
    FACTORS,
    MIN_QUESTIONS,
    RERANKERS,
    Answerer,
    Factors,
    best_answer,
    fit_weights,
)
from replug.answering.prompts import AnswerPrompts, FittingPrompts
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import BM25, GOLD, NONE, REPLUG, Method
from replug.data.answers import exact_match, has_answer, normalize_answer, token_f1
from replug.data.files import write_json
from replug.data.progress import Progress
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.few_shot import DROPPED, dropped_shots
from replug.evals.folder import EvaluationFolder
from replug.evals.internet_sets import (
    EXACT_MATCH,
    QUESTION_SETS,
    InternetQuestion,
    Prepared,
    is_validation,
    prepare,
)
from replug.evals.kinds import DRAWS_QUESTIONS, EvalDataset, EvaluationKind, Finished, PromptedLM
from replug.evals.loop import Metric, Outcome, OutcomeFile, Outcomes, Row, Task
from replug.evals.questions import queries_of
from replug.evals.results import main_metric
from replug.evals.tables import Block, Table
from replug.models.ensemble import Retrieved
from replug.web import require_web
from replug.web.records import FoundEvidence, Passage

log = logging.getLogger(__name__)

LOCAL, SEARCH = "local", "search"  # an engine; what is found by it
PASSAGES = "passages"  # an outcome's name
# `answer_in_evidence`: a passage has an accepted answer; `copied`: it has the prediction. No passage has a label.
# `answer_in_pages`: a page of the engine has one, whether or not the passages that are read do.
# `best_candidate`: no reranker can be better.
# `gold_overlap`: the largest share of the gold evidence's words that a passage has, where answers are labels; of claims
# that have evidence.
FREE_ANSWER_METRICS = ("f1", "answer_in_evidence", "answer_in_pages", "copied")
OTHER_METRICS = ("best_candidate", "gold_overlap", "retrieval_recall", "passages", "shots")
HAS_EVIDENCE = "has_evidence"


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
        return InternetQa(found, prompted, config.questions.max_new_tokens, config.seed)

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
        log.warning(
            f"{without} of {len(found)} questions have no passage, so methods that rerank answer them with nothing; "
            "the table says why"
        )
    return replace(prepared, found=found, in_pages=in_pages)


# Asking -----------------------------------------------------------------------------------------------------------


class InternetQa(Task):
    """Reads nothing of `evidence`: its passages were searched for before. Candidates come first, then their factors."""

    asks_twice = True

    def __init__(self, prepared: Prepared, prompted: PromptedLM, max_new_tokens: int, seed: int) -> None:
        self.prepared, scorer = prepared, prompted.reranker or prompted
        self._reranking = [method for method in prepared.methods if method.k]
        self._alone = {method.source for method in prepared.methods if not method.k}
        self._answerer = Answerer(prompted.lm, scorer.lm, max_new_tokens, seed, prepared.labels)
        from replug.models.build import counting_template  # brings torch: only once the configuration is checked

        whole = AnswerPrompts(prepared.shots)
        self._prompts = [
            FittingPrompts(whole, counting_template(one.source), max_new_tokens) for one in (prompted, scorer)
        ]
        self.lm, self.reranker = prompted.lm.identity, scorer.lm.identity
        self.examples = [question.example for question in prepared.questions]
        self.metrics: Mapping[str, Metric] = metrics_of(prepared.metric)

    def of(self, questions: Sequence[InternetQuestion]) -> "InternetQa":
        """Return the task of some of its questions."""
        task = copy(self)
        task.prepared = replace(self.prepared, questions=tuple(questions))
        task.examples = [question.example for question in questions]
        return task

    def compared(self, row: int) -> tuple[str, ...]:
        question = self.prepared.questions[row]
        return question.example.query, *question.answers

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Callable[[], Outcomes]]:
        question, prepared = self.prepared.questions[row], self.prepared
        query, texts = question.example.query, {NONE: None, GOLD: prepared.gold.get(question.example.id)}
        prompts = {source: self._prompts[0].of(query, [texts[source]]) for source in texts if source in self._alone}
        alone = {source: self._answerer.submit_alone(query, texts[source], of) for source, of in prompts.items()}
        passages = prepared.passages(question) if self._reranking else ()
        read = [passage.text for passage in passages]
        fitting = [prompts.of(query, read) for prompts in self._prompts] if self._reranking else []
        sampled = self._answerer.submit(query, passages, *fitting) if self._reranking else None

        def outcomes(reranked: Callable[[], Factors] | None) -> Outcomes:
            alone_outcomes = {}
            for source, wait in alone.items():
                logprobs = wait()
                answer = best_answer(logprobs)
                numbers = answer_numbers(prepared.metric, answer, question) | self._shots([prompts[source]])
                detail = {"answer": answer, "candidates": best_first(logprobs), "documents": [], "weights": []}
                alone_outcomes[source] = Outcome(numbers, detail)
            if reranked is None:
                return alone_outcomes
            by_method = reranked_outcomes(prepared, question, passages, reranked())
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

    def _shots(self, prompts: Sequence[AnswerPrompts]) -> dict[str, float]:
        """Return how many shots the prompts of the LM that answers, or else of the one that reranks, have and lack."""
        dropped = max(fitting.num_dropped(one) for fitting, one in zip(self._prompts, prompts, strict=False))
        return {"shots": float(len(self.prepared.shots) - dropped), DROPPED: float(dropped)}


# Outcomes ------------------------------------------------------------------------------------------------------------


def metrics_of(metric: str) -> dict[str, Metric]:
    """Return all metrics of a set whose answers are judged by this one."""
    names = (*(FREE_ANSWER_METRICS if metric == EXACT_MATCH else ()), *OTHER_METRICS)
    metrics = {metric: Metric(metric), **{name: Metric(name, may_be_unknown=name != "f1") for name in names}}
    return metrics | {"gold_overlap": Metric("gold_overlap", HAS_EVIDENCE, may_be_unknown=True)}


def reranked_outcomes(
    prepared: Prepared, question: InternetQuestion, passages: Sequence[Passage], factors: Factors
) -> Outcomes:
    """Return the numbers of each reranking method that no weights change, and under PASSAGES the factors."""
    texts = [passage.text for passage in passages]
    holds_answer = [has_answer(text, question.answers) for text in texts]
    outcomes = {}
    for method in (method for method in prepared.methods if method.k):
        read, first = factors.of_first(method.k), passages[: method.k]
        gains = [gain(answer, question) for answer in read.distinct]
        numbers = {"best_candidate": max(gains, default=0.0), "passages": float(len(first))}
        if prepared.metric == EXACT_MATCH:
            numbers["answer_in_evidence"] = float(any(holds_answer[: method.k]))
            numbers["answer_in_pages"] = float(question.example.id in prepared.in_pages)
        elif question.example.id in prepared.gold:  # of another claim, where nothing is evidence of this one
            has_own = bool(question.evidence or question.evidence_ids)
            overlap = gold_overlap(prepared.gold[question.example.id], texts[: method.k]) if has_own else 0.0
            numbers |= {"gold_overlap": overlap, HAS_EVIDENCE: float(has_own)}
        gold, ids = set(question.example.gold), [passage.doc_id for passage in first]
        if gold and None not in ids:  # unknown where the set names none, or the engine's documents have no ids
            numbers["retrieval_recall"] = len(gold.intersection(ids)) / len(gold)
        documents = [passage.doc_id or passage.url for passage in first]
        detail = {"documents": documents, "weights": [passage.probability for passage in first]}
        outcomes[method.name] = Outcome(numbers, detail)
    held_by = {answer: [has_answer(text, [answer]) for text in texts] for answer in factors.distinct}
    kept = ("url", "title", "fetched", "rank", "cosine", "probability", "doc_id")  # the snapshot has the texts
    shown = [{name: getattr(passage, name) for name in kept} for passage in passages]
    failures = dict(prepared.found[question.example.id].failures)
    detail = {"factors": factors_as_json(factors), "held_by": held_by, "passages": shown, "failures": failures}
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


def gain(answer: str, question: InternetQuestion) -> float:
    """Return exact match; for a label this is accuracy."""
    return exact_match(answer, question.answers) if answer else 0.0


def answer_numbers(metric: str, answer: str, question: InternetQuestion) -> dict[str, float]:
    """Return the metrics of an answer alone."""
    if metric != EXACT_MATCH:
        return {metric: gain(answer, question)}
    return {metric: gain(answer, question), "f1": token_f1(answer, question.answers) if answer else 0.0}


def best_first(scores: Mapping[str, float]) -> list[str]:
    """Return the answers, the likeliest first."""
    return sorted(scores, key=lambda answer: -scores[answer])  # stable: the first of equals is the answer


def decide(
    prepared: Prepared, rows: Sequence[Row], path: Path, lm: str, reranker: str
) -> tuple[list[InternetQuestion], list[Row]]:
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
        gains = {"gain": best, "default_gain": default, "num_questions": len(validation)}
        fitted[method.name] = {"weights": weights, **gains}
    write_json(path, {"format": 1, "lm": lm, "reranker": reranker, "methods": fitted})
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
                detail = {"answer": answer, "candidates": best_first(scores), **outcome["detail"]}
                outcome = {"numbers": {**numbers, **outcome["numbers"]}, "detail": detail}
            outcomes[method.name] = outcome
        decided.append({**row, "methods": outcomes})
    return [question for question, _, _ in test], decided


def add_internet_findings(finished: Finished) -> list[Block]:
    """Add to the results, and return tables of what was added."""
    results, folder = finished.results, finished.folder
    fitted: dict[str, dict[str, Any]] = json.loads(folder.weights.read_text())["methods"]
    for method, fit in fitted.items():
        value = {"value": fit["gain"], "n": fit["num_questions"]}
        results[method]["validation"] = {**value, "default": fit["default_gain"], "weights": fit["weights"]}
    failed = _failure_lines(OutcomeFile(folder.outcomes).rows)
    return [*dropped_shots(finished), *_weight_blocks(fitted, main_metric(results)), *failed]


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


def settle(
    config: EvaluationConfig, folder: EvaluationFolder, task: Task, rows: Sequence[Row]
) -> tuple[Task, Sequence[Row]]:
    assert isinstance(task, InternetQa)
    questions, decided = decide(task.prepared, rows, folder.weights, task.lm, task.reranker)
    return task.of(questions), decided


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
        *("questions.max_new_tokens", "web", "rerank_lm"),
    ),
    internet_problems,
    searches=searches,
    settle=settle,
    add_findings=add_internet_findings,
)
