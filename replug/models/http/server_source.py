"""A server as a backend (`lm.url`, `lm.model`), and what it must show before a run begins.

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
from typing import TYPE_CHECKING

import numpy as np

from replug.config.errors import RunError, UserError
from replug.config.schema import LMConfig
from replug.models.http.completions_api import NoPromptLogprobs
from replug.models.http.connection import ServerError, ServerSpec
from replug.models.http.http_lm import HttpLM
from replug.models.http.request_budget import RequestBudget
from replug.models.lm_source import LMFiles
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
    """The LM of a server that has passed the probe, with its fingerprint and an identity made of it.

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
    """The fingerprint: log-probs (nats) of fixed texts, float32 [T]. Raises UserError that names what is missing."""
    try:
        scores = _alone(lm, [HELPFUL, HELPFUL, *OTHERS], [TEXT, TEXT + LONGER, TEXT, TEXT])
        short, long, *others = scores
        said = [(beginning, *lm.generate_scored([beginning], NUM_GENERATED)[0]) for beginning in BEGINNINGS]
        said = [answer for answer in said if answer[1]]
        echoed = _alone(lm, [beginning for beginning, _, _ in said], [text for _, text, _ in said])
        shortcoming = (
            length_shortcoming(short, long)
            or count_shortcoming([short, *others])
            or generation_shortcoming([logprobs for _, _, logprobs in said], echoed)
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
    """`again` [T] are the scores of the text that `fingerprint` begins with."""
    if len(again) == 0 or not agree(fingerprint[: len(again)], again):
        return "gives a text of the probe other log-probs than then"
    return None


def length_shortcoming(short: np.ndarray, long: np.ndarray) -> str | None:
    """`long` [T + M] begins with the tokens of `short` [T]."""
    if len(long) <= len(short) or not agree(short, long[: len(short)]):
        return "gives the same tokens other log-probs in a longer text: a token may depend on those before it only"
    return None


def count_shortcoming(scores: Sequence[np.ndarray]) -> str | None:
    """All are scores of one text after different documents."""
    counts = [len(score) for score in scores]
    if len(set(counts)) > 1:
        return f"cuts one text into different tokens after different documents ({counts} tokens); set lm.tokenizer=DIR"
    return None


def generation_shortcoming(generated: Sequence[np.ndarray], echoed: Sequence[np.ndarray]) -> str | None:
    """Log-probs of generated tokens, and of the same texts sent back; texts that were cut otherwise do not count."""
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
    """Scores of a text after a document that holds it, and after others that do not."""
    gain = float(helped.mean() - max(other.mean() for other in others))
    if gain < LEAST_HELP_NATS:
        return (
            f"gives log-probs that do not follow the text: a document that holds the very text makes it only "
            f"{gain:.2f} nats a token more likely than one that does not, expected {LEAST_HELP_NATS:g}"
        )
    return None


def company_shortcoming(alone: Sequence[np.ndarray], together: Sequence[np.ndarray]) -> str | None:
    """Scores of the same inputs, each in a request of its own and all in one."""
    if not all(agree(a, b) for a, b in zip(alone, together, strict=True)):
        return "gives inputs that share a request other log-probs than alone; set lm.prompts_per_request=1"
    return None


def _alone(lm: HttpLM, prefixes: Sequence[str], continuations: Sequence[str]) -> list[np.ndarray]:
    """One after the other, so that a server's last bits, which depend on what it has in hand, are the same again."""
    return [lm.score([p], [c])[0].token_logprobs for p, c in zip(prefixes, continuations, strict=True)]


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
        self._max_tokens_sent = lm.max_tokens_sent
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
            server = connect(self._spec, RequestBudget(self._files.budget, max_tokens=self._max_tokens_sent))
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
        max_concurrency=lm.max_concurrency,
        prompts_per_request=lm.prompts_per_request,
        timeout_seconds=lm.timeout_seconds,
        max_attempts=lm.max_attempts,
    )
