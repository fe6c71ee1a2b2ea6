"""Translate requests and answers between the completions API and what a server speaks (`lm.api`).

`completions_api` writes and reads one form, that of OpenAI's and vLLM's completions. Here it becomes the request of
another API, and that one's answer becomes a completion:

- `echo`, `prompt_logprobs`: as they are. Together shows the log-probs of a prompt in a list beside the choices.
- `chat`: a prompt is the user's message. No continuation is scored (`lm.score=yes` or `answer`).
"""

import logging
import re
from typing import Any

from replug.config.errors import UserError
from replug.models.generation import by_text

log = logging.getLogger(__name__)

FILTERED = "content_filter"  # why an answer ended, or was not begun
NO_ANSWER_LOGPROB = -20.0  # of an answer that a filter withheld: no vote, and no yes
# Many servers leave it in the text.
THOUGHT = re.compile(r"\s*<(think|thinking|reasoning)>.*?(?:</\1>\s*|\Z)", re.DOTALL)
REASONING = (
    "set lm.extra_body to what the server knows, such as '{chat_template_kwargs: {enable_thinking: false}}' (vLLM, "
    "SGLang), '{reasoning_effort: minimal}' (OpenAI), or '{max_tokens: 2000}'"
)
THOUGHT_END = "</think>"  # where the chat template had begun the thought


# Fields that a server may refuse: replug cuts at the stop itself, and says of the others what that means.
OPTIONAL = ("temperature", "top_p", "seed", "stop")
NUMBER_OF_TOKENS = {"max_tokens", "max_completion_tokens"}


class Accepted:
    """The fields a server accepts, learnt from its refusals: newer models of OpenAI's have other fields."""

    def __init__(self, url: str) -> None:
        self._url, self._left_out, self._renames = url, set[str](), False

    def fit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the request as the server takes it."""
        fitted = {name: value for name, value in request.items() if name not in self._left_out}
        if self._renames and "max_tokens" in fitted:
            fitted.setdefault("max_completion_tokens", fitted.pop("max_tokens"))
        return fitted

    def learn(self, field: str, sent: dict[str, Any]) -> bool:
        """Return whether a request that was refused for a field can be sent again without it."""
        if field not in sent or (field not in OPTIONAL and field != "max_tokens"):
            return False
        if field in ("temperature", "top_p", "seed") and field not in self._left_out:
            log.warning(
                f"{self._url}: the server does not take {field}={sent[field]}, so its answers are drawn as it likes: "
                "they, and scores made of them, differ when they are asked for again"
            )
        if field == "max_tokens":
            self._renames = True
        else:
            self._left_out.add(field)
        return True


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
        return "/chat/completions", _chat_request(payload)
    if len(payload["prompt"]) == 1 and isinstance(payload["prompt"][0], str):
        payload = {**payload, "prompt": payload["prompt"][0]}
    return "/completions", payload


def completion(api: str, body: Any, payload: dict[str, Any]) -> Any:
    """Return an answer as one of the completions API. One of another shape raises what tripped over it."""
    if api == "chat":
        return {**body, "choices": [_chat_choice(choice, payload) for choice in body["choices"]]}
    if payload.get("echo") and body.get("prompt"):
        return {**body, "choices": [_together_choice(choice, body["prompt"]) for choice in body["choices"]]}
    return body


def _chat_request(payload: dict[str, Any]) -> dict[str, Any]:
    [prompt] = payload["prompt"]
    messages = [{"role": "user", "content": prompt}]
    names = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n")
    kept = {name: payload[name] for name in names if name in payload}
    if "logprobs" not in payload:
        return {**kept, "messages": messages}
    return {**kept, "messages": messages, "logprobs": True, "top_logprobs": payload["logprobs"]}


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
    if isinstance(content, list):  # some servers give a text in parts, of which those of another type are no answer
        content = "".join(part["text"] for part in content if part["type"] in ("text", "output_text"))
    if not content and (message.get("refusal") or reason == FILTERED):
        # An answer that a filter keeps back is an empty one, without a chance to be right.
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
        raise UserError(f"the LM shows log-probs of its reasoning; expected those of an answer: {REASONING}")
    return {"index": choice["index"], "finish_reason": reason, "text": text, "logprobs": logprobs}


def _together_choice(choice: dict[str, Any], prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a choice that shows the log-probs of its prompt before its own, as OpenAI's and vLLM's do."""
    of_prompt, own = prompts[choice["index"]]["logprobs"], choice.get("logprobs") or {}
    names = ("tokens", "token_logprobs")
    return {**choice, "logprobs": {name: [*of_prompt[name], *(own.get(name) or [])] for name in names}}
