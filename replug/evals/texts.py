"""The texts that language modelling measures: spans of whole texts, or the held-out texts of a prepared set."""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from replug.config.choices import Detokenize
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import LONG_CONTEXT
from replug.config.rules import evaluation_methods
from replug.data.sources.records import FieldMap, Rejected, SourceText
from replug.data.sources.shards import of_split, plan_source_shards, read_source_shard
from replug.data.store import Corpus, PreparedSet
from replug.data.tokenizing import load_plain, token_offsets
from replug.evals.folder import EvaluationFolder
from replug.evals.spans import (
    MeasuredText,
    ScoredSpan,
    SpanRule,
    TokenBorders,
    detokenized_wikitext,
    draw_evenly,
    long_context,
    scored_span,
    spans_of,
    unit_starts,
)
from replug.models.build import lm_max_tokens, lm_tokenizer_json
from replug.models.preparing import prepared_set

log = logging.getLogger(__name__)

SPLIT = "test"  # of a dataset on the hub that names none


def read_spans(config: EvaluationConfig, corpus: Corpus | None) -> list[ScoredSpan]:
    """`texts.max_examples` of them, drawn evenly by the seed."""
    if config.texts.path:
        spans = _spans_of_texts(config)
    else:
        out = EvaluationFolder(Path(config.out).expanduser())
        data = corpus if isinstance(corpus, PreparedSet) else prepared_set(config.run_config(), out.data)
        rows = draw_evenly(len(data.heldout), config.texts.max_examples, config.seed)
        spans = [scored_span(example) for example in data.heldout.examples(rows)]
    if alone := sum(not span.query.strip() for span in spans):
        log.info(f"{alone} of {len(spans)} spans have nothing before them: nothing is retrieved for them")
    return spans


def token_texts(config: EvaluationConfig) -> Callable[[str], list[str]]:
    """Cuts a text into the texts of the LM's tokens, which join to it."""
    tokenizer = load_plain(lm_tokenizer_json(config.lm))

    def cut(text: str) -> list[str]:
        [offsets] = token_offsets(tokenizer, [text])
        borders = [0, *(offsets[token][1] for token in range(len(offsets)))]
        return [text[start:end] for start, end in itertools.pairwise(borders)]

    return cut


def _spans_of_texts(config: EvaluationConfig) -> list[ScoredSpan]:
    keys = config.texts
    counted_by = config.lm
    if keys.tokenizer is not None:  # several LMs are to be measured on the same spans of the same texts
        counted_by = replace(config.lm, path=keys.tokenizer, url=None, model=None, tokenizer=None)
    tokenizer = load_plain(lm_tokenizer_json(counted_by))
    rule = SpanRule(keys.scored_tokens, keys.context_tokens, keys.query_tokens, keys.scored_tokens)
    texts = []
    for one in _texts(config):
        is_wikitext = keys.detokenize is Detokenize.wikitext
        as_read = detokenized_wikitext(one.text) if is_wikitext else (one.text, unit_starts(one.text))
        texts.append(MeasuredText(one.id, one.domain, *as_read))
    spans = [span for text in texts for span in spans_of(text, tokenizer, rule)]
    drawn = [spans[row] for row in draw_evenly(len(spans), keys.max_examples, config.seed)]
    if not any(method.source == LONG_CONTEXT for method in evaluation_methods(config)):
        return drawn
    limit, own = _long_context_tokens(config), load_plain(lm_tokenizer_json(config.lm))
    measured = {span.source for span in drawn}
    known = {text.id: (text.text, TokenBorders.of(own, text.text)) for text in texts if text.id in measured}
    return [replace(span, long_context=long_context(*known[str(span.source)], span, limit)) for span in drawn]


def _long_context_tokens(config: EvaluationConfig) -> int | None:
    """Return the tokens of the LM's longest input; None where it has no limit. Raises UserError for a server."""
    if config.lm.url:
        raise UserError(f"methods: {LONG_CONTEXT} needs the length of the LM's longest input; expected lm.path=DIR")
    return lm_max_tokens(config.lm)


def _texts(config: EvaluationConfig) -> Iterator[SourceText]:
    data = config.data
    fields = FieldMap(data.text_field, data.id_field, data.domain_field, data.new_text_at)
    try:
        shards = plan_source_shards(of_split(str(config.texts.path), SPLIT), in_one_piece=data.new_text_at is not None)
    except UserError as error:
        raise UserError(str(error).replace("data.source", "texts.path")) from error
    for source_shard in shards:
        for _, item in read_source_shard(source_shard, fields):
            if isinstance(item, Rejected):
                raise UserError(f"texts.path: {item}; every text must be readable to be measured whole")
            yield item
