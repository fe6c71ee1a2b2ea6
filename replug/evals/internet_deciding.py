"""Decide what reranking methods answer: by weights that are fitted on the validation part, without asking an LM again.

An outcome under PASSAGES keeps the factors of all candidates of a question, which decide then.

Costs are calls of LMs, tokens and FLOP. Tokens are those of every prompt as it is put to an LM, its shots too: what a
server without a cache of prefixes reads and bills. An LM that reads a common beginning once, as local weights do, reads
far less. Prompts are counted by lines. FLOP are 2 x parameters x tokens read and written.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from replug.answering.answerer import Answered
from replug.answering.prompts import ANSWER, EVIDENCE, QUESTION, AnswerPrompts
from replug.answering.rerankers import (
    MIN_QUESTIONS,
    RERANKERS,
    Candidate,
    Factors,
    Reranker,
    best_answer,
    fit_weights,
    write_weights,
)
from replug.config.errors import UserError
from replug.config.rules import evaluation_methods
from replug.data.answers import exact_match, has_answer, normalize_answer, token_f1
from replug.data.files import replace_file
from replug.evals.charts import draw_costs, sweeps_of, to_svg
from replug.evals.evidence import Evidence
from replug.evals.few_shot import dropped_shots
from replug.evals.internet_sets import EXACT_MATCH, InternetQuestion, Prepared, is_validation
from replug.evals.kinds import Finished
from replug.evals.loop import Item, Metric, Outcome, Outcomes, Task
from replug.evals.outcomes import OutcomeFile, Row
from replug.evals.results import main_metric
from replug.evals.tables import Block, Table
from replug.models.lm_source import LMSource
from replug.models.pair_tokens import token_spans

PASSAGES = "passages"  # an outcome's name
# `answer_in_evidence`: a passage has an accepted answer; `copied`: it has the prediction. No passage has a label.
# `answer_in_pages`: a page of the engine has one, whether or not the passages that are read do.
# `best_candidate`: no reranker can be better.
# `gold_overlap`: the largest share of the gold evidence's words that a passage has, where answers are labels; of claims
# that have evidence.
FREE_ANSWER_METRICS = ("f1", "answer_in_evidence", "answer_in_pages", "copied")
OTHER_METRICS = (
    "best_candidate", "gold_overlap", "retrieval_recall", "passages", "shots",
    "lm_calls", "prompt_tokens", "generated_tokens", "flop",
)  # fmt: skip
HAS_EVIDENCE = "has_evidence"
FACTORS = ("answer_given_question", "question_given_answer", "answer_alone", "question_alone", "passage")


# Costs ---------------------------------------------------------------------------------------------------------------

NumTokens = Callable[[str], int]
Parameters = tuple[float | None, float | None]  # of the LM that answers and of the one that reranks; None means unknown
FLOP_PER_PARAMETER = 2.0
COUNTED_TEXTS = 1024  # whose numbers of tokens are kept, such as the openings of prompts


def cost_numbers(parameters: Parameters, calls: int, read: int, written: int, scored: int = 0) -> dict[str, float]:
    """Return the costs of one question by metric; FLOP only where the sizes of both LMs are known.

    The LM that answers reads and writes tokens, the one that reranks scores tokens.
    """
    numbers = {
        "lm_calls": float(calls),
        "prompt_tokens": float(read + scored),
        "generated_tokens": float(written),
    }
    answering, reranking = parameters
    if answering is None or reranking is None:
        return numbers
    return {**numbers, "flop": FLOP_PER_PARAMETER * ((read + written) * answering + scored * reranking)}


@dataclass(frozen=True, slots=True)
class LineTokens:
    """Tokens of the parts of a question's prompts by one tokenizer: the shots, the question, [P] passages, answers."""

    opening: int
    question: int
    passages: Sequence[int]
    answers: Mapping[str, int]


def line_tokens(
    count: NumTokens, prompts: AnswerPrompts, question: str, passages: Sequence[str], answers: Sequence[str]
) -> LineTokens:
    """Count the tokens of a question's lines; an answer's with the end of its line."""
    return LineTokens(
        count(prompts.opening(has_evidence=True)),
        count(question_line(question)),
        [count(evidence_line(text)) for text in passages],
        {answer: count(f" {answer}\n") for answer in answers},
    )


def question_line(text: str) -> str:
    """Return a question with the label of its answer, which every prompt has."""
    return f"{QUESTION}: {text}\n{ANSWER}:"


def evidence_line(text: str) -> str:
    return f"{EVIDENCE}: {text}\n"


