"""A server as a backend: `lm.url` names it, `lm.model` the LM that it serves."""

import os
from contextlib import closing
from typing import TYPE_CHECKING

from replug.config.schema import LMConfig
from replug.models.http.connection import RequestLimits, ServerSpec
from replug.models.http.http_lm import HttpLM
from replug.models.http.probe import connect
from replug.models.http.request_budget import RequestBudget
from replug.models.lm_source import LMFiles
from replug.models.packaged import resolve_lm_path
from replug.models.score_cache import ScoreCache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def source(lm: LMConfig, files: LMFiles) -> "ServerSource | None":
    """Whatever has no path here. Its tokenizer alone is enough to prepare texts by."""
    return ServerSource(lm, files) if lm.path is None else None


class ServerSource:
    """An `LMSource`. The server is asked and probed once, when its identity or its limit is first wanted.

    The budget file counts what is sent; the cache knows a model again by its probe.
    """

    roles = ()

    def __init__(self, lm: LMConfig, files: LMFiles) -> None:
        self._spec = server_spec(lm)
        self._limits = lm.max_requests, lm.max_tokens_sent
        self._files = files
        self._server: HttpLM | None = None

    @property
    def identity(self) -> str:
        return self._connected().identity

    @property
    def max_tokens(self) -> int | None:
        return self._connected().max_tokens

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        from replug.models.model_files import load_tokenizer  # seconds to import, which text alone can do without

        return load_tokenizer(self._spec.tokenizer, "lm.tokenizer") if self._spec.tokenizer else None

    def connect(self) -> None:
        self._connected()

    def open(self, lm: LMConfig) -> HttpLM:
        """The one connection: a budget file is one process's and one LM's."""
        return self._connected()

    def open_here(self) -> HttpLM:
        return self._connected()

    def _connected(self) -> HttpLM:
        if self._server is None:
            server = connect(self._spec, RequestBudget(self._files.budget, *self._limits))
            if self._files.cache is not None:
                with closing(ScoreCache(self._files.cache)) as scores:
                    server.identity = scores.identity_like(self._spec.model, server.fingerprint)
            self._server = server
        return self._server


def server_spec(lm: LMConfig) -> ServerSpec:
    return ServerSpec(
        url=str(lm.url),
        model=str(lm.model),
        api=lm.api.value,
        tokenizer=resolve_lm_path(lm.tokenizer, "lm.tokenizer") if lm.tokenizer else None,
        api_key=os.environ.get(lm.api_key_env),
        api_key_env=lm.api_key_env,
        limits=RequestLimits(lm.max_concurrency, lm.prompts_per_request, lm.timeout_seconds, lm.max_attempts),
    )
