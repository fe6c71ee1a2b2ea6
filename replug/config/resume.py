"""Whether a run or an evaluation may go on under a configuration that is not the one it was begun with.

A run may go on with more steps than it was begun with; nothing else that changes what is computed may differ.
"""

from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.keys import keys_of
from replug.config.load import flatten
from replug.config.schema import Config

Resumable = Config | EvaluationConfig
STEPS = "train.max_steps"


def require_same(stored: Resumable, asked: Resumable, path: Path, what: str = "") -> None:
    """Raise UserError for the first key by which a run or an evaluation would go on as another one.

    `what` it is that is in `path`, such as `finished run`.
    """
    before, after = flatten(stored), flatten(asked)
    free = {key.path for key in keys_of(type(asked)) if key.resumable}
    if has_more_steps(stored, asked):
        free |= {STEPS, "train.epochs"}
    changed = [key for key in before | after if key not in free and before.get(key) != after.get(key)]
    if changed:
        key = changed[0]
        kind, other = ("unfinished run", "run_dir") if isinstance(asked, Config) else ("evaluation", "out")
        raise UserError(
            f"{key} is {after.get(key)}, but the {what or kind} in {path} was begun with {before.get(key)}: "
            f"resume with the same value, or give another {other}"
        )


def has_more_steps(stored: Resumable, asked: Resumable) -> bool:
    """Whether a run is asked to go on beyond the steps that it was begun with."""
    return isinstance(stored, Config) and isinstance(asked, Config) and asked.train.max_steps > stored.train.max_steps
