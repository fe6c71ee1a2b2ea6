"""Whether a run or an evaluation may go on under a configuration that is not the one it was begun with."""

from pathlib import Path

from replug.configs.errors import UserError
from replug.configs.load import flatten
from replug.configs.schema import Config, EvaluationConfig

AnyConfig = Config | EvaluationConfig

# Keys that change neither what is computed nor in which order; a resumed run may set them anew.
MAY_CHANGE = [
    "run_dir",
    "lm.num_replicas",
    "lm.threads_per_replica",
    "lm.gpus_per_replica",
    "lm.timeout_seconds",
    "lm.max_attempts",
    "lm.url",
    "lm.api_key_env",
    "lm.max_concurrency",
    "lm.max_requests",
    "lm.max_tokens_sent",
    "index.num_builders",
    "index.threads_per_worker",
    "index.gpus_per_builder",
    "index.gpus_per_searcher",
    "index.swap",
    "index.timeout_seconds",
    "index.max_attempts",
    "resources.train",
    "resources.score",
    "resources.index",
    "train.micro_batches",
    "train.threads",
    "train.compile",
    "train.tensorboard",
    "checkpoint.every_steps",
    "checkpoint.keep_last",
    "train.log_every_steps",
    "wandb.mode",
    "wandb.project",
    "wandb.entity",
    "wandb.name",
    "ray.address",
    "ray.num_cpus",
    "ray.auth",
    "ray.object_store_mb",
    "evaluate.num_resamples",
    "evaluate.num_examples",
    "refresh.max_age_steps",
    "out",
]


def require_same(stored: AnyConfig, asked: AnyConfig, path: Path) -> None:
    """Raise UserError for the first key by which a run or an evaluation would go on as another one."""
    before, after = flatten(stored), flatten(asked)
    changed = [key for key in before | after if key not in MAY_CHANGE and before.get(key) != after.get(key)]
    if changed:
        key = changed[0]
        what, other = ("unfinished run", "run_dir") if isinstance(asked, Config) else ("evaluation", "out")
        raise UserError(
            f"{key} is {after.get(key)}, but the {what} in {path} was begun with {before.get(key)}: "
            f"resume with the same value, or give another {other}"
        )
