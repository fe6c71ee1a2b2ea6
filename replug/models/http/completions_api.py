"""The OpenAI-compatible completions API for scoring and answers: requests, and the parsing of answers.

Answers are not trusted: choices are ordered by their index, the text must equal the sent text, and counts, lengths and
numbers are checked. `IllFormed` is a fault that may pass; a border inside a token is a permanent UnscorableText. No
message here quotes an answer, since a server may repeat the key.

Payloads and parsing follow OpenAI's and vLLM's completions. `request` converts a payload to another API (`lm.api`), and
`completion` converts its answer back: Together shows the log-probs of a prompt in a list beside the choices; in a chat
a prompt is the user's message, and no continuation is scored.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.models.black_box_lm import UnscorableText
from replug.models.generation import Generated, GenerationOptions, Stop, by_text, stop_texts
from replug.models.http.connection import FILTERED, IllFormed
from replug.models.pair_tokens import PairIds

BROKEN = "\ufffd"  # how vLLM shows a part of a character
USE_IDS = "set lm.tokenizer=DIR, the folder of the server's tokenizer, and token ids are sent instead of text"
LEAST_LOGPROB, MOST_LOGPROB = -999.0, 1e-2  # of a token; exclusive, and a little is rounding
CONTEXT_LENGTHS = ("max_model_len", "context_length", "context_window")  # of vLLM and SGLang, of routers, of Groq
MOST_PLAUSIBLE_TOKENS = 10**12  # of one request; more is nonsense
MOST_ANSWER_BYTES_PER_TOKEN = 512  # about 100 are needed: a token's text and log-prob, twice with the list of tops
MOST_OTHER_ANSWER_BYTES = 1 << 20
CHAT_TOKENS = 256  # at most, of a chat template round one message, with its system prompt
MOST_TOPS_OF_COMPLETIONS, MOST_TOPS = 5, 20  # likeliest tokens that completions show, and chats and vLLM

NO_ANSWER_LOGPROB = -20.0  # of a filtered answer: no vote, and no yes
# Many servers leave the reasoning in the text.
THOUGHT = re.compile(r"\s*<(think|thinking|reasoning)>.*?(?:</\1>\s*|\Z)", re.DOTALL)
REASONING = (
    "set lm.extra_body to what the server knows, such as '{chat_template_kwargs: {enable_thinking: false}}' (vLLM, "
    "SGLang), '{reasoning_effort: minimal}' (OpenAI), or '{max_tokens: 2000}'"
)
THOUGHT_END = "</think>"  # where the chat template had begun the thought
# Fields that a server may refuse: replug cuts at the stop itself, and max_tokens has another name.
DRAWING = ("temperature", "top_p", "seed")
OPTIONAL = (*DRAWING, "stop", "max_tokens")
NUMBER_OF_TOKENS = {"max_tokens", "max_completion_tokens"}


class NoPromptLogprobs(IllFormed):
    """An answer without log-probabilities of the prompt."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A continuation to score after its prefix; `row` names it in errors. `ids` are sent if set."""

    row: int
    prefix: str
    continuation: str
    ids: PairIds | None

    @property
    def name(self) -> str:
        return f"the continuation of input {self.row}"

    @property
    def beginning(self) -> str | list[int]:
        return self.prefix if self.ids is None else self.ids[0]

    @property
    def whole(self) -> str | list[int]:
        return self.prefix + self.continuation if self.ids is None else [*self.ids[0], *self.ids[1]]


# Log-probs (nats) of a continuation that the server scored, float32 [T], and its tokens where the server cut the text.
Scored = tuple[np.ndarray, tuple[str, ...]]


def context_lengths(models: Any) -> dict[str, int | None]:
    """Return the models that `GET /models` lists, with their context lengths in tokens, or None.

    Servers differ in the form of the list; unknown entries are left out.
    """
    listed = models.get("data") if isinstance(models, dict) else models  # Together's is a bare list
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    return {card["id"]: _length(card) for card in cards if isinstance(card.get("id"), str)}


def _length(card: dict) -> int | None:
    return next((card[key] for key in CONTEXT_LENGTHS if isinstance(card.get(key), int)), None)


