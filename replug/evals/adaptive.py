"""Compare policies of when to retrieve by the outcomes of PopQA (Mallen et al. 2023, section 5).

`replug report DIR... --policies OUT` reads finished evaluations and asks no LM. Folders of one LM may bring different
methods over the same questions; folders of other LMs stand beside them. For every pair of methods, one without
retrieval and one with it, policies by each signal in the outcomes are compared on the same splits of the questions
(`evals.thresholds`). `evals.adaptive_report` shows them, with thresholds fitted to all questions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import flatten, load_stored_evaluation_config
from replug.config.methods import GENREAD, NONE
from replug.evals.folder import LM, EvaluationFolder
from replug.evals.intervals import Interval, holm
from replug.evals.outcomes import OutcomeFile, Row
from replug.evals.popqa import DOCUMENTS
from replug.evals.thresholds import (
    ALWAYS,
    ALWAYS_RETRIEVE,
    NEVER,
    NEVER_RETRIEVE,
    NUM_RESAMPLES,
    ORACLE,
    Rule,
    Worth,
    accuracy_left_out,
    decisions,
    draw_splits,
    fit_thresholds,
    mean_over_splits,
    measure,
    rule_by,
    signal_auroc,
)
from replug.planning.model_sizes import known_parameters

POPULARITY, FREQUENCY = "popularity", "frequency"
COUNTED = ("lm_calls", "retriever_calls", "prompt_tokens", "generated_tokens")
BY_RELATION, POOLED = "by relation", "one for all"
# Keys of `questions` that do not say how a question is asked; inputs.json says which questions are asked.
FREE = ("questions.path", "questions.max_questions")

Pair = tuple[str, str]  # the names of a method without retrieval and of one with it
Numbers = Mapping[str, np.ndarray]  # a method's numbers of N questions by name, NaN where a question has none
Prices = tuple[float, float]  # dollars for a million tokens of prompts, and for a million generated tokens
Threshold = float | Literal["never", "always"]


@dataclass(frozen=True, slots=True)
class Signal:
    """A number of a question by which retrieval is decided: below a threshold where `sign` is 1, above where it is -1.

    `known_from` says what the signal costs: nothing, an answer of the LM, or a search.
    """

    title: str
    sign: int
    known_from: Literal["the question", "the closed-book answer", "the search"]


# Documents are used where the LM is unsure, or where the retriever is sure of what it found.
SIGNALS = {
    POPULARITY: Signal("popularity", 1, "the question"),
    FREQUENCY: Signal("documents that name the subject", 1, "the question"),
    "mean_logprob": Signal("log-prob of the closed-book answer", 1, "the closed-book answer"),
    "mean_entropy": Signal("entropy of the closed-book answer", -1, "the closed-book answer"),
    "top_score": Signal("score of the first document", -1, "the search"),
}


def pair_name(pair: Pair) -> str:
    """Return the name of the second method, with the first one's before it unless that is closed book."""
    closed, augmented = pair
    return augmented if closed == NONE else f"{closed} + {augmented}"


# Outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnsweredQuestions:
    """One LM's answers to N questions: their ids and relations, and each method's numbers and the folder they are from.

    `popularity_signal` names the signal that the number `popularity` is: `frequency` where the questions give no page
    views, so that documents were counted instead. `config` is that of the first folder.
    """

    name: str
    identity: str
    config: EvaluationConfig
    ids: tuple[str, ...]
    relations: tuple[str, ...]
    methods: Mapping[str, Numbers]
    folders: Mapping[str, EvaluationFolder]
    popularity_signal: str

    @property
    def popularity(self) -> np.ndarray:
        """Return the popularity of each subject, [N], the same under every method."""
        return self.methods[NONE][POPULARITY]

    @property
    def parameters(self) -> float | None:
        """Return the LM's parameters, None where neither a table nor its own files tell them."""
        return known_parameters(self.config.lm)

    def right(self, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
        """Return 0 or 1 for each question by the two methods, int64 [N] each."""
        closed, augmented = (self.methods[name]["accuracy"].astype(np.int64) for name in pair)
        return closed, augmented

    def signals(self, pair: Pair) -> dict[str, np.ndarray]:
        """Return the signals that any question has: values [N] in their own unit, NaN where a question has none."""
        signals = {}
        for name, signal in SIGNALS.items():
            if name == POPULARITY != self.popularity_signal:  # it is the number of documents, which is `frequency`
                continue
            source = pair[0] if signal.known_from == "the closed-book answer" else pair[1]
            values = self.methods[source].get(name)
            if values is not None and np.isfinite(values).any():
                signals[name] = values
        return signals

    def pairs(self) -> list[Pair]:
        """Return closed book with each other method, and GenRead with each that reads documents, as the paper does."""
        others = [method for method in self.methods if method != NONE]
        retrieving = [method for method in others if method != GENREAD]
        return [*((NONE, name) for name in others), *((GENREAD, name) for name in retrieving if GENREAD in others)]


def read_answered(folders: Sequence[EvaluationFolder]) -> list[AnsweredQuestions]:
    """Return what finished evaluations of the same questions hold, by LM in the order given.

    Raises UserError for an LM without closed-book answers or without others, and for folders of one LM that asked in
    different ways, or answer differently by one method.
    """
    by_lm: dict[str, list[EvaluationFolder]] = {}
    for folder in folders:
        by_lm.setdefault(str((folder.folder.inputs or {})[LM]), []).append(folder)
    lms = [_read(identity, own) for identity, own in by_lm.items()]
    names = [one.name for one in lms]  # one LM in two dtypes has one name
    return [replace(one, name=f"{one.name} {one.identity}") if names.count(one.name) > 1 else one for one in lms]


def _read(identity: str, folders: Sequence[EvaluationFolder]) -> AnsweredQuestions:
    configs = [load_stored_evaluation_config(folder.config) for folder in folders]
    rows_of = [{row["id"]: row for row in reversed(OutcomeFile(folder.outcomes).rows)} for folder in folders]
    ids = tuple(reversed(rows_of[0]))
    if len(ids) < 2:
        raise UserError(f"{folders[0].path} asked one question; expected two or more: to fit to and to measure")
    methods: dict[str, Numbers] = {}
    source: dict[str, EvaluationFolder] = {}
    for folder, config, rows in zip(folders, configs, rows_of, strict=True):
        first_keys, keys = flatten(configs[0]), flatten(config)
        for key in first_keys:
            is_asked = (key == "seed" or key.startswith("questions.")) and key not in FREE
            if is_asked and first_keys[key] != keys[key]:
                raise UserError(
                    f"{key} is {first_keys[key]} in {folders[0].path}, but {keys[key]} in {folder.path}: expected "
                    "questions that were asked in one way"
                )
        for method in rows[ids[0]]["methods"]:
            numbers = _numbers([rows[name] for name in ids], method)
            if method in methods and not np.array_equal(methods[method]["accuracy"], numbers["accuracy"]):
                raise UserError(
                    f"{method} answers differently in {source[method].path} and in {folder.path}; expected a method "
                    "once for each LM: leave one of the folders out"
                )
            methods.setdefault(method, numbers)
            source.setdefault(method, folder)
    lm = configs[0].lm
    name = lm.model or Path(str(lm.path)).name.rpartition(":")[2]
    if NONE not in methods or len(methods) == 1:
        raise UserError(
            f"the outcomes of {name} are of {', '.join(methods)}; expected {NONE}, and a method with documents"
        )
    first = list(rows_of[0].values())
    is_counted = any(
        of["detail"].get("popularity_from") == DOCUMENTS for row in first for of in row["methods"].values()
    )
    relations = tuple(rows_of[0][name]["group"] for name in ids)
    signal = FREQUENCY if is_counted else POPULARITY
    return AnsweredQuestions(name, identity, configs[0], ids, relations, methods, source, signal)


def _numbers(rows: Sequence[Row], method: str) -> dict[str, np.ndarray]:
    outcomes = [row["methods"][method]["numbers"] for row in rows]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome)
    return {name: np.array([outcome.get(name, np.nan) for outcome in outcomes], np.float64) for name in names}


