"""`replug evaluate`: measure retrievers by what they do for the LM."""

from pathlib import Path
from typing import TYPE_CHECKING

from replug.cluster.environment import configure_ray_environment
from replug.commands.command import Command, ConfigFile, Group, Overrides, load_for_run
from replug.configs.load import load_evaluation_config, names_evaluation
from replug.configs.paths import check_evaluation_paths
from replug.configs.schema import Config

if TYPE_CHECKING:
    from replug.data.store import PreparedSet
    from replug.evals.language_modelling import Choice
    from replug.index_workers.service import IndexService


def evaluate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run an evaluation (configs/eval_*.yaml, configs/paper_tables/*.yaml); goes on where it was interrupted.

    With a training configuration: the table of `replug train`, for its retriever and the tuned one of RUN_DIR.

    replug evaluate configs/eval_lm.yaml retriever.path=DIR lm.path=DIR out=DIR
    """
    if names_evaluation(config):
        evaluation = load_evaluation_config(config, overrides or [])
        check_evaluation_paths(evaluation)
        configure_ray_environment(evaluation)
        from replug.evals.lm_sweep import evaluate_lms
        from replug.evals.run import evaluate as run_evaluation

        (evaluate_lms if evaluation.lms else run_evaluation)(evaluation)
        return
    loaded = load_for_run(config, overrides)
    run_evaluate(loaded)


def run_evaluate(config: Config) -> None:
    """The table of `replug train`, for the retriever as it is configured and the run's tuned one, if any."""
    from replug.cluster.ray_cluster import ray_cluster
    from replug.data.files import write_json
    from replug.evals.results import print_results
    from replug.index_workers.installation import check_faiss
    from replug.models.build import lm_source
    from replug.models.preparing import prepared_set
    from replug.train.data_checks import check_data
    from replug.train.run import measure
    from replug.train.run_dir import RunDirectory
    from replug.train.workers import start_workers

    check_faiss()
    run = RunDirectory(Path(config.run_dir).expanduser())
    lm = lm_source(config.lm, run.budget_file, run.scores)
    data = prepared_set(config, run.data)
    check_data(config, data, lm)
    paths = {"replug": None, **({"lsr": run.retriever} if run.retriever.is_dir() else {})}
    root = run.path / "evaluation"
    with (
        ray_cluster(config, roles=["index", *lm.roles]) as config,
        start_workers(config, lm, data, root, run.scores) as workers,
    ):
        found = {name: _find(config, data, workers.index, path, i) for i, (name, path) in enumerate(paths.items())}
        results = measure(config, data, workers, found)
    write_json(root / "results.json", results)
    print_results(results)
    print(f"results: {root / 'results.json'}")


def _find(config: Config, data: "PreparedSet", index: "IndexService", path: Path | None, version: int) -> "Choice":
    from replug.index_workers.build import build_version
    from replug.index_workers.version_store import IndexState
    from replug.models.build import load_encoder
    from replug.train.run import search_windows

    encoder = load_encoder(config.retriever, path)
    build_version(config, encoder, data, index, IndexState(version, 0))
    return search_windows(config, data, index, encoder, version)


COMMAND = Command(evaluate, Group.evaluate, place=1)
