"""`replug evaluate`: compare retrievers and methods."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from replug.cluster.environment import configure_ray_environment
from replug.commands.command import LM, ConfigFile, Overrides, Retriever, Source, load_for_run, with_short_keys
from replug.config.load import load_evaluation_config, load_stored_config, load_stored_lm, names_evaluation
from replug.config.paths import RUN_CONFIG, check_evaluation_paths
from replug.config.schema import Config
from replug.data.folder import MANIFEST


def evaluate(
    config: ConfigFile, overrides: Overrides = None, source: Source = None, retriever: Retriever = None, lm: LM = None
) -> None:
    """Evaluate retrievers and methods (configs/eval_*.yaml, configs/paper_tables/*.yaml).

    With the folder of a run, or a training configuration, compare its retriever with the tuned one on the run's own
    held-out texts. The same command resumes after an interruption.

    replug evaluate runs/mine
    replug evaluate configs/eval_lm.yaml retriever.path=DIR lm.path=DIR out=DIR
    """
    given = with_short_keys(overrides, source, retriever, lm)
    if names_evaluation(config):
        from replug.evals.kinds import check_evaluation

        evaluation = load_evaluation_config(config, given)
        check_evaluation(evaluation)
        check_evaluation_paths(evaluation)
        configure_ray_environment(evaluation)
        from replug.evals.run import evaluate as run_evaluation

        run_evaluation(evaluation)
        return
    if config.is_dir():
        loaded = config_of_run(config, given)
        configure_ray_environment(loaded)
    else:
        loaded = load_for_run(config, given)
    from replug.train.run import evaluate as evaluate_run

    evaluate_run(loaded)


def config_of_run(run: Path, overrides: Sequence[str]) -> Config:
    """Load the configuration of a run, with its own prepared set unless the overrides name other data."""
    stored = run / RUN_CONFIG
    config = replace(load_stored_config(stored, overrides), run_dir=str(run), lm=load_stored_lm(stored, overrides))
    data = config.data
    prepared = Path(data.prepared or data.out or run / "data").expanduser()
    if any(override.startswith("data.") for override in overrides) or not (prepared / MANIFEST).is_file():
        return config
    data = replace(data, source=None, corpus=None, queries=None, heldout=None, dev=None, out=None)
    return replace(config, data=replace(data, prepared=str(prepared)))