def score_payload(api: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return a request for scores. It generates one token, the fewest that every server takes."""
    how = {"echo": True, "logprobs": 1} if api == "echo" else {"prompt_logprobs": 0}
    return {"prompt": [pair.whole for pair in pairs], "max_tokens": 1, "temperature": 0, **how}


def generate_payload(api: str, pair: Pair, max_new_tokens: int, stop: Stop, num_tops: int = 1) -> dict[str, Any]:
    """Return a request that continues the prefix greedily and shows up to `num_tops` likeliest tokens."""
    logprobs = min(max(1, num_tops), MOST_TOPS_OF_COMPLETIONS if api == "echo" else MOST_TOPS)
    options: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": 0, "logprobs": logprobs}
    if stops := stop_texts(stop):
        options["stop"] = stops
    return {"prompt": [pair.beginning], **options}


def sample_payload(api: str, pair: Pair, options: GenerationOptions) -> dict[str, Any]:
    """Return a request for draws. Servers refuse several greedy answers, which are all the same."""
    how = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
    payload = generate_payload(api, pair, options.max_new_tokens, options.stop) | how
    return payload if options.temperature == 0 else payload | {"n": options.num_samples}


def most_tokens(api: str, payload: dict[str, Any]) -> int:
    """Return a bound on the tokens of a request: one for each byte of a text, and two that open it."""
    prompts = payload["prompt"]
    lengths = [len(prompt.encode()) + 2 if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    if api == "chat":
        lengths.append(CHAT_TOKENS)
    return sum(lengths) + len(prompts) * int(payload.get("n", 1)) * int(payload["max_tokens"])


def tokens_used(api: str, body: Any, payload: dict[str, Any]) -> int:
    """Return the tokens that the server counted for a request; its largest cost if that count is impossible."""
    total = _usage(body, "total_tokens")
    sent = sum(1 if isinstance(prompt, str) else len(prompt) for prompt in payload["prompt"])
    is_possible = total is not None and sent <= total < MOST_PLAUSIBLE_TOKENS
    return total if is_possible and total is not None else most_tokens(api, payload)


def _usage(body: Any, name: str) -> int | None:
    """Return a count from the server's usage, or None if it is missing."""
    usage = body.get("usage") if isinstance(body, dict) else None
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if _is_count(count) else None


def _is_count(value: Any) -> bool:
    """Return whether JSON's value is a whole number of 0 or more; true is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_scores(api: str, pairs: Sequence[Pair], body: Any) -> list[Scored]:
    """Return the continuations' scores in the order of `pairs`. Raises IllFormed and UnscorableText."""
    return [_read_pair(api, *row) for row in zip(pairs, _choices(body, len(pairs)), strict=True)]


def read_generated(body: Any, num_samples: int = 1) -> list[tuple[Generated, bool]]:
    """Return the answers to a prompt, and whether the server ended each itself, before its longest.

    Answers have the tokens of the prompt, None where the server does not count them, and the likeliest first tokens if
    they are shown. Raises IllFormed, and UserError for a server without `n`.
    """
    choices = body.get("choices") if isinstance(body, dict) else None
    if num_samples > 1 and isinstance(choices, list) and len(choices) == 1:
        raise UserError(
            f"the server draws one answer after a prompt where n={num_samples} were requested; expected a server whose "
            "/v1/completions knows n, such as vLLM, or local weights"
        )
    prompt_tokens = _usage(body, "prompt_tokens") or None  # 0: the server does not count
    return [well_formed(partial(_generated, one, prompt_tokens)) for one in _choices(body, num_samples)]


def _choices(body: Any, count: int) -> list[dict]:
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list):
        raise IllFormed("the answer has no choices")
    by_index = {
        choice["index"]: choice for choice in choices if isinstance(choice, dict) and _is_count(choice.get("index"))
    }
    if len(choices) != count or set(by_index) != set(range(count)):
        raise IllFormed(f"the answer has {len(choices)} choices where {count} were wanted, or not one for each index")
    return [by_index[index] for index in range(count)]


def _read_pair(api: str, pair: Pair, choice: dict) -> Scored:
    if pair.ids is None:
        return well_formed(lambda: _by_text(pair, *_echoed(choice)))
    before, after = pair.ids
    ids = [*before, *after]
    values: list[float | None] = well_formed(lambda: _echoed(choice)[1] if api == "echo" else _of_ids(ids, choice))
    if len(values) not in (len(ids), len(ids) + 1):  # with or without that of the generated token
        kind = NoPromptLogprobs if len(values) == 1 else IllFormed
        raise kind(f"input {pair.row} has {len(ids)} tokens, but the answer has {len(values)} log-probs")
    return _checked(values[len(before) : len(ids)], pair.name), ()


