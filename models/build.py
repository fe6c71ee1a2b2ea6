"""From the sections `lm` and `retriever` of a configuration to language models and encoders."""

import os
from contextlib import closing
from pathlib import Path

from replug.configs.errors import UserError
from replug.configs.schema import LMConfig, RetrieverConfig, TooLong
from replug.data.tokenizing import word_tokenizer
from replug.models.encoder import Encoder
from replug.models.hardware import dtype_name
from replug.models.http.connection import ServerSpec
from replug.models.http.http_lm import HttpLM
from replug.models.http.probe import connect
from replug.models.http.request_budget import RequestBudget
from replug.models.local.hf_lm import load_tokenizer
from replug.models.local.stand_in_lm import WORD
from replug.models.packaged import resolve_encoder_path, resolve_lm_path
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import ScoreCache
from replug.models.scorer_pool import LMSpec, ScorerPool


def lm_source(lm: LMConfig, budget_file: Path, cache: Path) -> LMSpec | HttpLM:
    """The LM before anything heavy starts: where local weights are, or the server, which is asked and probed now.

    What a server is sent is booked in `budget_file`; `cache` knows it again by its probe.
    """
    if lm.url is None:
        path = str(lm.path)
        resolved = path if LMSpec(path).is_stand_in else resolve_lm_path(path)
        return LMSpec(resolved, dtype_name(lm.dtype.value), lm.tokens_per_batch, lm.compile)
    server = connect(_server_spec(lm), RequestBudget(budget_file, lm.max_requests, lm.max_tokens_sent))
    with closing(ScoreCache(cache_path(lm, cache))) as scores:
        server.identity = scores.identity_like(str(lm.model), server.fingerprint)
    return server


def _server_spec(lm: LMConfig) -> ServerSpec:
    return ServerSpec(
        url=str(lm.url),
        model=str(lm.model),
        api=lm.api.value,
        tokenizer=resolve_lm_path(lm.tokenizer) if lm.tokenizer else None,
        api_key=os.environ.get(lm.api_key_env),
        api_key_env=lm.api_key_env,
        max_concurrency=lm.max_concurrency,
        prompts_per_request=lm.prompts_per_request,
        timeout_seconds=lm.timeout_seconds,
        max_attempts=lm.max_attempts,
    )


def cache_path(lm: LMConfig, default: Path) -> Path:
    return Path(lm.cache).expanduser() if lm.cache else default


def open_lm(lm: LMConfig, source: LMSpec | HttpLM) -> ScorerPool | HttpLM:
    """The LM at work; Ray must run where its weights are local."""
    if isinstance(source, HttpLM):
        return source
    return ScorerPool(
        source, lm.num_replicas, lm.threads_per_replica, lm.gpus_per_replica, lm.timeout_seconds, lm.max_attempts
    )


def prompt_template(lm: LMConfig, source: LMSpec | HttpLM) -> PromptTemplate:
    """How documents and texts are joined, and cut where `lm.too_long` asks for it."""
    if lm.too_long is TooLong.error or source.max_tokens is None:
        return PromptTemplate(lm.separator)
    return PromptTemplate(lm.separator, load_tokenizer(lm_tokenizer_path(lm)), source.max_tokens)


def lm_tokenizer_path(lm: LMConfig) -> str:
    """Folder or hub name of the LM's own tokenizer. Raises UserError for a server whose tokenizer is not given."""
    name = lm.tokenizer or lm.path
    if name is None:
        raise UserError("lm.tokenizer is missing; expected the server's tokenizer, whose tokens are to be counted")
    return resolve_lm_path(name)


def lm_tokenizer_json(lm: LMConfig) -> str:
    """The LM's own tokenizer as JSON; the stand-in's tokens are words."""
    if lm.path and LMSpec(lm.path).is_stand_in:
        return word_tokenizer(WORD.pattern)
    return str(load_tokenizer(lm_tokenizer_path(lm)).backend_tokenizer.to_str())


def load_encoder(retriever: RetrieverConfig, path: str | Path | None = None) -> Encoder:
    """The retriever of the configuration, or another one of its kind."""
    folder = str(path) if path is not None else resolve_encoder_path(retriever.path)
    return Encoder(folder, retriever.similarity.value, retriever.max_tokens)


def encoder_location(retriever: RetrieverConfig) -> str:
    """What `load_encoder` reads by default; an absolute path where it is a folder, for processes elsewhere."""
    location = resolve_encoder_path(retriever.path)
    return str(Path(location).absolute()) if Path(location).exists() else location
