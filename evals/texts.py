"""The texts that language modelling measures: windows of whole texts, or the held-out texts of a prepared set."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from replug.configs.errors import UserError
from replug.configs.schema import EvaluationConfig
from replug.data.records import Window
from replug.data.sources.records import FieldMap, SourceText
from replug.data.sources.rejected import Rejected
from replug.data.sources.shards import plan_source_shards, read_source_shard
from replug.data.store import Corpus, PreparedSet
from replug.data.tokenizing import load_plain, token_offsets
from replug.evals.folder import EvaluationFolder
from replug.evals.windows import windows_of
from replug.models.build import lm_tokenizer_json
from replug.models.preparing import prepared_set

log = logging.getLogger(__name__)


def read_windows(config: EvaluationConfig, corpus: Corpus | None) -> list[Window]:
    """The first `texts.max_windows`."""
    windows = list(_windows(config, corpus))[: config.texts.max_windows]
    if alone := sum(not window.context.strip() for window in windows):
        log.info(f"{alone} of {len(windows)} windows begin a text: nothing is retrieved for them")
    return windows


def token_texts(config: EvaluationConfig) -> Callable[[str], list[str]]:
    """Cuts a text into the texts of the LM's tokens, which join to it."""
    tokenizer = load_plain(lm_tokenizer_json(config.lm))

    def cut(text: str) -> list[str]:
        [offsets] = token_offsets(tokenizer, [text])
        borders = [0, *(offsets[token][1] for token in range(len(offsets)))]
        return [text[start:end] for start, end in itertools.pairwise(borders)]

    return cut


def _windows(config: EvaluationConfig, corpus: Corpus | None) -> Iterable[Window]:
    if config.texts.path:
        tokenizer = load_plain(lm_tokenizer_json(config.lm))
        return windows_of(_texts(config), tokenizer, config.texts.window)
    data = (
        corpus
        if isinstance(corpus, PreparedSet)
        else prepared_set(config.run_config(), EvaluationFolder(Path(config.out).expanduser()).data)
    )
    return data.heldout.windows()


def _texts(config: EvaluationConfig) -> Iterator[SourceText]:
    data = config.data
    fields = FieldMap(data.text_field, data.id_field, data.domain_field, data.new_text_at, data.max_text_characters)
    for source_shard in plan_source_shards(str(config.texts.path), in_one_piece=data.new_text_at is not None):
        for _, item in read_source_shard(source_shard, fields):
            if isinstance(item, Rejected):
                raise UserError(f"texts.path: {item}; every text must be readable to be measured whole")
            yield item
