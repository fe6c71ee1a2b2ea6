"""A cache of LM scores and answers: is it sound, and what does it hold?

What it holds can always be computed again, so a wrong row is fixed by deleting it.
"""

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replug.config.errors import RunError, UserError
from replug.data.progress import Progress
from replug.models.answer_table import AnswerTable, GenerationCache, SampleCache
from replug.models.score_cache import Key, ModelUse, ScoreCache

log = logging.getLogger(__name__)

ROWS_BETWEEN_REPORTS = 10_000


def verify_scores(path: Path, delete_wrong: bool, as_json: bool) -> None:
    """Check the file and every row, delete what is wrong if asked to, then show what is there.

    Raises UserError for a file that is no cache, and RunError for rows that are wrong and stay.
    """
    if not path.stat().st_size:  # opening it would make a cache of it
        raise UserError(f"{path} is empty; expected a cache of scores, such as RUN_DIR/scores.sqlite")
    cache = ScoreCache(path)
    try:
        before = cache.num_bytes()
        deleted = check(cache, delete_wrong)
        if deleted:
            cache.compact()
        show(cache, {"deleted_rows": deleted, "freed_bytes": before - cache.num_bytes()}, as_json)
    finally:
        cache.close()


def check(cache: ScoreCache, delete_wrong: bool) -> int:
    """Raise RunError for a damaged file, or for wrong rows unless they are to be deleted; returns how many were."""
    damage = cache.damage()
    if damage is not None:
        raise RunError(
            f"{cache.path} is damaged ({damage}), so none of its rows can be trusted: remove it, and its scores are "
            "computed again"
        )
    tables: list[ScoreCache | AnswerTable] = [cache, GenerationCache(cache), SampleCache(cache)]
    total, wrong = sum(table.num_rows() for table in tables), [_wrong_rows(table) for table in tables]
    mistakes = [mistake for rows in wrong for mistake in rows.values()]
    if mistakes and not delete_wrong:
        raise RunError(
            f"{cache.path}: {len(mistakes)} of {total} rows are wrong, the first because {mistakes[0]}; "
            f"`replug verify {cache.path} --delete-wrong` deletes them; they are computed again when needed"
        )
    for table, rows in zip(tables, wrong, strict=True):
        table.delete_rows(list(rows))
    log.info(f"verified: {total - len(mistakes)} of {total} rows are right")
    return len(mistakes)


def show(cache: ScoreCache, done: dict[str, int], as_json: bool) -> None:
    """The overview on standard output: a table, or one JSON object."""
    models = cache.models()
    if as_json:
        print(json.dumps(_as_json(cache, models) | done, ensure_ascii=False))
        return
    rows, with_tokens = sum(use.rows for use in models), sum(use.rows_with_tokens for use in models)
    answers, sampled = sum(use.generations for use in models), sum(use.samples for use in models)
    console = Console(width=120)
    if done["deleted_rows"]:
        freed = _megabytes(done["freed_bytes"])
        console.print(f"deleted {done['deleted_rows']} rows and freed {freed}", highlight=False)
    size = _megabytes(cache.num_bytes())
    print(
        f"{cache.path}: {size}, {rows} rows, {with_tokens} of them with their tokens, {answers} answers, "
        f"samples of {sampled} prompts"
    )
    console.print(_table(models))


def _wrong_rows(table: ScoreCache | AnswerTable) -> dict[Key, str]:
    wrong = {}
    progress = Progress("rows checked", table.num_rows())
    for number, (key, mistake) in enumerate(table.check_rows(), start=1):
        if mistake is not None:
            wrong[key] = mistake
        if number % ROWS_BETWEEN_REPORTS == 0:
            progress.advance(ROWS_BETWEEN_REPORTS)
    return wrong


def _as_json(cache: ScoreCache, models: list[ModelUse]) -> dict[str, object]:
    return {
        "file": str(cache.path),
        "bytes": cache.num_bytes(),
        "rows": sum(use.rows for use in models),
        "rows_with_tokens": sum(use.rows_with_tokens for use in models),
        "generations": sum(use.generations for use in models),
        "samples": sum(use.samples for use in models),
        "models": [asdict(use) | {"hit_share": _hit_share(use)} for use in models],
    }


def _table(models: list[ModelUse]) -> Table:
    table = Table()
    table.add_column("LM", overflow="fold")
    for name in ("rows", "with tokens", "answers", "sampled", "hits", "misses", "hit share", "oldest", "newest"):
        table.add_column(name, justify="right")
    for use in models:
        share = _hit_share(use)
        table.add_row(
            escape(use.identity),
            *(str(number) for number in (use.rows, use.rows_with_tokens, use.generations, use.samples)),
            *(str(number) for number in (use.hits, use.misses)),
            "-" if share is None else f"{share:.1%}",
            *(_date(seconds) for seconds in (use.oldest, use.newest)),
        )
    return table


def _hit_share(use: ModelUse) -> float | None:
    """Share of the pairs and answers ever asked for that were not computed; None where nothing was asked for."""
    asked = use.hits + use.misses
    return use.hits / asked if asked else None


def _date(seconds: int | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