# Policies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy on the same splits as all others: never, always, the name of a signal, or oracle.

    `thresholds` is BY_RELATION or POOLED, None where the policy has none. `costs` are None for the oracle, which nobody
    can follow. `auroc` says how well the signal separates right closed-book answers from wrong ones. `p_holm` is
    that of no gain, corrected for all policies by a signal; None for the others.
    """

    name: str
    thresholds: str | None
    worth: Worth
    costs: Mapping[str, float] | None
    auroc: Interval | None = None
    p_holm: float | None = None


def compare_policies(
    answered: AnsweredQuestions, pair: Pair, num_resamples: int = NUM_RESAMPLES, prices: Prices | None = None
) -> tuple[list[Compared], str]:
    """Return never, always, policies by each signal, and the oracle; and the better one of never and always.

    A signal has a threshold for each relation, where there are several, and one for all.
    """
    closed, augmented = answered.right(pair)
    signals, splits = answered.signals(pair), draw_splits(len(answered.ids))
    without, with_documents = (costs_of(answered.methods[name], prices) for name in pair)
    kinds = (BY_RELATION, POOLED) if len(set(answered.relations)) > 1 else (POOLED,)
    rules = {
        f"{name}, {kind}": (name, kind, _rule(answered, name, values, kind))
        for name, values in signals.items()
        for kind in kinds
    }
    worth, better = measure(
        {label: rule for label, (_, _, rule) in rules.items()}, closed, augmented, splits, num_resamples
    )
    aurocs = {name: signal_auroc(oriented(name, values), closed, num_resamples) for name, values in signals.items()}
    corrected = dict(zip(rules, holm([worth[label].p for label in rules]), strict=True))
    by_signal = []
    for label, (name, kind, rule) in rules.items():
        retrieved = decisions(rule, closed, augmented, splits)
        own = policy_costs(without, with_documents, name, retrieved, splits)
        by_signal.append(Compared(name, kind, worth[label], own, aurocs[name], corrected[label]))
    means = [{name: float(values.mean()) for name, values in costs.items()} for costs in (without, with_documents)]
    compared = [
        Compared(NEVER_RETRIEVE, None, worth[NEVER_RETRIEVE], means[0]),
        Compared(ALWAYS_RETRIEVE, None, worth[ALWAYS_RETRIEVE], means[1]),
        *by_signal,
        Compared(ORACLE, None, worth[ORACLE], None),
    ]
    return compared, better


def costs_of(numbers: Numbers, prices: Prices | None = None) -> Numbers:
    """Return COUNTED of each question, [N], and with prices the dollars of a thousand such questions."""
    unknown = np.full(len(numbers["accuracy"]), np.nan)
    costs = {name: numbers.get(name, unknown) for name in COUNTED}
    if prices is not None:
        tokens = costs["prompt_tokens"] * prices[0] + costs["generated_tokens"] * prices[1]
        costs["dollars"] = tokens / 1e6 * 1000
    return costs


def policy_costs(
    without: Numbers, with_documents: Numbers, signal: str, retrieved: np.ndarray, splits: np.ndarray
) -> dict[str, float]:
    """Return the costs of a policy that retrieves where `retrieved` [S, N] says, over what `splits` leave to measure.

    A question that retrieves pays for the closed-book answer too, where the signal is known from it; one that does not
    retrieve pays for the search, where the signal is the retriever's.
    """
    known_from = SIGNALS[signal].known_from
    if known_from == "the closed-book answer":
        with_documents = {name: values + without[name] for name, values in with_documents.items()}
    elif known_from == "the search":
        searches = without["retriever_calls"] + with_documents["retriever_calls"]
        without = {**without, "retriever_calls": searches}
    each = {name: np.where(retrieved, with_documents[name], without[name]) for name in without}
    return {name: mean_over_splits(values, splits) for name, values in each.items()}


def accuracy_by_popularity_policy(answered: AnsweredQuestions, pair: Pair) -> np.ndarray:
    """Return how often each question is right, [N], by thresholds for each relation fitted to others; NaN if never."""
    (closed, augmented), splits = answered.right(pair), draw_splits(len(answered.ids))
    name = answered.popularity_signal
    rule = _rule(answered, name, answered.signals(pair)[name], BY_RELATION)
    return accuracy_left_out(closed, augmented, decisions(rule, closed, augmented, splits), splits)


def _rule(answered: AnsweredQuestions, signal: str, values: np.ndarray, kind: str) -> Rule:
    return rule_by(oriented(signal, values), answered.relations if kind == BY_RELATION else None)


def oriented(signal: str, values: np.ndarray) -> np.ndarray:
    """Return values [N] turned so that retrieval is used below a threshold; -inf where a question has none."""
    return np.where(np.isnan(values), NEVER, SIGNALS[signal].sign * values)


def thresholds_of(answered: AnsweredQuestions, pair: Pair, signal: str) -> dict[str, Threshold]:
    """Return the thresholds, fitted to all questions, of relations with questions enough, and that of `others`.

    They are in the signal's unit, or "never" or "always".
    """
    values, right, sign = answered.signals(pair)[signal], answered.right(pair), SIGNALS[signal].sign
    by_relation = fit_thresholds(_rule(answered, signal, values, BY_RELATION), *right)
    pooled = fit_thresholds(_rule(answered, signal, values, POOLED), *right)[""]
    return {
        relation: "never" if threshold == NEVER else "always" if threshold == ALWAYS else sign * threshold
        for relation, threshold in {**by_relation, "others": pooled}.items()
    }
