"""A server as a backend (`lm.url`, `lm.model`), and the probe that it must pass before a run begins.

Some servers give no log-probabilities for a prompt, and some give finite, plausible, wrong ones, which no later stage
would notice. A dozen short requests find out: scores are the same in a short and in a long text, what the server
generates has the log-probs it had when it was generated, a document helps the text it holds, and inputs that share a
request do not disturb each other. The scores of fixed texts are the server's fingerprint, by which a cache knows the
model again.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from replug.config.errors import RunError, UserError
from replug.config.schema import LMConfig
from replug.models.generation import GenerationOptions
from replug.models.http.completions_api import NoPromptLogprobs
from replug.models.http.connection import ServerError, ServerSpec
from replug.models.http.http_lm import HttpLM
from replug.models.http.request_budget import RequestBudget
from replug.models.packaged import resolve_lm_path
from replug.models.score_cache import ScoreCache

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase


# Log-probs that a server gave twice count as the same within these bounds. Bfloat16 logits between 16 and 32 lie 0.125
# apart, so single tokens of an honest server move by that and more when other texts stand beside them. Their mean over
# a text moves little. A wrong position costs nats.
MEAN_TOLERANCE_NATS = 0.15
TOLERANCE_NATS = 1.0

# How much a document must help each token of the text it holds. Language models gain several nats.
LEAST_HELP_NATS = 0.5

TEXT = " the keeper of the lighthouse painted seven wooden boats green before the storm came in from the sea"
LONGER = " and the harbour was closed for the night"
HELPFUL = f"In the old story{TEXT} and so"
OTHERS = [
    "To bake bread you need flour and water and salt and a warm oven and patience",
    "The committee met on Tuesday and agreed on a budget for the new school",
]
BEGINNINGS = [
    "one two three four one two three four one two three four one two",
    f"{HELPFUL} the keeper of the lighthouse painted seven",
    f"{OTHERS[0]} and then to bake bread you need flour and water and",
]
NUM_GENERATED = 4


def connect(spec: ServerSpec, budget: RequestBudget) -> HttpLM:
    """Return the LM of a server that passed the probe, with its fingerprint and an identity made of it.

    Raises UserError for a server that does not pass, and BudgetSpent.
    """
    lm = HttpLM(spec, budget)
    try:
        lm.fingerprint = probe(lm)
    except (UserError, RunError):
        lm.close()
        raise
    lm.look_again_at(HELPFUL, TEXT, partial(change_shortcoming, lm.fingerprint))
    lm.identity = f"{spec.model}#{hashlib.blake2b(lm.fingerprint.tobytes(), digest_size=4).hexdigest()}"
    return lm


def probe(lm: HttpLM) -> np.ndarray:
    """Return the fingerprint: log-probs (nats) of fixed texts, float32 [T]. Raises UserError for a shortcoming."""
    try:
        scores = _alone(lm, [HELPFUL, HELPFUL, *OTHERS], [TEXT, TEXT + LONGER, TEXT, TEXT])
        short, long, *others = scores
        answers = [lm.generate([beginning], GenerationOptions(NUM_GENERATED))[0] for beginning in BEGINNINGS]
        said = [(beginning, answer) for beginning, answer in zip(BEGINNINGS, answers, strict=True) if answer.text]
        echoed = _alone(lm, [beginning for beginning, _ in said], [answer.text for _, answer in said])
        shortcoming = (
            length_shortcoming(short, long)
            or count_shortcoming([short, *others])
            or generation_shortcoming([answer.token_logprobs for _, answer in said], echoed)
            or help_shortcoming(short, others)
        )
    except (ServerError, ValueError) as error:
        if not isinstance(error.__cause__, NoPromptLogprobs):
            raise UserError(f"lm.url: {lm.spec.url} does not pass the first look: {error}") from error
        raise UserError(
            f"lm.url: {lm.spec.url} gives no log-probs of the prompt ({error.__cause__}); expected completions with "
            "echo and logprobs, or vLLM and lm.api=prompt_logprobs; llama.cpp's own server and chat APIs have neither"
        ) from error
    if shortcoming is None:
        try:
            together = lm.score([HELPFUL, *OTHERS], [TEXT] * (1 + len(OTHERS)))
            shortcoming = company_shortcoming([short, *others], [score.token_logprobs for score in together])
        except (ServerError, ValueError) as error:
            shortcoming = f"answers inputs alone, but not several of them ({error}); set lm.prompts_per_request=1"
    if shortcoming:
        raise UserError(f"lm.url: {lm.spec.url} {shortcoming}")
    return np.concatenate(scores)


def agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether log-probs (nats) [T] are those of one model, but for what stands beside a text in a request."""
    if one.shape != other.shape:
        return False
    difference = np.abs(one - other)
    return bool(difference.mean() <= MEAN_TOLERANCE_NATS and difference.max() <= TOLERANCE_NATS)