def well_formed(read: Callable[[], Any]) -> Any:
    """Return the result of `read`. Raises IllFormed where it fails on the answer's shape."""
    try:
        return read()
    except (KeyError, TypeError, AttributeError) as error:
        raise IllFormed(f"the answer is not of the expected form ({type(error).__name__})") from error


def _echoed(choice: dict) -> tuple[list[str], list[float | None]]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not logprobs.get("token_logprobs"):
        raise NoPromptLogprobs("the answer has no token_logprobs")
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    if len(tokens) != len(values):
        raise IllFormed(f"the answer has {len(tokens)} tokens but {len(values)} log-probs")
    return tokens, values


def _generated(choice: dict, prompt_tokens: int | None) -> tuple[Generated, bool]:
    text = choice["text"]
    # JSON's escapes can hold half a surrogate pair, which no file takes.
    if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):
        raise IllFormed("the answer has no text")
    shown = choice.get("logprobs") or {}  # nothing generated, no log-probs
    logprobs = _checked(shown.get("token_logprobs") or [], "an answer")
    tops = (shown.get("top_logprobs") or [{}])[0] or {}
    _checked(list(tops.values()), "the likeliest of an answer")
    is_ended = choice.get("finish_reason") == "stop"
    return Generated(text, logprobs, prompt_tokens=prompt_tokens, tops=tops), is_ended


def _of_ids(ids: Sequence[int], choice: dict) -> list[float | None]:
    """Read vLLM's `prompt_logprobs`: for each position but the first an object keyed by token id."""
    entries = choice.get("prompt_logprobs")
    if entries is None:
        raise NoPromptLogprobs("the answer has no prompt_logprobs")
    if len(entries) != len(ids):
        raise IllFormed(f"the answer has {len(entries)} prompt_logprobs for {len(ids)} tokens")
    return [entry[str(i)]["logprob"] if entry else None for i, entry in zip(ids, entries, strict=True)]


def _checked(values: Sequence[float | None], owner: str) -> np.ndarray:
    """Return float32 log-probs. Raises IllFormed, naming their `owner`, for impossible values.

    Python's JSON accepts NaN, infinity, and whole numbers of any size. Servers write -9999 and the like for minus
    infinity (vLLM, of a token that top_k forbids) and for a token that is not among the likeliest (OpenAI).
    """
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise IllFormed(f"the log-probs of {owner} are not all numbers")
    logprobs = np.array([value if abs(value) < 1e9 else np.nan for value in values], dtype=np.float64)
    bad = np.flatnonzero(~((logprobs > LEAST_LOGPROB) & (logprobs < MOST_LOGPROB)))
    if len(bad):
        value = logprobs[bad[0]]
        problem = f"is {value:g}" if np.isfinite(value) else "is not finite"
        raise IllFormed(
            f"the log-prob of token {bad[0]} of {owner} {problem}; expected one between {LEAST_LOGPROB:g} and 0, of "
            "each token and before top_k and top_p (vLLM: --logprobs-mode raw_logprobs)"
        )
    return logprobs.astype(np.float32)


def _by_text(pair: Pair, tokens: list[str], values: list[float | None]) -> Scored:
    """Return the continuation's part, found by the tokens' texts; servers count `text_offset` in different units."""
    text = pair.prefix + pair.continuation
    opening = 0 if tokens[0] == BROKEN or text.startswith(tokens[0]) else 1  # a start token of the server's own
    joined = "".join(tokens[opening:])[: len(text)]
    # vLLM shows a first character of several tokens as a broken one, harmless off the border.
    far, wanted = max(0, len(pair.prefix) - 1), text[: len(joined)]
    same = all(shown in (real, BROKEN) for shown, real in zip(joined[:far], wanted[:far], strict=True))
    if not same or joined[far:] != wanted[far:]:
        if BROKEN not in joined and "" not in tokens:
            raise IllFormed(f"the answer's tokens are not the sent tokens: they differ from input {pair.row}")
        raise UnscorableText(f"input {pair.row}: the server's tokens do not join to the text; {USE_IDS}")
    if len(joined) < len(text):
        kind = IllFormed if joined else NoPromptLogprobs
        raise kind(f"the answer's tokens cover {len(joined)} of the {len(text)} characters of input {pair.row}")
    starts = [0, *accumulate(len(token) for token in tokens[opening:])]
    if len(pair.prefix) not in starts:
        raise UnscorableText(f"input {pair.row}: the border of prefix and continuation is inside a token; {USE_IDS}")
    part = slice(opening + starts.index(len(pair.prefix)), opening + starts.index(len(text)))
    if part.start == 0 and values[0] is None:
        raise UnscorableText(f"input {pair.row} has an empty prefix, and the first token has no log-prob; {USE_IDS}")
    return _checked(values[part], pair.name), tuple(tokens[part])


