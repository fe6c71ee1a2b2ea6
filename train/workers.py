"""The two services that live beside the trainer: the LM behind its cache, and the index."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from replug.configs.schema import Config
from replug.data.store import PreparedSet
from replug.index_workers.build import index_settings
from replug.index_workers.service import IndexService
from replug.models.build import cache_path, open_lm, prompt_template
from replug.models.caching_lm import CachingLM
from replug.models.http.http_lm import HttpLM
from replug.models.prompt import PromptTemplate
from replug.models.scorer_pool import LMSpec, ScorerPool


@dataclass(frozen=True, slots=True)
class Workers:
    """The two services that live beside the trainer, and how texts are put to the LM."""

    pool: ScorerPool | HttpLM
    lm: CachingLM  # round the pool
    index: IndexService
    template: PromptTemplate


@contextmanager
def start_workers(
    config: Config, source: LMSpec | HttpLM, data: PreparedSet, index_root: Path, scores: Path
) -> Iterator[Workers]:
    """LM behind its cache, and index service; Ray must run. All are stopped at the end."""
    # First: scorers may wait for room, its actors may not.
    index = IndexService(index_root, index_settings(config, data))
    pool = open_lm(config.lm, source)
    lm = CachingLM(pool, cache_path(config.lm, scores))
    try:
        yield Workers(pool, lm, index, prompt_template(config.lm, source))
    finally:
        index.close()
        pool.close()
        lm.close()  # last: the pool's answers are stored until it is closed
