"""Build language models and encoders from the sections `lm` and `retriever` of a configuration.

`named_source` chooses the backend of an LM.
"""

from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from replug.config.choices import Teacher, TooLong, TrainedSide
from replug.config.errors import UserError
from replug.config.rules import tokens_read
from replug.config.schema import EnsembleConfig, LMConfig, RetrieverConfig
from replug.data.files import json_sha256
from replug.data.tokenizing import inside_rules
from replug.models.encoder import Encoder
from replug.models.ensemble import Weighting
from replug.models.hardware import resolve_dtype
from replug.models.lm_source import PYTHON, GivenSource, LMSource, LocalSource, TeacherSource, given
from replug.models.local.hf_lm import HuggingFaceSource
from replug.models.local.stand_in_lm import StandInLM
from replug.models.packaged import resolve_encoder_path, resolve_lm_path
from replug.models.pair_tokens import num_tokens
from replug.models.prompt import PROMPT, PromptTemplate
from replug.models.score_cache import CachingLM

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase

NO_LIMIT = 10**9  # a tokenizer of which transformers knows no limit has an absurd one


def lm_source(lm: LMConfig, budget_file: Path, cache: Path) -> LMSource:
    """Return the source of the LM, without loading weights; a server has answered.

    `budget_file` counts the requests to a server; `cache` is the default place of its scores. A source's mark tells
    prompts by lm.prompt and lm.chat from others. Raises UserError for a chat LM without a chat template.
    """
    source = named_source(lm)
    if lm.prompt is not None or lm.chat:
        chat = _chat_template(lm, source) if lm.chat else ""
        source.mark = f", prompt {json_sha256([lm.prompt or PROMPT, chat])[:8]}"
    source.connect(budget_file, cache_path(lm, cache))
    return source if lm.score is Teacher.logprob else TeacherSource(source, lm.score)


def _chat_template(lm: LMConfig, source: LMSource) -> str:
    """Return the LM's chat template followed by a sample prompt. Raises UserError if there is no template."""
    tokenizer, name = source.tokenizer(), lm.tokenizer or lm.path
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError(f"lm.chat is true, but the tokenizer of {name} has no chat template; expected lm.chat=false")
    template = PromptTemplate(tokenizer=tokenizer, is_chat=True)
    return f"{tokenizer.chat_template}{template.whole(None, 'a message')}{template.continuation('an answer')}"


def opened_lm(
    lm: LMConfig, source: LMSource, cache: Path, second: LMSource | None = None
) -> AbstractContextManager[CachingLM]:
    """Open the LM behind its cache, by its section with the layout, and close it at the end of the block.

    The replicas of a local LM also hold the local LM `second`, as `ScorerPool.second`.
    """
    if isinstance(source, LocalSource) and isinstance(second, LocalSource):
        opened = source.open(lm, second)
    else:
        opened = source.open(lm)
    return closing(CachingLM(opened, cache_path(lm, cache)))


def cache_path(lm: LMConfig, default: Path) -> Path:
    return Path(lm.cache).expanduser() if lm.cache else default


def prompt_template(lm: LMConfig, source: LMSource) -> PromptTemplate:
    """Return the template that joins documents and texts, and cuts them if `lm.too_long` asks for it."""
    limit = None if lm.too_long is TooLong.error else source.max_tokens
    return limited_template(lm, source, limit)


def limited_template(lm: LMConfig, source: LMSource, max_tokens: int | None) -> PromptTemplate:
    """Return the template that cuts prompts to `max_tokens`; None cuts none."""
    tokenizer = source.tokenizer() if lm.chat or max_tokens is not None else None
    return PromptTemplate(tokenizer, max_tokens, lm.prompt, lm.chat)


def tokens_added(lm: LMConfig) -> int:
    """Return the most tokens that the template adds to a document and a context."""
    source = named_source(lm)
    if lm.chat:
        _chat_template(lm, source)
        return num_tokens(lm_tokenizer(lm), limited_template(lm, source, None).whole("", ""))
    return len(PromptTemplate(prompt=lm.prompt).whole("", "").encode())


