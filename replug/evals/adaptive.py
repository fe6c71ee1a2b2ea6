"""Decide when to retrieve: policies fitted to the outcomes of PopQA, and what they are worth (Mallen et al. 2023).

`replug report DIR... --policies OUT` reads finished evaluations and asks no LM. Folders of one LM may bring different
methods over the same questions; folders of other LMs stand beside them. For every pair of methods, one without
retrieval and one with it, policies by each signal in the outcomes are compared on the same splits of the questions
(`evals.thresholds`). The policy that is kept has thresholds fitted to all questions of the LM.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import flatten, load_stored_evaluation_config
from replug.config.methods import GENREAD, NONE, POSTERIOR, WITHOUT_RETRIEVER
from replug.config.rules import evaluation_methods
from replug.data.shards import prepared_folder
from replug.data.store import Corpus, PreparedSet
from replug.evals.ensemble_temperatures import temperature_of
from replug.evals.folder import LM, EvaluationFolder
from replug.evals.intervals import Interval, holm
from replug.evals.outcomes import OutcomeFile
from replug.evals.popqa_sets import DOCUMENTS
from replug.evals.search import index_of
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
from replug.index_workers.local_index import retriever_identity as index_identity
from replug.index_workers.version_store import VersionStore
from replug.models.build import posterior_weighting
from replug.models.ensemble import REPLUG_WEIGHTS
from replug.models.policy import SIGNALS, KnownFrom, Policy, PolicyPrompts, Threshold
from replug.models.preparing import data_folder
from replug.planning.model_sizes import known_parameters

POPULARITY, FREQUENCY = "popularity", "frequency"
COUNTED = ("lm_calls", "retriever_calls", "prompt_tokens", "generated_tokens")
BY_RELATION, POOLED = "by relation", "one for all"
AGAIN = "run the evaluation again"
# Keys of `questions` that do not say how a question is asked; which questions are asked is compared by inputs.json.
FREE = ("questions.path", "questions.max_questions", "questions.latency_questions")

Pair = tuple[str, str]  # the names of a method without retrieval and of one with it
Costs = Mapping[str, float]  # of a question: COUNTED, seconds, and dollars for 1,000 questions where prices are given
Prices = tuple[float, float]  # dollars for a million tokens of prompts, and for a million generated tokens


def pair_name(pair: Pair) -> str:
    """Return the name of the second method, with the first one's before it unless that is closed book."""
    closed, augmented = pair
    return augmented if closed == NONE else f"{closed} + {augmented}"


# Outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MethodOutcomes:
    """One method's numbers [N] by name, NaN where a question has none, and the evaluation that measured them.

    `costs` [N] are COUNTED and seconds, `search_costs` the part of them that finds documents; NaN means not measured.
    """

    numbers: Mapping[str, np.ndarray]
    costs: Mapping[str, np.ndarray]
    search_costs: Mapping[str, np.ndarray]
    config: EvaluationConfig
    folder: EvaluationFolder

    @property
    def accuracy(self) -> np.ndarray:
        """Return 0 or 1 for each question, int64 [N]."""
        return self.numbers["accuracy"].astype(np.int64)

    def mean_costs(self, prices: Prices | None = None) -> Costs:
        return with_dollars({name: float(values.mean()) for name, values in self.costs.items()}, prices)


