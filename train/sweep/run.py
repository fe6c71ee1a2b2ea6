"""The composition root of `replug sweep`: from a space to a table, each stage a call.

OUT/sweep.json      what is swept, written first: another sweep is refused
OUT/study.jsonl     Optuna's journal: settings and results of all trials
OUT/trials/NAME/    a run directory for each trial
OUT/table.md        all trials, the best first; figure.svg beside it
OUT/best.yaml       the configuration of the best trial, to be trained and measured with `replug train`

Interrupted, the same command goes on: trials that have ended are passed over, others resume in their run directories.
"""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from replug.config.errors import RunError, UserError
from replug.config.load import config_to_yaml
from replug.config.paths import require_folder
from replug.config.schema import Config
from replug.config.sweep_space import Space
from replug.data.files import file_sha256, read_json, replace_file, write_json
from replug.data.folder_lock import NAME as WRITER
from replug.data.folder_lock import sole_writer
from replug.data.labels import MARK, Labels
from replug.data.prepare.local_pool import Pool
from replug.data.progress import Progress
from replug.train.sweep.baselines import Baselines, baselines_of
from replug.train.sweep.records import Trial, TrialResult
from replug.train.sweep.report import best_first, sweep_figure, sweep_table
from replug.train.sweep.study import Journal, draw_trials
from replug.train.sweep.trials import TrialSettings, run_trial

log = logging.getLogger(__name__)

MAIN = ("sweep.json", "study.jsonl", "trials", "table.md", "figure.svg", "best.yaml")
Pools = Callable[[Config], AbstractContextManager[Pool]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is tried: the whole grid, or `samples` of the space by the seed."""

    space: Space
    samples: int | None
    seed: int


def sweep(asked: Sweep, settings: TrialSettings, pool_of: Pools) -> dict[int, TrialResult]:
    """Run or resume it; the results by trial. `pool_of` makes what runs several trials at a time."""
    trials = draw_trials(asked.space, asked.samples, asked.seed)
    configs = [settings.config_of(trial) for trial in trials]  # a mistake in the last one is told before the first
    labels = Labels(Path(str(configs[0].train.labels)).expanduser())
    if not labels.has_dev:
        raise UserError(f"train.labels: {labels.folder} has no development texts, by which trials are compared")
    require_folder("--out", settings.out)
    settings.out.mkdir(parents=True, exist_ok=True)
    with sole_writer(settings.out):
        _claim(asked, settings, labels)
        journal = Journal(settings.out / "study.jsonl", asked.space, trials)
        _run(configs, journal, pool_of)
        known = baselines_of(labels, configs[0].evaluate.k, configs[0].loss.beta)
        return _show(asked, trials, configs, settings.out, journal.results(), known)


def _claim(asked: Sweep, settings: TrialSettings, labels: Labels) -> None:
    """Raise UserError where another sweep, or what is none, lies in the folder."""
    asked_for = {
        "space": {key: asdict(tried) for key, tried in asked.space.items()},
        "samples": asked.samples,
        "seed": asked.seed,
        "fixed": list(settings.fixed),
        "config": file_sha256(settings.config),
        "labels": file_sha256(labels.folder / MARK),
    }
    what = json.loads(json.dumps(asked_for))  # as it is read
    path = settings.out / "sweep.json"
    if path.is_file():
        begun = read_json(path, "give another --out")
        changed = [name for name, value in what.items() if begun.get(name) != value]
        if changed:
            raise UserError(f"{settings.out} holds a sweep of another {changed[0]}; give another --out")
    elif foreign := [one.name for one in settings.out.iterdir() if one.name not in (*MAIN, WRITER)]:
        raise UserError(f"--out: {settings.out} holds {foreign[0]}, which is of no sweep; give another --out")
    write_json(path, what)


def _run(configs: Sequence[Config], journal: Journal, pool_of: Pools) -> None:
    """The trials that have not ended."""
    ended = journal.results()
    missing = [(number, config) for number, config in enumerate(configs) if number not in ended]
    if not missing:
        return
    progress = Progress("trials", len(configs), len(ended))
    with pool_of(configs[0]) as pool:
        for number, result in pool.run(run_trial, missing):
            journal.end(number, result)
            said = f"no result: {result.error}" if result.dev_bpb is None else f"dev {result.dev_bpb:.4f}"
            progress.advance(note=f"trial {number}: {said}")


def _show(
    asked: Sweep,
    trials: Sequence[Trial],
    configs: Sequence[Config],
    out: Path,
    results: dict[int, TrialResult],
    known: Baselines,
) -> dict[int, TrialResult]:
    """Write and print the table, and how to go on. Raises RunError where no trial ended well."""
    table = sweep_table(asked.space, trials, results, known)
    replace_file(out / "table.md", table.encode())
    Console(width=140).print(Markdown(table))
    best = best_first(trials, results)[0]
    if results[best.number].dev_bpb is None:
        raise RunError(f"none of {len(trials)} trials ended well; the table in {out} says why")
    replace_file(out / "figure.svg", sweep_figure(asked.space, trials, results).encode())
    config = configs[best.number]
    whole = replace(config, evaluate=replace(config.evaluate, heldout=True))
    replace_file(out / "best.yaml", config_to_yaml(whole).encode())
    print(f"best: {best.name}, in {config.run_dir}")
    print(f"on held-out texts: replug train {out / 'best.yaml'} run_dir=DIR")
    return results
