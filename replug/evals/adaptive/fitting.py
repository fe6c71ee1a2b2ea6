"""The policy that is kept: thresholds fitted to all questions of one LM."""

from collections.abc import Sequence
from dataclasses import replace

from replug.config.errors import UserError
from replug.evals.adaptive.comparison import Compared, oriented
from replug.evals.adaptive.outcomes import AnsweredQuestions, TwoWays
from replug.evals.adaptive.retrievers import full_name, retriever_identity
from replug.evals.adaptive.thresholds import ALWAYS, NEVER, fit_thresholds
from replug.evals.ensemble_temperatures import temperature_of
from replug.models.policy import SIGNALS, Policy, Signal, Threshold


def fit_policy(answered: AnsweredQuestions, pair: TwoWays, signal: str) -> Policy:
    """By a signal, for two ways to answer.

    Raises UserError for a signal that the outcomes do not hold, and where the retriever is not known any more.
    """
    thresholds, pooled = thresholds_by(answered, pair, signal)
    of = answered.methods[pair.augmented]
    return Policy(
        lm=answered.identity,
        retriever=retriever_identity(pair.augmented, of.config, of.folder),
        closed=full_name(pair.closed, answered.methods[pair.closed].config.k),
        augmented=full_name(pair.augmented, of.config.k),
        signal=signal,
        thresholds=thresholds,
        pooled=pooled,
        fitted=_from(answered, pair),
        temperature=temperature_of(pair.augmented, of.folder),
    )


def thresholds_by(answered: AnsweredQuestions, pair: TwoWays, signal: str) -> tuple[dict[str, Threshold], Threshold]:
    """By relation, and of all questions, in the signal's unit. Raises UserError for an unknown signal."""
    signals = answered.signals(pair)
    if signal not in signals:
        raise UserError(f"--signal: the outcomes hold no {signal}; expected one of {', '.join(signals) or 'no signal'}")
    questions, decides_by = answered.questions(pair), SIGNALS[signal]
    values = oriented(signals[signal], decides_by)
    fitted = fit_thresholds(values, answered.relations, questions.closed, questions.augmented)
    by_relation = {relation: _in_unit(value, decides_by) for relation, value in fitted.by_relation.items()}
    return by_relation, _in_unit(fitted.pooled, decides_by)


def with_accuracy(policy: Policy, compared: Sequence[Compared]) -> Policy:
    """The policy with how right such policies, and those without a signal, were on questions left out of fitting."""
    accuracy = {
        " ".join(filter(None, (one.name, one.thresholds))): one.worth.accuracy.value
        for one in compared
        if one.signal in (None, policy.signal)
    }
    return replace(policy, fitted={**policy.fitted, "accuracy on questions left out": accuracy})


def _in_unit(threshold: float, signal: Signal) -> Threshold:
    if threshold in (NEVER, ALWAYS):
        return "never" if threshold == NEVER else "always"
    return signal.sign * threshold


def _from(answered: AnsweredQuestions, pair: TwoWays) -> dict[str, object]:
    """What a reader wants to know of how it was fitted."""
    questions = answered.methods[pair.augmented].config.questions
    return {
        "lm": answered.name,
        "folders": sorted({str(answered.methods[way].folder.path) for way in (pair.closed, pair.augmented)}),
        "questions": len(answered.ids),
        "query": questions.query,
        "max_new_tokens": questions.max_new_tokens,
    }
