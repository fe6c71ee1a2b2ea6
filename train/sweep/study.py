"""The trials of a sweep: which settings each has, and what became of it, in Optuna's journal.

Trials are drawn before any begins, by the space and the seed alone, so neither their number at a time nor a restart
changes one. The journal is text, a JSON object a line, and `optuna-dashboard` shows it. Optuna draws, keeps and reads;
what ends a bad trial early is the training's own `train.patience`, which looks at that trial alone: a rule that
compares trials would depend on which of them happens to be ahead.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from replug.config.errors import UserError
from replug.config.sweep_space import Choices, Range, Space, Value
from replug.data.files import replace_file
from replug.train.sweep.records import Trial, TrialResult

NAME = "replug sweep"
NUMBER = "trial"  # beside a result: Optuna numbers trials as they end
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
    """The trials that have ended, a line for each, written when it ends.

    Raises UserError where the file is of other trials, or is damaged. What a kill left of a line is no line.
    """

    def __init__(self, path: Path, space: Space, trials: Sequence[Trial]) -> None:
        self._path, self._space, self._trials = path, space, trials
        _remove_torn_line(path)
        try:
            storage = JournalStorage(JournalFileBackend(str(path)))
            self._study = optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); give another --out") from error

    def results(self) -> dict[int, TrialResult]:
        """By the trial's number."""
        found = {}
        for ended in self._study.get_trials(deepcopy=False):
            of = dict(ended.user_attrs)
            number = of.pop(NUMBER)
            if number >= len(self._trials) or ended.params != self._trials[number].settings:
                raise UserError(f"{self._path} is of other trials; give another --out")
            found[number] = TrialResult(**of)
        return found

    def end(self, number: int, result: TrialResult) -> None:
        """Write down what became of a trial."""
        ended = optuna.create_trial(
            state=TrialState.COMPLETE if result.error is None else TrialState.FAIL,
            value=result.dev_bpb,
            params=dict(self._trials[number].settings),
            distributions=_distributions(self._space),
            user_attrs={NUMBER: number, **asdict(result)},
        )
        self._study.add_trial(ended)


def _remove_torn_line(path: Path) -> None:
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        replace_file(path, content[: content.rfind(b"\n") + 1])


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
