"""What every method answers, from what was measured: weights are fitted on the validation part, the rest is decided.

A method that reads N passages has the candidates and factors of the first N of those that were found, so one pass
measures all of them. The rows that come out are of the test part alone.

The results get more than metrics: an entry `validation` of each method that reranks says which weights were fitted, on
how many questions, and what the metric was there with them and with the default weights. Entries of shares get
`wilson`. The table gets the weights and the failures of the search, and flop.svg is drawn.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from replug.answering.rerankers import (
    RERANKERS,
    FittedWeights,
    GradedQuestion,
    Weights,
    WeightsFile,
    best_answer,
    fit_weights,
)
from replug.config.errors import UserError
from replug.config.methods import Method
from replug.config.rules import evaluation_methods
from replug.data.files import replace_file
from replug.evals.answers import exact_match, token_f1
from replug.evals.comparison import add_wilson, main_metric, markdown_line
from replug.evals.figures import draw_costs, to_svg
from replug.evals.internet_costs import PASSAGES, AnswerCosts, MeasuredPassages, read_passages, reranked_costs
from replug.evals.internet_preparing import Prepared, is_validation
from replug.evals.internet_sets import EXACT_MATCH, InternetQuestion
from replug.evals.kinds import Finished
from replug.evals.loop import Item, Metric
from replug.evals.outcomes import OutcomeFile, Row
from replug.evals.results_files import sweeps_of

OF_FREE_ANSWERS = {
    "f1": Metric("f1"),
    "answer_in_evidence": Metric("answer_in_evidence", may_be_unknown=True),  # an accepted answer, in a passage
    "copied": Metric("copied", may_be_unknown=True),  # the prediction stands in a passage
}
OF_ALL = {
    "best_candidate": Metric("best_candidate", may_be_unknown=True),  # what no reranker can be better than
    "retrieval_recall": Metric("retrieval_recall", may_be_unknown=True),
    "passages": Metric("passages", may_be_unknown=True),
    "lm_calls": Metric("lm_calls", may_be_unknown=True),
    "prompt_tokens": Metric("prompt_tokens", may_be_unknown=True),
    "generated_tokens": Metric("generated_tokens", may_be_unknown=True),
    "flop": Metric("flop", may_be_unknown=True),
}

# Of the LM that answers and of the one that reranks; None where nothing tells them.
Parameters = tuple[float | None, float | None]


class DecidedAnswers:
    """A `Measured`: the test part. `metric` is what answers are judged by."""

    def __init__(self, examples: Sequence[Item], metric: str) -> None:
        self.examples = list(examples)
        self.metrics: Mapping[str, Metric] = {metric: Metric(metric), **metrics_beside(metric)}

    def groups(self, example: Item) -> tuple[str, ...]:
        return (example.group,)


def metrics_beside(metric: str) -> dict[str, Metric]:
    """Free answers have measures of their own: a label stands in no passage."""
    return {**(OF_FREE_ANSWERS if metric == EXACT_MATCH else {}), **OF_ALL}


def gain(answer: str, question: InternetQuestion) -> float:
    """Exact match; of a label, accuracy."""
    return exact_match(answer, question.answers) if answer else 0.0


def fit_all(methods: Sequence[Method], pairs: Sequence[tuple[InternetQuestion, Row]]) -> dict[str, FittedWeights]:
    """By reranking method, weights fitted on these questions alone, with as many passages as the method reads."""
    reranking = [method for method in methods if method.k]
    measured = [(question, _measured(row).factors) for question, row in pairs] if reranking else []
    fitted = {}
    for method in reranking:
        graded = []
        for question, factors in measured:
            read = factors.of_first(method.k)
            graded.append(GradedQuestion(read, {answer: gain(answer, question) for answer in read.distinct}))
        fitted[method.name] = fit_weights(RERANKERS[method.source], graded)
    return fitted


def decide(
    prepared: Prepared, rows: Sequence[Row], parameters: Parameters, file: WeightsFile
) -> tuple[DecidedAnswers, list[Row]]:
    """The test part with a row for each question, every method in it; the weights are written.

    Raises UserError where no question is of the test part.
    """
    pairs = list(zip(prepared.questions, rows, strict=True))
    fitted_on = [(question, row) for question, row in pairs if is_validation(question)]
    test = [(question, row) for question, row in pairs if not is_validation(question)]
    if not test:
        raise UserError(
            f"all {len(pairs)} questions are of the validation part, which weights are fitted on; expected more "
            "(questions.max_questions)"
        )
    fitted = fit_all(prepared.methods, fitted_on)
    file.write(fitted)
    weights = {name: one.weights for name, one in fitted.items()}
    decided = [_decided(prepared, question, row, parameters, weights) for question, row in test]
    return DecidedAnswers([question.example for question, _ in test], prepared.metric), decided


def _measured(row: Row) -> MeasuredPassages:
    return read_passages(row["methods"][PASSAGES]["detail"])


def _decided(
    prepared: Prepared,
    question: InternetQuestion,
    row: Row,
    parameters: Parameters,
    weights: Mapping[str, Weights],
) -> Row:
    """One question's outcomes by method; of what was measured, numbers of costs too where they are known."""
    measured = _measured(row) if prepared.num_passages else None
    outcomes = {}
    for method in prepared.methods:
        if measured is None or not method.k:
            alone = row["methods"][method.source]["detail"]
            detail = {"answer": alone["answer"], "documents": [], "weights": []}
            of_passages: dict[str, float] = {}
            costs = AnswerCosts(**alone["costs"]) if alone["costs"] is not None else None
        else:
            detail, of_passages, costs = _reranked(method, measured, question, weights[method.name])
        f1 = token_f1(detail["answer"], question.answers) if detail["answer"] else 0.0
        numbers = {prepared.metric: gain(detail["answer"], question), "f1": f1, **of_passages}
        numbers |= costs.numbers(*parameters) if costs else {}
        told = prepared.metric, *metrics_beside(prepared.metric)
        outcomes[method.name] = {
            "numbers": {name: value for name, value in numbers.items() if name in told},
            "detail": detail,
        }
    return {"id": row["id"], "group": row["group"], "methods": outcomes}


