"""A cache of LM scores and answers: is the file sound, and what does it hold?"""

import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replug.config.errors import RunError, UserError
from replug.models.score_cache import ModelUse, ScoreCache


def verify_scores(path: Path, as_json: bool) -> None:
    """Check the file, then show what it holds. Raises UserError if it is not a cache, RunError if it is damaged."""
    if not path.stat().st_size:  # opening it would make a cache of it
        raise UserError(f"{path} is empty; expected a cache of scores, such as RUN_DIR/scores.sqlite")
    cache = ScoreCache(path)
    try:
        if (damage := cache.damage()) is not None:
            raise RunError(f"{path} is damaged ({damage}): remove it, and its scores are computed again")
        show(cache, as_json)
    finally:
        cache.close()


def show(cache: ScoreCache, as_json: bool) -> None:
    """The overview on standard output: a table, or one JSON object."""
    models = cache.models()
    if as_json:
        print(json.dumps(_as_json(cache, models), ensure_ascii=False))
        return
    rows, with_tokens = sum(use.rows for use in models), sum(use.rows_with_tokens for use in models)
    answers, sampled = sum(use.generations for use in models), sum(use.samples for use in models)
    console = Console(width=120)
    size = f"{cache.num_bytes() / 1e6:.1f} MB"
    print(
        f"{cache.path}: {size}, {rows} rows, {with_tokens} of them with their tokens, {answers} answers, "
        f"samples of {sampled} prompts"
    )
    console.print(_table(models))


def _as_json(cache: ScoreCache, models: list[ModelUse]) -> dict[str, object]:
    return {
        "file": str(cache.path),
        "bytes": cache.num_bytes(),
        "rows": sum(use.rows for use in models),
        "rows_with_tokens": sum(use.rows_with_tokens for use in models),
        "generations": sum(use.generations for use in models),
        "samples": sum(use.samples for use in models),
        "models": [asdict(use) for use in models],
    }


def _table(models: list[ModelUse]) -> Table:
    table = Table()
    table.add_column("LM", overflow="fold")
    for name in ("rows", "with tokens", "answers", "sampled", "oldest", "newest"):
        table.add_column(name, justify="right")
    for use in models:
        table.add_row(
            escape(use.identity),
            *(str(number) for number in (use.rows, use.rows_with_tokens, use.generations, use.samples)),
            *(_date(seconds) for seconds in (use.oldest, use.newest)),
        )
    return table


def _date(seconds: int | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