def accepted_fields(request: dict[str, Any], refused: Collection[str]) -> dict[str, Any]:
    """Return the request without the fields that the server refused; newer OpenAI models rename max_tokens."""
    fitted = {name: value for name, value in request.items() if name not in refused}
    if "max_tokens" in request and "max_tokens" in refused:
        fitted.setdefault("max_completion_tokens", request["max_tokens"])
    return fitted


def refused_by_filter(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a chat to a request that a server's filter refused."""
    return {
        "choices": [
            {"index": i, "message": {"content": None}, "finish_reason": FILTERED} for i in range(payload.get("n", 1))
        ]
    }


def request(api: str, payload: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the request of a payload of the completions API.

    A single text goes without a list round it, which Together does not take.
    """
    if api == "chat":
        names = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n")
        chat = {name: payload[name] for name in names if name in payload}
        tops = {"logprobs": True, "top_logprobs": payload["logprobs"]} if "logprobs" in payload else {}
        return "/chat/completions", {**chat, "messages": [{"role": "user", "content": payload["prompt"][0]}], **tops}
    if len(payload["prompt"]) == 1 and isinstance(payload["prompt"][0], str):
        payload = {**payload, "prompt": payload["prompt"][0]}
    return "/completions", payload


def completion(api: str, body: Any, payload: dict[str, Any]) -> Any:
    """Return an answer in the form of the completions API. Another shape raises KeyError, TypeError or the like."""
    if api == "chat":
        return {**body, "choices": [_chat_choice(choice, payload) for choice in body["choices"]]}
    if payload.get("echo") and body.get("prompt"):
        return {**body, "choices": [_together_choice(choice, body["prompt"]) for choice in body["choices"]]}
    return body


def _chat_choice(choice: dict[str, Any], payload: dict[str, Any]) -> dict[str, Any]:
    """Return a choice. Together shows log-probs of a chat as completions do."""
    message, reason = choice["message"], choice.get("finish_reason")
    logprobs = choice.get("logprobs") or {}
    steps = logprobs.get("content") or []
    logprobs = (
        logprobs
        if "tokens" in logprobs
        else {
            "tokens": [step["token"] for step in steps],
            "token_logprobs": [step["logprob"] for step in steps],
            "top_logprobs": [by_text((top["token"], top["logprob"]) for top in step["top_logprobs"]) for step in steps],
        }
    )
    content = message["content"] or ""
    if isinstance(content, list):  # some servers send parts; parts of other types are not the answer
        content = "".join(part["text"] for part in content if part["type"] in ("text", "output_text"))
    if not content and (message.get("refusal") or reason == FILTERED):
        # A filtered answer counts as empty and cannot be right.
        shown = {"tokens": [""], "token_logprobs": [NO_ANSWER_LOGPROB], "top_logprobs": [{FILTERED: 0.0}]}
        return {"index": choice["index"], "finish_reason": FILTERED, "text": "", "logprobs": shown}
    text = THOUGHT.sub("", content).rpartition(THOUGHT_END)[2]
    if text != content:
        text = text.lstrip()
    if (not content and reason == "length") or (content and not text):
        raise UserError(
            f"the LM spent all of its {payload['max_tokens']} tokens on reasoning and gave no answer; expected an "
            f"answer without reasoning, or more tokens: {REASONING}"
        )
    if text != content and logprobs["tokens"]:
        raise UserError(f"the LM shows log-probs of its reasoning; expected log-probs of an answer: {REASONING}")
    return {"index": choice["index"], "finish_reason": reason, "text": text, "logprobs": logprobs}


def _together_choice(choice: dict[str, Any], prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a choice with the log-probs of its prompt before its own, as in OpenAI's and vLLM's answers."""
    of_prompt, own = prompts[choice["index"]]["logprobs"], choice.get("logprobs") or {}
    names = ("tokens", "token_logprobs")
    return {**choice, "logprobs": {name: [*of_prompt[name], *(own.get(name) or [])] for name in names}}
