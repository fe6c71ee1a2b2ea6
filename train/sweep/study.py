"""The trials of a sweep: which settings each has, and what became of it, in Optuna's journal.

Trials are drawn before any begins, by the space and the seed alone, so neither their number at a time nor a restart
changes one. The journal is text, a JSON object a line, and `optuna-dashboard` shows it. Optuna draws, keeps and reads;
what ends a bad trial early is the training's own `train.patience`, which looks at that trial alone: a rule that
compares trials would depend on which of them happens to be ahead.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from replug.configs.errors import UserError
from replug.configs.sweep_space import Choices, Range, Space, Value
from replug.train.sweep.records import Trial, TrialResult

NAME = "replug sweep"
optuna.logging.set_verbosity(optuna.logging.WARNING)


def draw_trials(space: Space, samples: int | None, seed: int) -> list[Trial]:
    """The whole grid in the order typed, or so many samples. The same arguments give the same trials.

    Raises UserError for a range without a number of samples.
    """
    if samples is None:
        return [Trial(number, settings) for number, settings in enumerate(_grid(space))]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    drawn = (study.ask(_distributions(space)).params for _ in range(samples))
    return [Trial(number, settings) for number, settings in enumerate(drawn)]


class Journal:
    """What became of the trials so far. Raises UserError where the file is of other trials, or is damaged."""

    def __init__(self, path: Path, space: Space, trials: list[Trial]) -> None:
        try:
            storage = JournalStorage(JournalFileBackend(str(path)))
            self._study = optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True)
            known = self._study.get_trials(deepcopy=False)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); give another --out") from error
        for trial in trials[: len(known)]:
            if known[trial.number].params != trial.settings:
                raise UserError(f"{path} is of other trials; give another --out")
        for trial in trials[len(known) :]:
            self._study.enqueue_trial(dict(trial.settings))
            self._study.ask(_distributions(space))

    def results(self) -> dict[int, TrialResult]:
        """By number, of the trials that have ended."""
        ended = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
        return {trial.number: _result(trial) for trial in ended}

    def end(self, number: int, result: TrialResult) -> None:
        """Write down what became of a trial."""
        storage, trial = self._study._storage, self._study.get_trials(deepcopy=False)[number]
        for name, value in result.as_json().items():
            storage.set_trial_user_attr(trial._trial_id, name, value)
        state = TrialState.COMPLETE if result.error is None else TrialState.FAIL
        self._study.tell(number, result.dev_bpb, state=state)


def _grid(space: Space) -> Iterator[dict[str, Value]]:
    for key, tried in space.items():
        if isinstance(tried, Range):
            raise UserError(f"{key} is a range, of which a grid has no end; expected a list of values, or --samples N")
    values = [tried.values for tried in space.values() if isinstance(tried, Choices)]
    return (dict(zip(space, some, strict=True)) for some in itertools.product(*values))


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    return {
        key: CategoricalDistribution(tried.values)
        if isinstance(tried, Choices)
        else FloatDistribution(tried.low, tried.high, log=tried.is_log)
        for key, tried in space.items()
    }


def _result(trial: FrozenTrial) -> TrialResult:
    return TrialResult(**{name: trial.user_attrs[name] for name in TrialResult.__dataclass_fields__})