def counting_template(source: LMSource | None) -> PromptTemplate:
    """Return a template that only counts: `holds` follows from the LM's limit, whatever `lm.too_long` says.

    Every prompt fits if tokens cannot be counted: the limit is unknown, or a server's tokenizer is not set.
    """
    tokenizer = source.tokenizer() if source and source.max_tokens is not None else None
    return PromptTemplate(tokenizer, source.max_tokens if source else None)


def posterior_weighting(ensemble: EnsembleConfig, lm: LMConfig, is_asked: bool) -> Weighting:
    """Return the posterior weighting; if the LM is asked questions (`is_asked`), these move the weights first."""
    read = tokens_read(ensemble, lm) if is_asked else ensemble.read or 0
    return Weighting(prune=ensemble.prune, read=read)


def lm_tokenizer(lm: LMConfig) -> "PreTrainedTokenizerBase":
    """Return the LM's own tokenizer. Raises UserError where no tokenizer and no LM is given."""
    if lm.path is None and lm.url is None:
        raise UserError(
            "lm.path is missing: data.tokenizer is lm, so texts are cut by the LM's tokens; expected lm.path=DIR, or "
            "data.tokenizer=retriever and retriever.path=DIR"
        )
    tokenizer = named_source(lm).tokenizer()
    if tokenizer is None:
        raise UserError("lm.tokenizer is missing; expected the LM's tokenizer, to count tokens")
    return tokenizer


def lm_tokenizer_json(lm: LMConfig) -> str:
    """Return the LM's own tokenizer as JSON, with its rules inside a text. Raises UserError as `lm_tokenizer` does."""
    return inside_rules(lm_tokenizer(lm).backend_tokenizer.to_str())


def has_tokenizer(lm: LMConfig) -> bool:
    """Return whether the LM's own tokenizer is known."""
    return named_source(lm).tokenizer() is not None


def lm_max_tokens(lm: LMConfig) -> int | None:
    """Return the LM's longest input by its files, without a request to a server; None if unknown."""
    source = named_source(lm)
    if lm.path is not None:
        return source.max_tokens
    tokenizer = source.tokenizer()
    return tokenizer.model_max_length if tokenizer and tokenizer.model_max_length < NO_LIMIT else None


def named_source(lm: LMConfig) -> LMSource:
    """Return the source that the section names. Raises UserError for a path without a model."""
    if lm.path is None:
        from replug.models.http.server_source import ServerSource  # httpx, which local LMs do not need

        return ServerSource(lm)
    name, _, argument = lm.path.partition(":")
    if name == "stand_in":
        return GivenSource(StandInLM(float(argument or 0)), lm.tokens_per_batch)
    if name == PYTHON:
        return GivenSource(given(lm.path), lm.tokens_per_batch)
    return HuggingFaceSource(resolve_lm_path(lm.path), resolve_dtype(lm.dtype.value), lm.tokens_per_batch)


def load_encoder(retriever: RetrieverConfig, path: str | Path | None = None, dims: int | None = None) -> Encoder:
    """Load the retriever of the configuration, or from `path` another of its kind with both encoders of a pair.

    `dims` is `index.dims`. If documents alone are trained, it is a pair: queries keep their initial weights.
    """
    encoder = Encoder(
        str(path or retriever.path),
        retriever.similarity.value if retriever.similarity else None,
        retriever.max_tokens,
        query_prompt=retriever.query_prompt,
        document_prompt=retriever.document_prompt,
        query_path=retriever.query_path if path is None else None,
        dims=dims,
    )
    if retriever.train is TrainedSide.documents:
        encoder.split()
    return encoder


def located(retriever: RetrieverConfig) -> RetrieverConfig:
    """Return the same encoders for processes elsewhere: by absolute paths where they are folders."""
    queries = None if retriever.query_path is None else encoder_location(retriever.query_path)
    return replace(retriever, path=encoder_location(retriever.path), query_path=queries)


def encoder_location(path: str) -> str:
    """Return the folder or hub name behind an encoder's path; folders are absolute."""
    location = resolve_encoder_path(path)
    return str(Path(location).absolute()) if Path(location).exists() else location