@dataclass(frozen=True, slots=True)
class AnsweredQuestions:
    """What one LM answered to N questions: their ids and relations, and the outcomes by method.

    `popularity_signal` names the signal that the number `popularity` is: `frequency` where the questions give no page
    views, so that documents were counted instead.
    """

    name: str
    identity: str
    ids: tuple[str, ...]
    relations: tuple[str, ...]
    methods: Mapping[str, MethodOutcomes]
    popularity_signal: str

    @property
    def popularity(self) -> np.ndarray:
        """Return the popularity of each subject, [N], the same under every method."""
        return next(iter(self.methods.values())).numbers[POPULARITY]

    @property
    def parameters(self) -> float | None:
        """Return the LM's parameters, None where neither a table nor its own files tell them."""
        return known_parameters(next(iter(self.methods.values())).config.lm)

    def right(self, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each question is answered right by the two methods, [N] each."""
        return self.methods[pair[0]].accuracy, self.methods[pair[1]].accuracy

    def signals(self, pair: Pair) -> dict[str, np.ndarray]:
        """Return the signals that any question has: values [N] in their own unit, NaN where a question has none.

        Documents that were counted are `frequency` alone: a policy by `popularity` would be asked with page views.
        """
        found = {}
        for name, signal in SIGNALS.items():
            if name == POPULARITY != self.popularity_signal:
                continue
            source = pair[0] if signal.known_from is KnownFrom.closed_answer else pair[1]
            values = self.methods[source].numbers.get(name)
            if values is not None and np.isfinite(values).any():
                found[name] = values
        return found

    def pairs(self) -> list[Pair]:
        """Return closed book with each other method, and GenRead with each that reads documents, as the paper does."""
        others = [method for method in self.methods if method != NONE]
        found = [method for method in others if method != GENREAD]
        return [*((NONE, method) for method in others), *((GENREAD, method) for method in found if GENREAD in others)]


def read_answered(folders: Sequence[EvaluationFolder]) -> list[AnsweredQuestions]:
    """Return what finished evaluations of the same questions hold, by LM in the order given.

    Raises UserError for another evaluation than popqa, for an LM without closed-book answers or without others, and for
    folders of one LM that asked in different ways, or answer differently by one method.
    """
    by_lm: dict[str, AnsweredQuestions] = {}
    for folder in folders:
        read = _read(folder)
        known = by_lm.get(read.identity)
        by_lm[read.identity] = _combined(known, read) if known else read
    for answered in by_lm.values():
        if NONE not in answered.methods or len(answered.methods) == 1:
            methods = ", ".join(answered.methods)
            raise UserError(
                f"the outcomes of {answered.name} are of {methods}; expected {NONE}, and a method with documents"
            )
        if len(answered.ids) < 2:
            raise UserError(f"{folders[0].path} asked one question; expected two or more: to fit to and to measure")
    names = [answered.name for answered in by_lm.values()]  # one LM in two dtypes has one name
    return [
        replace(answered, name=f"{answered.name} {identity}") if names.count(answered.name) > 1 else answered
        for identity, answered in by_lm.items()
    ]


def _read(folder: EvaluationFolder) -> AnsweredQuestions:
    config = load_stored_evaluation_config(folder.config)
    if config.evaluation != "popqa":
        raise UserError(f"{folder.path} is of evaluation={config.evaluation}; policies are fitted to those of popqa")
    rows = list({row["id"]: row for row in reversed(OutcomeFile(folder.outcomes).rows)}.values())[::-1]
    timed = [row["methods"] for row in OutcomeFile(folder.latency).rows]
    methods = {}
    for method in rows[0]["methods"]:
        outcomes = [row["methods"][method]["numbers"] for row in rows]
        names = dict.fromkeys(name for outcome in outcomes for name in outcome)
        numbers = {name: np.array([outcome.get(name, np.nan) for outcome in outcomes], np.float64) for name in names}
        seconds = [of[method]["numbers"] for of in timed if method in of]
        total, search = (
            np.full(len(rows), np.mean([latency[name] for latency in seconds]) if seconds else np.nan)
            for name in ("seconds", "evidence_seconds")
        )
        costs = {name: numbers.get(name, np.full(len(rows), np.nan)) for name in COUNTED}
        search_costs = {"retriever_calls": costs["retriever_calls"], "seconds": search}
        methods[method] = MethodOutcomes(numbers, {**costs, "seconds": total}, search_costs, config, folder)
    details = [outcome["detail"] for row in rows for outcome in row["methods"].values()]
    is_counted = any(detail.get("popularity_from") == DOCUMENTS for detail in details)
    return AnsweredQuestions(
        config.lm.model or Path(str(config.lm.path)).name.rpartition(":")[2],
        str((folder.folder.inputs or {})[LM]),
        tuple(row["id"] for row in rows),
        tuple(row["group"] for row in rows),
        methods,
        FREQUENCY if is_counted else POPULARITY,
    )


def _combined(first: AnsweredQuestions, other: AnsweredQuestions) -> AnsweredQuestions:
    """Return the methods of both, by the order of the questions in the first."""
    known, added = (next(iter(answered.methods.values())) for answered in (first, other))
    keys = flatten(known.config), flatten(added.config)
    for key in keys[0]:
        if (key == "seed" or key.startswith("questions.")) and key not in FREE and keys[0][key] != keys[1][key]:
            raise UserError(
                f"{key} is {keys[0][key]} in {known.folder.path}, but {keys[1][key]} in {added.folder.path}: expected "
                "questions that were asked in one way"
            )
    place = {name: row for row, name in enumerate(other.ids)}
    order = np.array([place[name] for name in first.ids])
    methods = dict(first.methods)
    for name, outcomes in other.methods.items():
        numbers, costs, search = (
            {key: values[order] for key, values in arrays.items()}
            for arrays in (outcomes.numbers, outcomes.costs, outcomes.search_costs)
        )
        moved = replace(outcomes, numbers=numbers, costs=costs, search_costs=search)
        if not np.array_equal(moved.numbers[POPULARITY], first.popularity):
            raise UserError(f"{added.folder.path} has other popularities than {known.folder.path}; expected the same")
        if name in methods and not np.array_equal(methods[name].accuracy, moved.accuracy):
            raise UserError(
                f"{name} answers differently in {added.folder.path} and in {methods[name].folder.path}; expected a "
                "method once for each LM: leave one of the folders out"
            )
        methods.setdefault(name, moved)
    return replace(first, methods=methods)


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
    costs: Costs | None
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
    rules = {
        f"{name}, {kind}": (name, kind, _rule(answered, name, values, kind))
        for name, values in signals.items()
        for kind in ((BY_RELATION, POOLED) if len(set(answered.relations)) > 1 else (POOLED,))
    }
    worth, better = measure(
        {label: rule for label, (_, _, rule) in rules.items()}, closed, augmented, splits, num_resamples
    )
    aurocs = {name: signal_auroc(oriented(name, values), closed, num_resamples) for name, values in signals.items()}
    corrected = dict(zip(rules, holm([worth[label].p for label in rules]), strict=True))
    by_signal = []
    for label, (name, kind, rule) in rules.items():
        retrieved = decisions(rule, closed, augmented, splits)
        costs = policy_costs(answered.methods[pair[0]], answered.methods[pair[1]], name, retrieved, splits)
        by_signal.append(
            Compared(name, kind, worth[label], with_dollars(costs, prices), aurocs[name], corrected[label])
        )
    without, with_documents = (answered.methods[name].mean_costs(prices) for name in pair)
    compared = [
        Compared(NEVER_RETRIEVE, None, worth[NEVER_RETRIEVE], without),
        Compared(ALWAYS_RETRIEVE, None, worth[ALWAYS_RETRIEVE], with_documents),
        *by_signal,
        Compared(ORACLE, None, worth[ORACLE], None),
    ]
    return compared, better


def policy_costs(
    closed: MethodOutcomes, augmented: MethodOutcomes, signal: str, retrieved: np.ndarray, splits: np.ndarray
) -> Costs:
    """Return the costs of a policy that retrieves where `retrieved` [S, N] says, over what `splits` leave to measure.

    A question that retrieves pays for the closed-book answer too, where the signal is known from it; one that does not
    retrieve pays for the search, where the signal is the retriever's.
    """
    without, with_documents, known_from = closed.costs, augmented.costs, SIGNALS[signal].known_from
    if known_from is KnownFrom.closed_answer:
        with_documents = {name: with_documents[name] + without[name] for name in without}
    elif known_from is KnownFrom.search:
        without = {name: without[name] + augmented.search_costs.get(name, 0) for name in without}
    each = {name: np.where(retrieved, with_documents[name], without[name]) for name in without}
    return {name: mean_over_splits(values, splits) for name, values in each.items()}


def with_dollars(costs: Costs, prices: Prices | None) -> Costs:
    """Return the costs with the dollars of a thousand questions."""
    if prices is None:
        return costs
    tokens = costs["prompt_tokens"] * prices[0] + costs["generated_tokens"] * prices[1]
    return {**costs, "dollars": tokens / 1e6 * 1000}


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


def fit_policy(
    answered: AnsweredQuestions, pair: Pair, signal: str, retriever: str, compared: Sequence[Compared]
) -> Policy:
    """Return the policy of a signal whose thresholds are fitted to all questions.

    `compared` says in the policy's file how right such policies were on questions left out of fitting.
    """
    thresholds, pooled = thresholds_of(answered, pair, signal)
    own = next((policy for policy in compared if policy.name == signal), None)  # by relation where there are several
    method, follows_text = answered.methods[pair[1]], pair[1].endswith(f"/{POSTERIOR}")
    accuracy = {
        " ".join(filter(None, (policy.name, policy.thresholds))): policy.worth.accuracy.value
        for policy in compared
        if policy.name == signal or policy.name not in SIGNALS
    }
    ensemble, lm = method.config.ensemble, method.config.lm
    return Policy(
        lm=answered.identity,
        retriever=retriever,
        closed=full_name(pair[0], answered.methods[pair[0]].config),
        augmented=full_name(pair[1], method.config),
        signal=signal,
        thresholds=thresholds,
        pooled=pooled,
        fitted={
            "lm": answered.name,
            "folders": sorted({str(answered.methods[name].folder.path) for name in pair}),
            "questions": len(answered.ids),
            "accuracy on questions left out": accuracy,
            **({"gain": {**asdict(own.worth.gain), "p_holm": own.p_holm}} if own else {}),
        },
        temperature=temperature_of(pair[1], method.folder),
        weighting=posterior_weighting(ensemble, lm, is_asked=True) if follows_text else REPLUG_WEIGHTS,
        prompts=prompts_of(answered, pair),
    )


def prompts_of(answered: AnsweredQuestions, pair: Pair) -> PolicyPrompts:
    """Return the prompts of two methods. Raises UserError where an evaluation did not keep them."""
    forms: list[Mapping[str, Sequence[str]]] = []
    for name in pair:
        path = answered.methods[name].folder.prompts
        if not path.is_file():
            raise UserError(f"{path} is missing: a policy must say which prompts it is for; {AGAIN}")
        forms.append(json.loads(path.read_text(encoding="utf-8"))[name])
    config = answered.methods[pair[1]].config
    questions, lm = config.questions, config.lm
    return PolicyPrompts(forms[0], forms[1], questions.max_new_tokens, questions.query, lm.prompt, lm.chat)


def thresholds_of(answered: AnsweredQuestions, pair: Pair, signal: str) -> tuple[dict[str, Threshold], Threshold]:
    """Return the thresholds of each relation, and that of all questions, in the signal's unit."""
    values, right, sign = answered.signals(pair)[signal], answered.right(pair), SIGNALS[signal].sign

    def in_unit(threshold: float) -> Threshold:
        return "never" if threshold == NEVER else "always" if threshold == ALWAYS else sign * threshold

    by_relation = fit_thresholds(_rule(answered, signal, values, BY_RELATION), *right)
    pooled = fit_thresholds(_rule(answered, signal, values, POOLED), *right)[""]
    return {relation: in_unit(threshold) for relation, threshold in by_relation.items()}, in_unit(pooled)


def full_name(name: str, config: EvaluationConfig) -> str:
    """Return a method's name with its source and its number of documents, such as replug@10 for `untuned`."""
    [method] = evaluation_methods(replace(config, methods=[name]))
    number = f"@{method.k}" if method.takes_from_corpus else ""
    return f"{method.source}{number}{''.join(name.partition('/')[1:])}"


def retriever_identity(method: str, config: EvaluationConfig, folder: EvaluationFolder) -> str:
    """Return what `IndexRetriever.identity` is for the same retriever and documents.

    Raises UserError where the index or the documents of the evaluation are gone.
    """
    source = full_name(method, config).partition("@")[0]
    if source in (NONE, GENREAD):
        return source
    if source in WITHOUT_RETRIEVER:
        return f"{source}:{documents_of(config, folder).corpus_sha256[:16]}"
    root = index_of(config, source, folder.found)
    store = VersionStore(root.absolute())
    if not (versions := store.published()):
        raise UserError(f"the index of {method} is gone from {root}: a policy must say which retriever it is for")
    own = config.query_encoders.get(source)
    return index_identity(store.plan(versions[-1]), root) + (f":queries by {own}" if own else "")


def documents_of(config: EvaluationConfig, folder: EvaluationFolder) -> Corpus:
    """Return the documents of an evaluation. Raises UserError where they are gone."""
    imported, prepared = folder.data / "corpus", data_folder(config.run_config(), folder.data)
    if prepared_folder(imported).is_finished:
        return Corpus(imported)
    if not prepared_folder(prepared).is_finished:
        raise UserError(f"the documents are gone from {prepared}; {AGAIN}")
    return PreparedSet(prepared)
