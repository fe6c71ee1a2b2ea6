"""Answer questions from searched passages (Lazaridou et al. 2022): closed book, with gold evidence, by rerankers.

Passages for every question are retrieved first, from the web or a corpus. One pass over the questions then serves all
methods: a method that reads N passages uses the candidates and factors of the first N.

A row of outcomes.jsonl holds the answers of `none` and `gold`, and under `passages` the factors of all candidates. Then
weights are fitted on the validation part, and every reranker chooses its answers without another request to the LM. The
results are of the test part; the entry `validation` of each reranking method has the fitted weights, the number of
questions, and the metric on the validation part with fitted and with default weights.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

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
from replug.answering.prompts import AnswerPrompts, FittingPrompts, Shot
from replug.config.errors import UserError, require_extra
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import BM25, GOLD, NONE, REPLUG, Method
from replug.config.rules import evaluation_methods
from replug.data.answers import exact_match, has_answer, normalize_answer, token_f1
from replug.data.files import write_json
from replug.data.progress import Progress
from replug.data.store import Corpus
from replug.evals.evidence import Evidence, EvidenceBook
from replug.evals.folder import EvaluationFolder
from replug.evals.internet_sets import (
    EXACT_MATCH,
    QUESTION_SETS,
    InternetQuestion,
    gold_evidence,
    is_validation,
    plan_questions,
)
from replug.evals.loop import Metric, Outcome, OutcomeFile, Outcomes, PromptedLM, Row, Task
from replug.evals.questions import DRAWS_QUESTIONS, DROPPED, dropped_shots, queries_of
from replug.evals.results import Results, main_metric
from replug.evals.tables import Block, Blocks, Table
from replug.models.ensemble import Retrieved
from replug.models.lm_source import LMSource
from replug.web import require_web
from replug.web.passages import MAX_PASSAGES, FoundEvidence, Passage, found_in_documents

log = logging.getLogger(__name__)

LOCAL, SEARCH = "local", "search"  # an engine, and the name of its search
PASSAGES = "passages"  # the name of an outcome
# `answer_in_evidence`: a passage has an accepted answer; `copied`: a passage has the prediction. Not for labels.
# `answer_in_pages`: a whole page has an accepted answer.
# `best_candidate`: the upper bound of all rerankers.
# `gold_overlap`: the largest share of the gold evidence's words in a passage, for labelled questions with evidence.
FREE_ANSWER_METRICS = ("f1", "answer_in_evidence", "answer_in_pages", "copied")
OTHER_METRICS = ("best_candidate", "gold_overlap", "retrieval_recall", "passages", "shots")
HAS_EVIDENCE = "has_evidence"
SHOWN_OF_PASSAGES = ("url", "title", "fetched", "rank", "cosine", "probability", "doc_id")  # the snapshot has the texts


class InternetQa(Task):
    """Open-domain questions answered from searched passages: sample candidates, then score their factors.

    `found` holds the passages; `evidence` is unused. `gold` is the gold evidence by question id, for the method `gold`.
    `in_pages` are the ids of questions with an accepted answer in a whole page.
    """

    reads = (
        *(*DRAWS_QUESTIONS, "questions.dataset", "questions.demonstrations", "questions.shots"),
        *("questions.max_new_tokens", "web", "rerank_lm"),
    )
    asks_twice = True

    def __init__(
        self,
        methods: Sequence[Method],
        questions: Sequence[InternetQuestion],
        shots: Sequence[Shot],
        metric: str,
        gold: Mapping[str, str],
        max_new_tokens: int,
        seed: int = 0,
    ) -> None:
        self.questions, self.shots, self.metric, self.gold = questions, shots, metric, gold
        self.examples = [question.example for question in questions]
        self._methods, self._max_new_tokens, self._seed = methods, max_new_tokens, seed
        self._reranking = [method for method in methods if method.k]
        self._alone = {method.source for method in methods if not method.k}
        self._num_passages = max(method.k for method in methods)  # the most that any method reads
        self._searched: Sequence[Method] = ()  # the corpus search for passages
        self.found: Mapping[str, FoundEvidence] = {}
        self.in_pages: set[str] = set()
        names = (*(FREE_ANSWER_METRICS if metric == EXACT_MATCH else ()), *OTHER_METRICS)
        self.metrics = {
            metric: Metric(metric),
            **{name: Metric(name, may_be_unknown=name != "f1") for name in names},
            "gold_overlap": Metric("gold_overlap", HAS_EVIDENCE, may_be_unknown=True),
        }

    @classmethod
    def problems(cls, config: EvaluationConfig, methods: Sequence[Method]) -> Iterator[str]:
        names = ", ".join(QUESTION_SETS)
        if config.questions.dataset not in QUESTION_SETS:
            yield f"questions.dataset is {config.questions.dataset}; evaluation=internet_qa expects one of {names}"
        data, num_passages = config.data, max(method.k for method in methods)
        if num_passages and config.web.engine == LOCAL and not (data.corpus or data.prepared or data.source):
            yield "data.corpus is missing; web.engine=local expects documents to search in, another engine needs none"
        if num_passages > MAX_PASSAGES:
            yield f"methods: one reads {num_passages} passages; expected at most {MAX_PASSAGES}"

    @classmethod
    def searches(cls, config: EvaluationConfig) -> list[Method]:
        """Return the search of the local engine: by `retriever.path`, else by BM25. Empty for other engines."""
        if config.web.engine != LOCAL or not any(name not in (NONE, GOLD) for name in config.methods):
            return []
        return [Method(SEARCH, REPLUG if config.retriever.path else BM25, config.web.num_results, False)]

    @classmethod
    def of(cls, config: EvaluationConfig, corpus: Corpus | None, source: LMSource | None) -> Self:
        """Draw the questions. Web engines search here, before anything heavy starts."""
        keys, methods, store = config.questions, evaluation_methods(config), corpus.corpus if corpus else None
        reads = any(method.source != NONE for method in methods)
        measured, shots = plan_questions(keys, config.seed, with_evidence=reads)
        shown = gold_evidence(shots, store, "a shot (questions.shots)") if reads else {}
        asked_with_gold = measured if any(method.source == GOLD for method in methods) else []
        task = cls(
            methods,
            measured,
            [Shot(shot.example.query, shot.answers[0], shown.get(shot.example.id)) for shot in shots],
            QUESTION_SETS[str(keys.dataset)][0],
            gold_evidence(asked_with_gold, store, "the method gold"),
            keys.max_new_tokens,
            config.seed,
        )
        task._searched = cls.searches(config)
        task.queries = queries_of(config, task.examples)
        if task._reranking and config.web.engine == LOCAL:
            require_extra("web", "sentencex", "sklearn", what="web.engine=local")
        elif task._reranking:
            require_web("evaluation=internet_qa")
            from replug.web.evidence import EvidenceFinder

            snapshot = EvaluationFolder(Path(config.out).expanduser()).snapshot
            with closing(EvidenceFinder(config.web, snapshot)) as finder:
                task.take_evidence(map(finder.find, task.queries))
            task.queries = [""] * len(task.queries)
        return task

    def take_evidence(self, found: Iterable[FoundEvidence]) -> None:
        """Take the evidence of each question, in order. Pages are not kept in memory."""
        progress, kept = Progress("search", len(self.questions)), dict[str, FoundEvidence]()
        for question, evidence in zip(self.questions, found, strict=True):
            kept[question.example.id] = replace(evidence, pages=())
            if not question.labels and any(has_answer(page, question.answers) for page in evidence.pages):
                self.in_pages.add(question.example.id)
            progress.advance()
        self.found = kept
        if without := sum(not evidence.passages for evidence in kept.values()):
            log.warning(
                f"{without} of {len(kept)} questions have no passage, so reranking methods give no answer; "
                "the table has the reasons"
            )

    # Asking -------------------------------------------------------------------------------------------------------

    def open(self, lms: PromptedLM | None, book: EvidenceBook) -> None:
        from replug.models.build import counting_template  # brings torch: only once the configuration is checked

        super().open(lms, book)
        assert lms is not None
        for method in self._searched:
            documents = (documents_of(method, book, row) for row in range(len(self.queries)))
            pairs = zip(self.queries, documents, strict=True)
            self.take_evidence(found_in_documents(*pair, MAX_PASSAGES) for pair in pairs)
        scorer, whole = lms.reranker or lms, AnswerPrompts(self.shots)
        labels = self.questions[0].labels
        self._answerer = Answerer(lms.lm, scorer.lm, self._max_new_tokens, self._seed, labels)
        self._prompts = [
            FittingPrompts(whole, counting_template(one.source), self._max_new_tokens) for one in (lms, scorer)
        ]
        self._identities = {"lm": lms.lm.identity, "reranker": scorer.lm.identity}

    def compared(self, row: int) -> tuple[str, ...]:
        question = self.questions[row]
        return question.example.query, *question.answers

    def passages(self, question: InternetQuestion) -> Sequence[Passage]:
        """Return the passages that any method reads."""
        return self.found[question.example.id].passages[: self._num_passages] if self._reranking else ()

    def submit(self, row: int, evidence: Mapping[str, Evidence]) -> Callable[[], Callable[[], Outcomes]]:
        question = self.questions[row]
        query, texts = question.example.query, {NONE: None, GOLD: self.gold.get(question.example.id)}
        prompts = {source: self._prompts[0].of(query, [texts[source]]) for source in texts if source in self._alone}
        alone = {source: self._answerer.submit_alone(query, texts[source], of) for source, of in prompts.items()}
        passages = self.passages(question)
        read = [passage.text for passage in passages]
        fitting = [prompts.of(query, read) for prompts in self._prompts] if self._reranking else []
        sampled = self._answerer.submit(query, passages, *fitting) if self._reranking else None

        def outcomes(reranked: Callable[[], Factors] | None) -> Outcomes:
            alone_outcomes = {}
            for source, wait in alone.items():
                logprobs = wait()
                answer = best_answer(logprobs)
                numbers = self.answer_numbers(answer, question) | self._shots([prompts[source]])
                detail = {"answer": answer, "candidates": best_first(logprobs), "documents": [], "weights": []}
                alone_outcomes[source] = Outcome(numbers, detail)
            if reranked is None:
                return alone_outcomes
            by_method = self.reranked_outcomes(question, passages, reranked())
            for method in self._reranking:
                by_method[method.name].numbers.update(self._shots(fitting))
            return {**alone_outcomes, **by_method}

        return lambda: partial(outcomes, sampled() if sampled else None)

    def shown(self, row: int, method: str, evidence: Evidence) -> dict[str, Any]:
        question = self.questions[row]
        passages = self.passages(question) if method not in (NONE, GOLD) else ()
        texts: list[str | None] = [passage.text for passage in passages]
        texts = texts or [self.gold[question.example.id] if method == GOLD else None]
        prompt = self._prompts[0].of(question.example.query, texts).ask(question.example.query, texts[0])
        return {"references": list(question.answers), "prompt": prompt}

    def _shots(self, prompts: Sequence[AnswerPrompts]) -> dict[str, float]:
        """Return the numbers of kept and dropped shots, for the LM (answering or reranking) that drops more."""
        dropped = max(fitting.num_dropped(one) for fitting, one in zip(self._prompts, prompts, strict=False))
        return {"shots": float(len(self.shots) - dropped), DROPPED: float(dropped)}

    # Outcomes -----------------------------------------------------------------------------------------------------

    def answer_numbers(self, answer: str, question: InternetQuestion) -> dict[str, float]:
        """Return the metrics that depend on the answer alone."""
        f1 = token_f1(answer, question.answers) if answer else 0.0
        return {self.metric: gain(answer, question), **({"f1": f1} if self.metric == EXACT_MATCH else {})}

    def reranked_outcomes(self, question: InternetQuestion, passages: Sequence[Passage], factors: Factors) -> Outcomes:
        """Return the weight-independent numbers of each reranking method, and under PASSAGES the factors."""
        name, texts = question.example.id, [passage.text for passage in passages]
        holds_answer = [has_answer(text, question.answers) for text in texts]
        outcomes = {}
        for method in self._reranking:
            read, first = factors.of_first(method.k), passages[: method.k]
            gains = [gain(answer, question) for answer in read.distinct]
            numbers = {"best_candidate": max(gains, default=0.0), "passages": float(len(first))}
            if self.metric == EXACT_MATCH:
                numbers["answer_in_evidence"] = float(any(holds_answer[: method.k]))
                numbers["answer_in_pages"] = float(name in self.in_pages)
            elif name in self.gold:  # a claim without evidence has the evidence of another
                has_own = bool(question.evidence or question.evidence_ids)
                overlap = gold_overlap(self.gold[name], texts[: method.k]) if has_own else 0.0
                numbers |= {"gold_overlap": overlap, HAS_EVIDENCE: float(has_own)}
            gold, ids = set(question.example.gold), [passage.doc_id for passage in first]
            if gold and None not in ids:  # unknown without gold ids or document ids
                numbers["retrieval_recall"] = len(gold.intersection(ids)) / len(gold)
            documents = [passage.doc_id or passage.url for passage in first]
            detail = {"documents": documents, "weights": [passage.probability for passage in first]}
            outcomes[method.name] = Outcome(numbers, detail)
        detail = {
            "factors": factors_as_json(factors),
            "held_by": {answer: [has_answer(text, [answer]) for text in texts] for answer in factors.distinct},
            "passages": [{name: getattr(passage, name) for name in SHOWN_OF_PASSAGES} for passage in passages],
            "failures": dict(self.found[name].failures),
        }
        return {**outcomes, PASSAGES: Outcome({}, detail)}

    def settle(self, rows: Sequence[Row], folder: EvaluationFolder) -> list[Row]:
        """Fit weights on the validation part; keep the test part, and return its rows with every method's answers.

        Raises UserError if the test part is empty.
        """
        test: list[tuple[InternetQuestion, Row, Factors | None]] = []
        validation: list[tuple[InternetQuestion, Row, Factors | None]] = []
        for question, row in zip(self.questions, rows, strict=True):
            factors = read_factors(row["methods"][PASSAGES]["detail"]["factors"]) if self._reranking else None
            (validation if is_validation(question) else test).append((question, row, factors))
        if not test:
            raise UserError(
                f"all {len(rows)} questions are in the validation part, which weights are fitted on; expected more "
                "(questions.max_questions)"
            )
        fitted: dict[str, dict[str, Any]] = {}
        for method in self._reranking:
            graded = []
            for question, _, factors in validation:
                assert factors is not None
                read = factors.of_first(method.k)
                graded.append((read, {answer: gain(answer, question) for answer in read.distinct}))
            weights, best, default = fit_weights(RERANKERS[method.source], graded)
            gains = {"gain": best, "default_gain": default, "num_questions": len(validation)}
            fitted[method.name] = {"weights": weights, **gains}
        write_json(folder.weights, {"format": 1, **self._identities, "methods": fitted})
        decided = []
        for question, row, factors in test:
            outcomes = {method.name: row["methods"][method.name] for method in self._methods}
            for method in self._reranking:
                assert factors is not None
                scores = RERANKERS[method.source].score(factors.of_first(method.k), fitted[method.name]["weights"])
                answer, outcome = best_answer(scores), outcomes[method.name]
                numbers = self.answer_numbers(answer, question)
                if self.metric == EXACT_MATCH:
                    held_by = row["methods"][PASSAGES]["detail"]["held_by"].get(answer, [])
                    numbers["copied"] = float(any(held_by[: method.k]))
                detail = {"answer": answer, "candidates": best_first(scores), **outcome["detail"]}
                outcomes[method.name] = {"numbers": {**numbers, **outcome["numbers"]}, "detail": detail}
            decided.append({**row, "methods": outcomes})
        self.questions = [question for question, _, _ in test]
        self.examples = [question.example for question in self.questions]
        return decided

    def findings(self, rows: Sequence[Row], results: Results, folder: EvaluationFolder) -> Blocks:
        """Add the fitted weights to the results, and return their tables."""
        fitted: dict[str, dict[str, Any]] = json.loads(folder.weights.read_text())["methods"]
        for method, fit in fitted.items():
            value = {"value": fit["gain"], "n": fit["num_questions"]}
            results[method]["validation"] = {**value, "default": fit["default_gain"], "weights": fit["weights"]}
        failed = _failure_lines(OutcomeFile(folder.outcomes).rows)
        return [*dropped_shots(rows, results), *_weight_blocks(fitted, main_metric(results)), *failed]


def documents_of(method: Method, book: EvidenceBook, row: int) -> list[Retrieved]:
    """Return the documents of a method for an example, best first; for BM25 only documents with a positive score."""
    evidence = book.of(row)[method.name]
    rows = zip(book.ids(evidence.doc_rows), evidence.texts, book.similarities(method, row), strict=False)
    return [
        Retrieved(text, float(similarity), name)
        for name, text, similarity in rows
        if text is not None and (method.source != BM25 or similarity > 0)
    ]


def gold_overlap(gold: str, passages: Sequence[str]) -> float:
    """Return the largest share of the gold evidence's distinct words, without stop words, in one passage.

    This is the paper's "normalized word overlap" (section 4), which the paper does not define exactly.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    own, *others = (set(normalize_answer(text).split()) - ENGLISH_STOP_WORDS for text in (gold, *passages))
    return max((len(own & words) / max(1, len(own)) for words in others), default=0.0)