def _reranked(
    method: Method, measured: MeasuredPassages, question: InternetQuestion, weights: Weights
) -> tuple[dict[str, Any], dict[str, float], AnswerCosts | None]:
    """Return the answer with the passages that were read and their p_tfidf, numbers of these passages, and costs."""
    reranker, factors = RERANKERS[method.source], measured.factors.of_first(method.k)
    answer = best_answer(reranker.score(factors, weights))
    passages = measured.passages[: method.k]
    numbers = {
        "best_candidate": max((gain(one, question) for one in factors.distinct), default=0.0),
        "answer_in_evidence": float(any(row.holds_answer for row in passages)),
        "copied": float(measured.held_by.get(answer, len(passages)) < len(passages)),
        "passages": float(len(passages)),
    }
    gold, ids = set(question.example.gold), [row.doc_id for row in passages]
    if gold and None not in ids:  # unknown where the set names none, or the engine's documents have no ids
        numbers["retrieval_recall"] = len(gold.intersection(ids)) / len(gold)
    costs = None
    if measured.asked is not None and measured.scored is not None:
        costs = reranked_costs(reranker, factors, measured.asked, measured.scored, measured.written)
    documents, shares = [row.doc_id or row.url for row in passages], [row.probability for row in passages]
    return {"answer": answer, "documents": documents, "weights": shares}, numbers, costs


SHARES = ("exact_match", "accuracy", "answer_in_evidence", "copied", "best_candidate")


def add_internet_findings(finished: Finished) -> str:
    """Adds to the results, and returns tables of what was added."""
    results, folder = finished.results, finished.folder
    metric = main_metric(results)
    add_wilson(results, SHARES)
    fitted: dict[str, dict[str, Any]] = json.loads(folder.weights.read_text())["methods"]
    for method, one in fitted.items():
        results[method]["validation"] = {
            "value": one["gain"],
            "n": one["num_questions"],
            "default": one["default_gain"],
            "weights": one["weights"],
        }
    if any("flop" in of for of in results.values()):
        sweeps = sweeps_of(evaluation_methods(finished.config), least=1)
        draw = partial(draw_costs, results=results, metric=metric, cost="flop", sweeps=sweeps)
        replace_file(folder.flop_figure, to_svg(draw, width=7, height=4).encode())
    return "\n".join([*_weight_lines(fitted, metric), *_failure_lines(OutcomeFile(folder.outcomes).rows), ""])


def _weight_lines(fitted: dict[str, dict[str, Any]], metric: str) -> list[str]:
    if not fitted:
        return []
    n = next(iter(fitted.values()))["num_questions"]
    if n == 0:
        return ["", "No question is of the validation part: every reranker has its default weights."]
    lines = ["", f"Weights are fitted on the validation part (n = {n}), and on none of the questions above.", ""]
    head = [f"method, its {metric} there", "default weights", "fitted weights", "weights"]
    lines += [markdown_line(head), markdown_line(["---"] * len(head))]
    for method, one in fitted.items():
        weights = ", ".join(f"{name} {value:g}" for name, value in one["weights"].items())
        lines.append(markdown_line([method, f"{one['default_gain']:.3f}", f"{one['gain']:.3f}", weights]))
    return lines


def _failure_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Count what failed for all questions, those of the validation part too."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["methods"][PASSAGES]["detail"]["failures"] if PASSAGES in row["methods"] else {})
    if not counts:
        return []
    named = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    return ["", f"Pages and searches that gave nothing, over {len(rows)} questions: {named}."]
