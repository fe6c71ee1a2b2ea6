"""`replug cache`: what a cache of LM scores holds, whether it is sound, and less of it.

Scores can always be computed again, so all that is ever wrong with a cache is mended by deleting: rows that
are wrong, LMs that are no longer used, rows that are old. Every deletion ends with the space given back.
"""

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replug.configs.errors import RunError, UserError
from replug.data.progress import Progress
from replug.models.score_cache import Key, ModelUse, ScoreCache

log = logging.getLogger(__name__)

SECONDS_PER_DAY = 86_400
ROWS_BETWEEN_REPORTS = 10_000


@dataclass(frozen=True, slots=True)
class Prune:
    """Which rows go: of LMs whose identity begins so, and at least so many days old."""

    lm_prefix: str | None = None
    older_than_days: float | None = None

    @property
    def is_asked(self) -> bool:
        return self.lm_prefix is not None or self.older_than_days is not None


def run_cache(path: Path, prune: Prune, verify: bool, prune_bad: bool, as_json: bool) -> None:
    """Check, delete, then show what is there.

    Raises UserError for a file that is no cache, and RunError for rows that are wrong and stay.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a cache of scores, such as RUN_DIR/scores.sqlite")
    cache = ScoreCache(path)
    try:
        before = cache.num_bytes()
        deleted = check(cache, prune_bad) if verify or prune_bad else 0
        deleted += delete(cache, prune) if prune.is_asked else 0
        if prune_bad or prune.is_asked:
            cache.compact()
        show(cache, {"deleted_rows": deleted, "freed_bytes": before - cache.num_bytes()}, as_json)
    finally:
        cache.close()


def check(cache: ScoreCache, prune_bad: bool) -> int:
    """Raise RunError for a damaged file, or for wrong rows unless they are to be deleted; returns how many were."""
    damage = cache.damage()
    if damage is not None:
        raise RunError(
            f"{cache.path} is damaged ({damage}), so none of its rows can be trusted: remove it, and its scores are "
            "computed again"
        )
    total, wrong = cache.num_rows(), _wrong_rows(cache)
    if wrong and not prune_bad:
        raise RunError(
            f"{cache.path}: {len(wrong)} of {total} rows are wrong, the first because {next(iter(wrong.values()))}; "
            f"`replug cache {cache.path} --prune-bad` deletes them, and they are computed again when they are needed"
        )
    cache.delete_rows(list(wrong))
    log.info(f"verified: {total - len(wrong)} of {total} rows are right")
    return len(wrong)


def delete(cache: ScoreCache, prune: Prune) -> int:
    """Delete what `prune` names; returns the number of rows."""
    known = [use.identity for use in cache.models()]
    chosen = [identity for identity in known if identity.startswith(prune.lm_prefix or "")]
    if prune.lm_prefix is not None and not chosen:
        raise UserError(
            f"--prune-lm: no LM in {cache.path} has an identity that begins with {prune.lm_prefix!r}; "
            f"it holds {', '.join(known) or 'none'}"
        )
    # A row of this very second counts as older than 0 days.
    before = time.time() + 1 - (prune.older_than_days or 0) * SECONDS_PER_DAY
    return cache.delete_models(chosen, before)


def show(cache: ScoreCache, done: dict[str, int], as_json: bool) -> None:
    """The overview on standard output: a table, or one JSON object."""
    models = cache.models()
    if as_json:
        print(json.dumps(_as_json(cache, models) | done, ensure_ascii=False))
        return
    rows, with_tokens = sum(use.rows for use in models), sum(use.rows_with_tokens for use in models)
    console = Console(width=120)
    if done["deleted_rows"]:
        freed = _megabytes(done["freed_bytes"])
        console.print(f"deleted {done['deleted_rows']} rows and freed {freed}", highlight=False)
    size = _megabytes(cache.num_bytes())
    print(f"{cache.path}: {size}, {rows} rows, {with_tokens} of them with their tokens")
    console.print(_table(models))


def _wrong_rows(cache: ScoreCache) -> dict[Key, str]:
    wrong = {}
    progress = Progress("rows checked", cache.num_rows())
    for number, (key, mistake) in enumerate(cache.check_rows(), start=1):
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
        "models": [asdict(use) | {"hit_share": _hit_share(use)} for use in models],
    }


def _table(models: list[ModelUse]) -> Table:
    table = Table()
    table.add_column("LM", overflow="fold")
    for name in ("rows", "with tokens", "hits", "misses", "hit share", "oldest", "newest"):
        table.add_column(name, justify="right")
    for use in models:
        share = _hit_share(use)
        table.add_row(
            escape(use.identity),
            *(str(number) for number in (use.rows, use.rows_with_tokens, use.hits, use.misses)),
            "-" if share is None else f"{share:.1%}",
            *(_date(seconds) for seconds in (use.oldest, use.newest)),
        )
    return table


def _hit_share(use: ModelUse) -> float | None:
    """Share of the pairs ever asked for that were not computed; None where nothing was asked for."""
    asked = use.hits + use.misses
    return use.hits / asked if asked else None


def _date(seconds: int | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
