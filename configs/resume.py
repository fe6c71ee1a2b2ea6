"""Whether a run or an evaluation may go on under a configuration that is not the one it was begun with."""

from pathlib import Path

from replug.configs.errors import UserError
from replug.configs.keys import keys_of
from replug.configs.load import flatten
from replug.configs.schema import Config, EvaluationConfig

Resumable = Config | EvaluationConfig


def require_same(stored: Resumable, asked: Resumable, path: Path) -> None:
    """Raise UserError for the first key by which a run or an evaluation would go on as another one."""
    before, after = flatten(stored), flatten(asked)
    free = {key.path for key in keys_of(type(asked)) if key.resumable}
    changed = [key for key in before | after if key not in free and before.get(key) != after.get(key)]
    if changed:
        key = changed[0]
        what, other = ("unfinished run", "run_dir") if isinstance(asked, Config) else ("evaluation", "out")
        raise UserError(
            f"{key} is {after.get(key)}, but the {what} in {path} was begun with {before.get(key)}: "
            f"resume with the same value, or give another {other}"
        )
