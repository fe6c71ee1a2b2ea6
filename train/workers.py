"""The two services that live beside the trainer: the LM behind its cache, and the index."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from replug.configs.schema import Config
from replug.data.store import PreparedSet
from replug.index_workers.build import index_settings
from replug.index_workers.service import IndexService
from replug.models.build import opened_lm, prompt_template
from replug.models.caching_lm import CachingLM
from replug.models.lm_source import LMSource
from replug.models.prompt import PromptTemplate


@dataclass(frozen=True, slots=True)
class Workers:
    """The two services that live beside the trainer, and how texts are put to the LM."""

    lm: CachingLM
    index: IndexService
    template: PromptTemplate


@contextmanager
def start_workers(
    config: Config, source: LMSource, data: PreparedSet, index_root: Path, scores: Path
) -> Iterator[Workers]:
    """LM behind its cache, and index service; Ray must run. All are stopped at the end."""
    # First: scorers may wait for room, its actors may not.
    index = IndexService(index_root, index_settings(config, data))
    with opened_lm(config.lm, source, scores) as lm, closing(index):
        yield Workers(lm, index, prompt_template(config.lm, source))
