"""One trial of a sweep: a training on labels in a run directory of its own, which never measures held-out texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replug.config.choices import DevMeasure
from replug.config.errors import NotFiniteError, RunError, UserError
from replug.config.label_rules import OWN_LABELS
from replug.config.load import load_config
from replug.config.schema import Config
from replug.config.sweep_space import Value
from replug.data.files import read_json
from replug.train.labels.fitting import Fitted
from replug.train.run import train
from replug.train.run_dir import MEND, RunDirectory
from replug.train.sweep.records import Trial, TrialResult


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """What all trials share: the configuration's file, the keys that are set, the sweep's folder, and threads."""

    config: Path
    fixed: tuple[str, ...]
    out: Path
    threads: int

    def folder(self, trial: Trial) -> Path:
        """The run directory of a trial."""
        return self.out / "trials" / trial.name

    def config_of(self, trial: Trial) -> Config:
        """Checked as any. Raises UserError for what no sweep can be of."""
        own = [f"run_dir={self.folder(trial)}", "evaluate.heldout=false", f"train.threads={self.threads}"]
        named = [f"wandb.group={self.out.name}", f"wandb.name={trial.name}"]
        settings = [override(key, value) for key, value in trial.settings.items()]
        config = load_config(self.config, [*self.fixed, *own, *named, *settings])
        for problem in _problems(config):
            raise UserError(problem)
        return config


def override(key: str, value: Value) -> str:
    """As it would be typed."""
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)
    return f"{key}={text}"


def run_trial(number: int, config: Config) -> tuple[int, TrialResult]:
    """Train, or go on where the trial was interrupted. A training that cannot end well is a result too.

    Raises UserError for what is wrong with every trial.
    """
    run = RunDirectory(Path(config.run_dir))
    try:
        train(config)
    except (NotFiniteError, RunError) as error:
        return number, TrialResult(None, None, None, None, 0, 0.0, str(error))
    fitted, seconds = Fitted.read(run.fitted), sum(read_json(run.times, MEND).values())
    assert fitted.best is not None, "a sweep's labels have development texts"
    look = fitted.best
    return number, TrialResult(look.bpb, look.step, look.temperature, look.scored_share, fitted.step, seconds)


def _problems(config: Config) -> Sequence[str]:
    problems = []
    if config.train.labels in (None, OWN_LABELS):
        given = "missing" if config.train.labels is None else OWN_LABELS
        problems.append(f"train.labels is {given}; a sweep trains on what `replug label` wrote: train.labels=DIR")
    if config.train.dev_measure is not DevMeasure.bpb:
        problems.append("train.dev_measure is kl, which changes with the loss; expected bpb, so that trials compare")
    return problems
