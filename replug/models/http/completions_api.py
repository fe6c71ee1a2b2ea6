"""The OpenAI-compatible completions API for scoring and answers: requests, and the parsing of answers.

Answers are not trusted: choices are ordered by their index, and counts, lengths and numbers are checked. `IllFormed` is
a fault that may pass. No message here quotes an answer, since a server may repeat the key.

Payloads and parsing follow OpenAI's and vLLM's completions. Inputs to score are token ids; a prompt to continue is text
without a tokenizer. `request` converts a payload to a chat (`lm.api`), and `completion` converts its answer back: a
prompt is then the user's message, and no continuation is scored.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.models.generation import Generated, GenerationOptions, by_text, stop_texts
from replug.models.http.connection import FILTERED, IllFormed
from replug.models.pair_tokens import PairIds

LEAST_LOGPROB, MOST_LOGPROB = -999.0, 1e-2  # of a token; exclusive, and a little is rounding
MOST_PLAUSIBLE_TOKENS = 10**12  # of one request; more is nonsense
MOST_ANSWER_BYTES_PER_TOKEN = 512  # about 100 are needed: a token's text and log-prob, twice with the list of tops
MOST_OTHER_ANSWER_BYTES = 1 << 20
CHAT_TOKENS = 256  # at most, of a chat template round one message, with its system prompt
MOST_TOPS_OF_COMPLETIONS, MOST_TOPS = 5, 20  # likeliest tokens that completions show, and chats and vLLM

NO_ANSWER_LOGPROB = -20.0  # of a filtered answer: no vote, and no yes
REASONING = (
    "set lm.extra_body to what the server knows, such as '{chat_template_kwargs: {enable_thinking: false}}' (vLLM, "
    "SGLang), '{reasoning_effort: minimal}' (OpenAI), or '{max_tokens: 2000}'"
)
THOUGHTS = ("<think>", "</think>")
# Fields that a server may refuse: replug cuts at the stop itself, and max_tokens has another name.
DRAWING = ("temperature", "top_p", "seed")
OPTIONAL = (*DRAWING, "stop", "max_tokens")
NUMBER_OF_TOKENS = {"max_tokens", "max_completion_tokens"}


Prompt = str | list[int]  # to continue: token ids where the tokenizer is known


class NoPromptLogprobs(IllFormed):
    """An answer without log-probabilities of the prompt."""


def context_lengths(models: Any) -> dict[str, int | None]:
    """Return the models that `GET /models` lists, with their context lengths in tokens (vLLM's) or None.

    Servers differ in the form of the list; unknown entries are left out.
    """
    listed = models.get("data") if isinstance(models, dict) else None
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    lengths = {card["id"]: card.get("max_model_len") for card in cards if isinstance(card.get("id"), str)}
    return {name: length if isinstance(length, int) else None for name, length in lengths.items()}


def score_payload(api: str, pairs: Sequence[PairIds]) -> dict[str, Any]:
    """Return a request for scores. It generates one token, the fewest that every server takes."""
    how = {"echo": True, "logprobs": 1} if api == "echo" else {"prompt_logprobs": 0}
    return {"prompt": [[*before, *after] for before, after in pairs], "max_tokens": 1, "temperature": 0, **how}


def generate_payload(api: str, prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
    """Return a request that continues the prompt greedily and shows likeliest tokens."""
    logprobs = min(max(1, options.num_tops), MOST_TOPS_OF_COMPLETIONS if api == "echo" else MOST_TOPS)
    payload = {"prompt": [prompt], "max_tokens": options.max_new_tokens, "temperature": 0, "logprobs": logprobs}
    return payload | {"stop": stops} if (stops := stop_texts(options.stop)) else payload


def sample_payload(api: str, prompt: Prompt, options: GenerationOptions) -> dict[str, Any]:
    """Return a request for draws. Servers refuse several greedy answers, which are all the same."""
    how = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
    payload = generate_payload(api, prompt, options) | how
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
    return count if isinstance(count, int) and count >= 0 else None


def read_scores(api: str, pairs: Sequence[PairIds], body: Any) -> list[np.ndarray]:
    """Return log-probs [T] of the continuations in the order of `pairs`. Raises IllFormed."""
    rows = zip(pairs, _choices(body, len(pairs)), strict=True)
    return [well_formed(partial(_read_pair, api, *row)) for row in rows]


def read_generated(body: Any, num_samples: int = 1) -> list[tuple[Generated, bool]]:
    """Return the answers to a prompt, and whether the server ended each itself, before its longest.

    Answers have the tokens of the prompt, None where the server does not count them, and the likeliest first tokens if
    they are shown. Raises IllFormed.
    """
    prompt_tokens = _usage(body, "prompt_tokens") or None  # 0: the server does not count
    return [well_formed(partial(_generated, one, prompt_tokens)) for one in _choices(body, num_samples)]


def _choices(body: Any, count: int) -> list[dict]:
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list):
        raise IllFormed("the answer has no choices")
    by_index = {
        choice["index"]: choice
        for choice in choices
        if isinstance(choice, dict) and isinstance(choice.get("index"), int)
    }
    if len(choices) != count or set(by_index) != set(range(count)):
        raise IllFormed(f"the answer has {len(choices)} choices where {count} were wanted, or not one for each index")
    return [by_index[index] for index in range(count)]


def _read_pair(api: str, pair: PairIds, choice: dict) -> np.ndarray:
    before, after = pair
    ids = [*before, *after]
    values = _echoed(choice) if api == "echo" else _of_ids(ids, choice)
    if len(values) not in (len(ids), len(ids) + 1):  # with or without that of the generated token
        kind = NoPromptLogprobs if len(values) == 1 else IllFormed
        raise kind(f"an input has {len(ids)} tokens, but the answer has {len(values)} log-probs")
    return _checked(values[len(before) : len(ids)], "the continuation of an input")


def well_formed(read: Callable[[], Any]) -> Any:
    """Return the result of `read`. Raises IllFormed where it fails on the answer's shape."""
    try:
        return read()
    except (KeyError, TypeError, AttributeError) as error:
        raise IllFormed(f"the answer is not of the expected form ({type(error).__name__})") from error


def _echoed(choice: dict) -> list[float | None]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not logprobs.get("token_logprobs"):
        raise NoPromptLogprobs("the answer has no token_logprobs")
    values: list[float | None] = logprobs["token_logprobs"]
    return values


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
    """Return the path and the request of a payload of the completions API."""
    if api == "chat":
        names = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n")
        chat = {name: payload[name] for name in names if name in payload}
        tops = {"logprobs": True, "top_logprobs": payload["logprobs"]} if "logprobs" in payload else {}
        return "/chat/completions", {**chat, "messages": [{"role": "user", "content": payload["prompt"][0]}], **tops}
    return "/completions", payload


def completion(api: str, body: Any, payload: dict[str, Any]) -> Any:
    """Return an answer in the form of the completions API. Another shape raises KeyError, TypeError or the like."""
    choices = [_chat_choice(choice, payload) if api == "chat" else {**choice} for choice in body["choices"]]
    return {**body, "choices": choices}


def _chat_choice(choice: dict[str, Any], payload: dict[str, Any]) -> dict[str, Any]:
    message, reason, content = choice["message"], choice.get("finish_reason"), choice["message"]["content"] or ""
    if isinstance(content, list):  # some servers send parts; other parts than texts are not the answer
        content = "".join(part["text"] for part in content if part["type"] in ("text", "output_text"))
    steps = (choice.get("logprobs") or {}).get("content") or []
    logprobs = {
        "token_logprobs": [step["logprob"] for step in steps],
        "top_logprobs": [by_text((top["token"], top["logprob"]) for top in step["top_logprobs"]) for step in steps],
    }
    if not content and (message.get("refusal") or reason == FILTERED):
        # A filtered answer counts as empty and cannot be right.
        reason, logprobs = FILTERED, {"token_logprobs": [NO_ANSWER_LOGPROB], "top_logprobs": [{FILTERED: 0.0}]}
    elif (not content and reason == "length") or any(mark in content for mark in THOUGHTS):
        raise UserError(
            f"the LM spent some of its {payload['max_tokens']} tokens on reasoning; expected an answer without "
            f"reasoning, or more tokens and a server that leaves the reasoning out of the text: {REASONING}"
        )
    return {"index": choice["index"], "finish_reason": reason, "text": content, "logprobs": logprobs}
