"""`replug evaluate`: compare retrievers and methods."""

from replug.cluster.environment import configure_ray_environment
from replug.commands.command import ConfigFile, Overrides, load_for_run
from replug.config.load import load_evaluation_config, names_evaluation
from replug.config.paths import check_evaluation_paths


def evaluate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Evaluate retrievers and methods (configs/eval_*.yaml, configs/paper_tables/*.yaml).

    With a training configuration, compare its retriever with the tuned one of RUN_DIR on the held-out split. The same
    command resumes after an interruption.

    replug evaluate configs/eval_lm.yaml retriever.path=DIR lm.path=DIR out=DIR
    """
    if names_evaluation(config):
        from replug.evals.kinds import check_evaluation

        evaluation = load_evaluation_config(config, overrides or [])
        check_evaluation(evaluation)
        check_evaluation_paths(evaluation)
        configure_ray_environment(evaluation)
        from replug.evals.run import evaluate as run_evaluation

        run_evaluation(evaluation)
        return
    loaded = load_for_run(config, overrides)
    from replug.train.run import evaluate as evaluate_run

    evaluate_run(loaded)