def change_shortcoming(fingerprint: np.ndarray, again: np.ndarray) -> str | None:
    """Compare scores `again` [T] of a text with the fingerprint that begins with them."""
    if len(again) == 0 or not agree(fingerprint[: len(again)], again):
        return "gives a text of the probe other log-probs than then"
    return None


def length_shortcoming(short: np.ndarray, long: np.ndarray) -> str | None:
    """Compare scores of a text [T] with those of a longer one [T + M] that begins with it."""
    if len(long) <= len(short) or not agree(short, long[: len(short)]):
        return "gives the same tokens other log-probs in a longer text: a token may depend on those before it only"
    return None


def count_shortcoming(scores: Sequence[np.ndarray]) -> str | None:
    """Compare the numbers of tokens of one text after different documents."""
    counts = [len(score) for score in scores]
    if len(set(counts)) > 1:
        return f"cuts one text into different tokens after different documents ({counts} tokens); set lm.tokenizer=DIR"
    return None


def generation_shortcoming(generated: Sequence[np.ndarray], echoed: Sequence[np.ndarray]) -> str | None:
    """Compare generated tokens with the same texts sent back; texts that were cut otherwise do not count."""
    pairs = [(g, e) for g, e in zip(generated, echoed, strict=True) if len(g) == len(e) > 0]
    if not pairs:
        return "generates nothing that can be sent back to see whether its log-probs are right"
    new, again = (np.concatenate(side) for side in zip(*pairs, strict=True))
    if agree(new, again):
        return None
    return (
        f"gives a prompt's tokens the wrong log-probs: {len(new)} tokens that it generated with {new.mean():.2f} nats "
        f"each have {again.mean():.2f} when sent back (llama-cpp-python, for one, is off by a position)"
    )


def help_shortcoming(helped: np.ndarray, others: Sequence[np.ndarray]) -> str | None:
    """Compare scores of a text after a document that holds it, and after others that do not."""
    gain = float(helped.mean() - max(other.mean() for other in others))
    if gain < LEAST_HELP_NATS:
        return (
            f"gives log-probs that do not follow the text: a document that holds the very text makes it only "
            f"{gain:.2f} nats a token more likely than one that does not, expected {LEAST_HELP_NATS:g}"
        )
    return None


def company_shortcoming(alone: Sequence[np.ndarray], together: Sequence[np.ndarray]) -> str | None:
    """Compare scores of the same inputs, each in a request of its own and all in one."""
    if not all(agree(a, b) for a, b in zip(alone, together, strict=True)):
        return "gives inputs that share a request other log-probs than alone; set lm.prompts_per_request=1"
    return None


def _alone(lm: HttpLM, prefixes: Sequence[str], continuations: Sequence[str]) -> list[np.ndarray]:
    """Score one after the other, so that last bits, which depend on a server's load, are the same again."""
    return [lm.score([p], [c])[0].token_logprobs for p, c in zip(prefixes, continuations, strict=True)]


def source(lm: LMConfig) -> "ServerSource | None":
    """Return a server for a section without a path. Its tokenizer alone is enough to prepare texts by."""
    return ServerSource(lm) if lm.path is None else None


class ServerSource:
    """An `LMSource`. The server is asked and probed once, by `connect` or when its identity is first wanted."""

    roles = ()

    def __init__(self, lm: LMConfig) -> None:
        self._spec = server_spec(lm)
        self._max_tokens_sent = lm.max_tokens_sent
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

    def connect(self, budget_file: Path | None = None, cache: Path | None = None) -> None:
        if self._server is not None:
            return
        server = connect(self._spec, RequestBudget(budget_file, max_tokens=self._max_tokens_sent))
        if cache is not None:
            with closing(ScoreCache(cache)) as scores:
                server.identity = scores.identity_like(self._spec.model, server.fingerprint)
        self._server = server

    def open(self, lm: LMConfig) -> HttpLM:
        """Return the one connection: a budget file belongs to one process and one LM."""
        return self._connected()

    def open_here(self) -> HttpLM:
        return self._connected()

    def _connected(self) -> HttpLM:
        self.connect()
        assert self._server is not None
        return self._server


def server_spec(lm: LMConfig) -> ServerSpec:
    return ServerSpec(
        url=str(lm.url),
        model=str(lm.model),
        api=lm.api.value,
        tokenizer=resolve_lm_path(lm.tokenizer, "lm.tokenizer") if lm.tokenizer else None,
        api_key=os.environ.get(lm.api_key_env),
        api_key_env=lm.api_key_env,
        max_concurrency=lm.max_concurrency,
        prompts_per_request=lm.prompts_per_request,
        timeout_seconds=lm.timeout_seconds,
        max_attempts=lm.max_attempts,
    )