def factors_as_json(factors: Factors) -> dict[str, Any]:
    """Return the exact factors as lists; null stands for minus infinity, which JSON lacks."""
    arrays = {name: getattr(factors, name) for name in FACTORS}
    lists = {name: np.where(np.isneginf(array), np.array(None), array).tolist() for name, array in arrays.items()}
    return {"answers": list(factors.answers), "from": factors.passages.tolist(), **lists}


def read_factors(content: Mapping[str, Any]) -> Factors:
    """Return the factors from the output of `factors_as_json`."""

    def array(values: list) -> np.ndarray:
        numbers = np.array(values, dtype=np.float64)  # null becomes NaN, which no factor has
        return np.where(np.isnan(numbers), -np.inf, numbers)

    of_names = {name: array(content[name]) for name in FACTORS}
    passages = np.array(content["from"], dtype=np.int64)
    return Factors(tuple(content["answers"]), passages, **of_names)


def gain(answer: str, question: InternetQuestion) -> float:
    """Return the exact match of an answer; for a label this is accuracy."""
    return exact_match(answer, question.answers) if answer else 0.0


def best_first(scores: Mapping[str, float]) -> list[str]:
    """Return the answers, best score first."""
    return sorted(scores, key=lambda answer: -scores[answer])  # stable: among equals the first is the answer


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
        f"Weights are fitted on the validation part (n = {n}), which has none of the questions above.",
        Table([f"method, its {metric} there", "default weights", "fitted weights", "weights"], rows),
    ]


def _failure_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Count the failures of all questions, including the validation part."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["methods"][PASSAGES]["detail"]["failures"] if PASSAGES in row["methods"] else {})
    if not counts:
        return []
    named = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    return [f"Failed pages and searches, over {len(rows)} questions: {named}."]
