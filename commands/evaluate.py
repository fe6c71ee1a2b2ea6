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
    from replug.evals.evidence import RetrievedDocuments
    from replug.index_workers.service import IndexService


def evaluate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run an evaluation (configs/eval_*.yaml, configs/paper_tables/*.yaml); goes on where it was interrupted.

    With a training configuration: the table of `replug train`, for its retriever and the tuned one of RUN_DIR.

    replug evaluate configs/eval_lm.yaml retriever.path=DIR lm.path=DIR out=DIR
    """
    if names_evaluation(config):
        from replug.evals.kinds import check_evaluation

        evaluation = load_evaluation_config(config, overrides or [])
        check_evaluation(evaluation)
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
    from replug.index_workers.installation import check_faiss
    from replug.models.build import lm_source
    from replug.models.preparing import prepared_set
    from replug.train.data_checks import check_data
    from replug.train.evaluation import evaluate_heldout
    from replug.train.results import print_results
    from replug.train.run_dir import RunDirectory
    from replug.train.workers import start_workers

    check_faiss()
    run = RunDirectory(Path(config.run_dir).expanduser())
    lm = lm_source(config.lm, run.budget_file, run.scores)
    data = prepared_set(config, run.data)
    check_data(config, data, lm)
    paths = {"replug": None, **({"lsr": run.retriever} if run.retriever.is_dir() else {})}
    with (
        ray_cluster(config, roles=["index", *lm.roles]) as config,
        start_workers(config, lm, data, run.evaluation / "index", run.scores) as workers,
    ):
        found = {name: _find(config, data, workers.index, path, i) for i, (name, path) in enumerate(paths.items())}
        results = evaluate_heldout(config, data, workers, found, run.evaluation)
    write_json(run.evaluation / "results.json", results)
    print_results(results)
    print(f"results: {run.evaluation / 'results.json'}")


def _find(
    config: Config, data: "PreparedSet", index: "IndexService", path: Path | None, version: int
) -> "RetrievedDocuments":
    from replug.index_workers.build import build_version
    from replug.index_workers.version_store import IndexState
    from replug.models.build import load_encoder
    from replug.train.evaluation import search_heldout

    encoder = load_encoder(config.retriever, path)
    build_version(config, encoder, data, index, IndexState(version, 0))
    return search_heldout(config, data, index, encoder, version)


COMMAND = Command(evaluate, Group.evaluate, place=1)