def reranking_costs(
    reranker: Reranker,
    factors: Factors,
    answering: LineTokens,
    scored: LineTokens,
    written: Sequence[int],
    candidates: Sequence[Candidate],
) -> tuple[int, int, int, int]:
    """Return calls, and tokens read, written and scored, for candidates from the passages that the factors have.

    `written` [P] tokens were sampled from each passage; empty in classification, where nothing is sampled. The LM that
    answers reads candidates without a log-prob of their own too: labels, and samples that were cut. `answering` and
    `scored` are by the tokenizers of the LM that answers and of the one that reranks.
    """
    num_passages = len(factors.question_alone)
    calls, tokens = _scored(reranker, factors, scored)
    own = [one for one in candidates if one.logprob is None and one.passage < num_passages]
    lengths = [answering.passages[one.passage] + answering.answers[one.text] for one in own]
    lengths += answering.passages[:num_passages] if written else []
    read = sum(lengths) + len(lengths) * (answering.opening + answering.question)
    return calls + len(lengths), read, sum(written[:num_passages]), tokens


def _scored(reranker: Reranker, factors: Factors, lines: LineTokens) -> tuple[int, int]:
    """Return how many texts the LM that reranks scores, and their tokens."""
    before = [lines.opening + lines.passages[place] for place in range(len(factors.question_alone))]
    calls, tokens = 0, 0
    for answer, place in zip(factors.answers, factors.passages, strict=True):
        answered = before[place] + lines.answers[answer]
        lengths = {"question_given_answer": answered + lines.question, "answer_alone": answered}
        used = [length for name, length in lengths.items() if name in reranker.factors]
        calls, tokens = calls + len(used), tokens + sum(used)
    if "question_alone" in reranker.factors:
        calls += len(before)
        tokens += sum(before) + lines.question * len(before)
    return calls, tokens


def token_counter(source: LMSource | None) -> NumTokens | None:
    """Return a function that counts the tokens of a text; None means that the LM's tokenizer is unknown."""
    tokenizer = source.tokenizer() if source else None
    if tokenizer is None:
        return None
    return lru_cache(COUNTED_TEXTS)(lambda text: len(token_spans(tokenizer, text)))


# Outcomes ------------------------------------------------------------------------------------------------------------


def metrics_of(metric: str) -> dict[str, Metric]:
    """Return all metrics of a set whose answers are judged by this one."""
    names = (*(FREE_ANSWER_METRICS if metric == EXACT_MATCH else ()), *OTHER_METRICS)
    metrics = {metric: Metric(metric), **{name: Metric(name, may_be_unknown=name != "f1") for name in names}}
    return metrics | {"gold_overlap": Metric("gold_overlap", HAS_EVIDENCE, may_be_unknown=True)}


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
            numbers["answer_in_pages"] = float(question.example.id in prepared.in_pages)
        elif question.example.id in prepared.gold:  # of another claim, where nothing is evidence of this one
            has_own = bool(question.evidence or question.evidence_ids)
            overlap = gold_overlap(prepared.gold[question.example.id], texts[: method.k]) if has_own else 0.0
            numbers |= {"gold_overlap": overlap, HAS_EVIDENCE: float(has_own)}
        gold, ids = set(question.example.gold), [passage.doc_id for passage in passages]
        if gold and None not in ids:  # unknown where the set names none, or the engine's documents have no ids
            numbers["retrieval_recall"] = len(gold.intersection(ids)) / len(gold)
        if len(lines) == 2:
            drawn = answered.written_tokens, answered.candidates
            costs = reranking_costs(RERANKERS[method.source], read, lines[0], lines[1], *drawn)
            numbers |= cost_numbers(parameters, *costs)
        documents = [passage.doc_id or passage.url for passage in passages]
        detail = {"documents": documents, "weights": [passage.probability for passage in passages]}
        outcomes[method.name] = Outcome(numbers, detail)
    held_by = {answer: [has_answer(text, [answer]) for text in texts] for answer in factors.distinct}
    kept = ("url", "title", "fetched", "rank", "cosine", "probability", "doc_id")  # the snapshot has the texts
    shown = [{name: getattr(passage, name) for name in kept} for passage in answered.passages]
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
                detail = {"answer": answer, "candidates": best_first(scores), **outcome["detail"]}
                outcome = {"numbers": {**numbers, **outcome["numbers"]}, "detail": detail}
            outcomes[method.name] = outcome
        decided.append({**row, "methods": outcomes})
    return TestPart([question.example for question, _, _ in test], metrics_of(prepared.metric), whole), decided


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
