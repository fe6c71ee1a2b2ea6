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
    rows, with_tokens = sum(use.rows for use in models), sum(use.rows_with_tokens for use in models)
    answers, sampled = sum(use.generations for use in models), sum(use.samples for use in models)
    if as_json:
        overview = {
            "file": str(cache.path),
            "bytes": cache.num_bytes(),
            "rows": rows,
            "rows_with_tokens": with_tokens,
            "generations": answers,
            "samples": sampled,
            "models": [asdict(use) | {"hit_share": _hit_share(use)} for use in models],
        }
        print(json.dumps(overview, ensure_ascii=False))
        return
    print(
        f"{cache.path}: {cache.num_bytes() / 1e6:.1f} MB, {rows} rows, {with_tokens} of them with their tokens, "
        f"{answers} answers, samples of {sampled} prompts"
    )
    table = Table()
    table.add_column("LM", overflow="fold")
    for name in ("rows", "with tokens", "answers", "sampled", "hits", "misses", "hit share", "oldest", "newest"):
        table.add_column(name, justify="right")
    for use in models:
        share, times = _hit_share(use), (use.oldest, use.newest)
        table.add_row(
            escape(use.identity),
            *map(str, (use.rows, use.rows_with_tokens, use.generations, use.samples, use.hits, use.misses)),
            "-" if share is None else f"{share:.1%}",
            *("-" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in times),
        )
    Console(width=120).print(table)


def _hit_share(use: ModelUse) -> float | None:
    """Share of the pairs and answers ever asked for that were not computed; None where nothing was asked for."""
    asked = use.hits + use.misses
    return use.hits / asked if asked else None
