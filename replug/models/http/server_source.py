"""A server as a backend (`lm.url`, `lm.model`), and the probe that it must pass before a run begins.

Some servers give no log-probabilities for a prompt, and some give finite, plausible, wrong ones, which no later stage
would notice. A dozen short requests detect both. The scores of fixed texts are the server's fingerprint, by which a
cache recognizes the model.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from replug.config.choices import ServerAPI, Teacher
from replug.config.errors import RunError, UserError
from replug.config.load import load_ask_config
from replug.config.rules import require_logprobs
from replug.config.schema import LMConfig
from replug.data.files import json_sha256
from replug.models.generation import GenerationOptions
from replug.models.http.completions_api import NoPromptLogprobs
from replug.models.http.connection import ServerError
from replug.models.http.http_lm import HttpLM, agree, server_tokenizer
from replug.models.http.request_budget import RequestBudget
from replug.models.lm_source import LMSource, says_yes
from replug.models.score_cache import ScoreCache

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

LM = TypeVar("LM", bound=HttpLM)

# The least gain per token of a text from a document that holds it. Language models gain several nats.
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
YES_OR_NO = "Paris is the capital of France.\nIs Paris in France? Answer yes or no.\nAnswer:"


class ServerLM(HttpLM):
    """A `BlackBoxLM` behind a server of OpenAI's API, such as vLLM, which is the paper's black box.

    `model` is its name there. Further keys are the section `lm`'s (`replug keys lm`), such as `tokenizer`, `api` and
    `max_tokens_sent`. The server is probed first: raises UserError if it gives no log-probs of prompts, or wrong
    ones. `close` ends its connections.

    >>> lm = ServerLM("http://127.0.0.1:8000/v1", "gpt2", tokenizer="gpt2")  # doctest: +SKIP
    >>> lm.score(["a boat"], [" on the lake"])[0].sum_logprob < 0  # doctest: +SKIP
    True
    """

    def __init__(self, url: str, model: str, **keys: Any) -> None:
        self.keys = {"lm.url": url, "lm.model": model, **{f"lm.{name}": value for name, value in keys.items()}}
        config = load_ask_config([f"{name}={json.dumps(value)}" for name, value in self.keys.items()]).lm
        require_logprobs(config)
        super().__init__(config, RequestBudget(None, max_tokens=config.max_tokens_sent))
        _probed(self, config)


def connect(config: LMConfig, budget: RequestBudget) -> HttpLM:
    """Return the LM of a server that passed the probe, with its fingerprint and an identity made of it.

    Its `max_tokens` leaves room for the one token that every request generates; None if the server does not list a
    length. Raises UserError for a server that does not pass, and BudgetSpent.
    """
    return _probed(HttpLM(config, budget), config)


def _probed(lm: LM, config: LMConfig) -> LM:
    try:
        if config.score is Teacher.logprob:
            lm.fingerprint = probe(lm)
            lm.look_again_at(HELPFUL, TEXT)
            lm.identity = f"{lm.model}#{hashlib.blake2b(lm.fingerprint.tobytes(), digest_size=4).hexdigest()}"
        else:  # with log-probs, the fingerprint covers this
            probe_teacher(lm, config.score)
            lm.identity += " chat" if config.api is ServerAPI.chat else ""
            lm.identity += f" {json_sha256(config.extra_body)[:8]}" if config.extra_body else ""
        length = lm.listed_models().get(lm.model)
        lm.max_tokens = length - 1 if length is not None else None
    except (UserError, RunError):
        lm.close()
        raise
    return lm


def _refused(lm: HttpLM, error: Exception) -> UserError:
    """Return the error of a server that failed the probe, with the models that it lists."""
    others = lm.listed_models()
    listed = f"; lm.model is {lm.model}, the server lists {lm.words(', '.join(others))}"
    return UserError(f"lm.url: {error}{listed if others and lm.model not in others else ''}")


def probe(lm: HttpLM) -> np.ndarray:
    """Return the fingerprint: log-probs (nats) of fixed texts, float32 [T]. Raises UserError for a shortcoming."""
    try:
        scores = _alone(lm, [HELPFUL, HELPFUL, *OTHERS], [TEXT, TEXT + LONGER, TEXT, TEXT])
        short, long, *others = scores
        answers = [lm.generate([beginning], GenerationOptions(NUM_GENERATED))[0] for beginning in BEGINNINGS]
        generated = [(beginning, answer) for beginning, answer in zip(BEGINNINGS, answers, strict=True) if answer.text]
        echoed = _alone(lm, [beginning for beginning, _ in generated], [answer.text for _, answer in generated])
        shortcoming = find_shortcoming(short, long, others, [answer.token_logprobs for _, answer in generated], echoed)
    except (ServerError, ValueError) as error:
        if not isinstance(error.__cause__, NoPromptLogprobs):
            raise _refused(lm, error) from error
        raise UserError(
            f"lm.url: {lm.url} gives no log-probs of the prompt ({error.__cause__}); expected completions with "
            "echo and logprobs, or vLLM and lm.api=prompt_logprobs; for other servers set lm.score=yes or answer"
        ) from error
    if shortcoming:
        raise UserError(f"lm.url: {lm.url} {shortcoming}")
    try:  # whether inputs have the same log-probs in one request as alone
        together = [score.token_logprobs for score in lm.score([HELPFUL, *OTHERS], [TEXT] * 3)]
        is_same = all(agree(*pair) for pair in zip([short, *others], together, strict=True))
    except (ServerError, ValueError):
        is_same = False
    if not is_same:
        log.warning(f"{lm.url}: inputs that share a request have other scores than alone; each goes in its own request")
        lm.inputs_per_request = 1
    return np.concatenate(scores)


def probe_teacher(lm: HttpLM, score: Teacher) -> None:
    """Ask one question. Raises UserError for a server that does not answer, or shows no yes among likely tokens."""
    options = GenerationOptions(1, num_tops=20) if score is Teacher.yes else GenerationOptions(NUM_GENERATED)
    try:
        [answer] = lm.generate([YES_OR_NO], options)
    except (ServerError, ValueError) as error:
        raise _refused(lm, error) from error
    if score is Teacher.yes and not any(map(says_yes, answer.tops)):
        shown = f"{', '.join(map(repr, answer.tops))} and no yes" if answer.tops else "no likely tokens"
        raise UserError(
            f"lm.url: {lm.url} shows {shown} for a question to answer by yes or no; expected the log-probs of its "
            "likeliest tokens (top_logprobs). Set lm.score=answer, which needs none"
        )


def find_shortcoming(
    short: np.ndarray,
    long: np.ndarray,
    others: Sequence[np.ndarray],
    generated: Sequence[np.ndarray],
    echoed: Sequence[np.ndarray],
) -> str | None:
    """Return the fault of a server's log-probs [T], or None.

    `short` is a text after a document that holds it, `long` the same with more text behind it, `others` the text after
    other documents, `generated` the answers, `echoed` the answers sent back; answers of another length do not count.
    """
    if len(long) <= len(short) or not agree(short, long[: len(short)]):
        return "gives the same tokens other log-probs in a longer text: a token may depend on those before it only"
    pairs = [(g, e) for g, e in zip(generated, echoed, strict=True) if len(g) == len(e) > 0]
    if not pairs:
        return "generates nothing that can be sent back to see whether its log-probs are right"
    new, again = (np.concatenate(side) for side in zip(*pairs, strict=True))
    if not agree(new, again):
        return (
            f"gives a prompt's tokens the wrong log-probs: {len(new)} tokens that it generated with {new.mean():.2f} "
            f"nats each have {again.mean():.2f} when sent back: it is off by a position, like "
            "llama-cpp-python, or lm.tokenizer is not the tokenizer of its model"
        )
    gain = float(short.mean() - max(other.mean() for other in others))
    if gain < LEAST_HELP_NATS:
        return (
            f"gives log-probs that do not follow the text: a document that holds the very text makes it only "
            f"{gain:.2f} nats a token more likely than one that does not, expected {LEAST_HELP_NATS:g}"
        )
    return None


def _alone(lm: HttpLM, prefixes: Sequence[str], continuations: Sequence[str]) -> list[np.ndarray]:
    """Score inputs one by one, so that last bits, which depend on a server's load, are reproducible."""
    return [lm.score([p], [c])[0].token_logprobs for p, c in zip(prefixes, continuations, strict=True)]


class ServerSource(LMSource):
    """An `LMSource` of a server. Preparing texts needs its tokenizer only.

    The server is probed once, by `connect` or when its identity is first wanted. It has one connection: a
    budget file belongs to one process and one LM.
    """

    def __init__(self, lm: LMConfig) -> None:
        self._config = lm
        self._server: HttpLM | None = None

    @property
    def identity(self) -> str:
        return self.open_here().identity

    @property
    def max_tokens(self) -> int | None:
        return self.open_here().max_tokens

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return server_tokenizer(self._config)

    def connect(self, budget_file: Path | None = None, cache: Path | None = None) -> None:
        if self._server is not None:
            return
        server = connect(self._config, RequestBudget(budget_file, max_tokens=self._config.max_tokens_sent))
        if cache is not None and self._config.score is Teacher.logprob:  # others have only a name
            with closing(ScoreCache(cache)) as scores:
                server.identity = scores.identity_like(server.model, server.fingerprint)
        server.identity += self.mark
        self._server = server

    def open_here(self) -> HttpLM:
        self.connect()
        assert self._server is not None
        return self._server
