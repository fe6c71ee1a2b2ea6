"""`replug sweep`: many trainings on one folder of labels, the best by development texts."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from replug.commands.command import Command, ConfigFile, Group, load_for_run
from replug.config.errors import UserError
from replug.config.sweep_space import read_space


def sweep(
    config: ConfigFile,
    out: Annotated[Path, typer.Option(help="The folder for trials, table and figure.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="What is swept, as 'section.key=[VALUE,VALUE]', 'log(LOW,HIGH)' or 'uniform(LOW,HIGH)'; other keys as "
            "section.key=VALUE.",
            metavar="KEY=VALUES",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Trials drawn at random, instead of the whole grid.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of these draws.", min=0)] = 0,
    at_once: Annotated[int | None, typer.Option(help="Trials at a time (default: a GPU or core each).", min=1)] = None,
) -> None:
    """Train many times on what `replug label` wrote, and compare by development texts; held-out texts stay unseen.

    Goes on where it was interrupted. train.patience=N ends a trial that no longer gets better.

    replug sweep CONFIG train.labels=DIR 'loss.gamma=[0.03,0.05,0.1]' 'train.lr=[2e-5,5e-5]' --out runs/sweep
    """
    space, fixed = read_space(overrides or [])
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UserError("`replug sweep` draws and keeps trials by Optuna: pip install 'replug[sweep]'") from error
    load_for_run(config, fixed)  # before Ray is imported, and whatever is the same for all trials is checked
    from replug.cluster.gpus import num_gpus
    from replug.cluster.task_pool import RayPool, tasks_at_once
    from replug.models.hardware import available_cores
    from replug.train.sweep.run import Sweep
    from replug.train.sweep.run import sweep as run_sweep
    from replug.train.sweep.trials import TrialSettings

    number, gpus = tasks_at_once(at_once, available_cores(), num_gpus())
    settings = TrialSettings(config, tuple(fixed), out, max(1, available_cores() // number))
    asked = Sweep(space, samples, seed)
    run_sweep(asked, settings, partial(RayPool, num_workers=number, gpus_each=gpus))


COMMAND = Command(sweep, Group.train, place=3)
