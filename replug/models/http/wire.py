"""Translate requests and answers between the completions API and what a server speaks (`lm.api`).

`completions_api` writes and reads one form, that of OpenAI's and vLLM's completions. Here it becomes the request of
another API, and that one's answer becomes a completion:

- `echo`, `prompt_logprobs`: as they are. Together shows the log-probs of a prompt in a list beside the choices.
- `chat`: a prompt is the user's message, and a continuation the beginning of the assistant's. vLLM alone gives
  log-probs of the latter, with `prompt_logprobs` beside the choices.
- `sglang`: SGLang's own `/generate`, which knows no choices.
"""

from typing import Any

from replug.models.generation import by_text

GENERATE = "/generate"  # at the server's root, unlike the paths of the OpenAI-compatible API


def request(api: str, payload: dict[str, Any], is_single: bool) -> tuple[str, dict[str, Any]]:
    """Return the path and the request of a payload of the completions API.

    A text that `is_single` goes without a list round it, which Together does not take.
    """
    if api == "chat":
        return "/chat/completions", _chat_request(payload)
    if api == "sglang":
        return GENERATE, _sglang_request(payload)
    if is_single and isinstance(payload["prompt"][0], str):
        payload = {**payload, "prompt": payload["prompt"][0]}
    return "/completions", payload


def completion(api: str, body: Any, payload: dict[str, Any]) -> Any:
    """Return an answer as one of the completions API. One of another shape raises what tripped over it."""
    if api == "chat":
        shown = {"prompt_logprobs": body["prompt_logprobs"]} if body.get("prompt_logprobs") else {}
        return {**body, "choices": [_chat_choice(choice) | shown for choice in body["choices"]]}
    if api == "sglang":
        choices = [{"index": i, **_sglang_choice(one, payload)} for i, one in enumerate(body)]
        sent = [one["meta_info"]["prompt_tokens"] for one in body[:: payload.get("n", 1)]]
        new = [one["meta_info"]["completion_tokens"] for one in body]
        return {"choices": choices, "usage": {"prompt_tokens": sum(sent), "total_tokens": sum(sent) + sum(new)}}
    if payload.get("echo") and body.get("prompt"):
        return {**body, "choices": [_together_choice(choice, body["prompt"]) for choice in body["choices"]]}
    return body


def _chat_request(payload: dict[str, Any]) -> dict[str, Any]:
    [prompt] = payload["prompt"]
    messages = [{"role": "user", "content": prompt}]
    names = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n")
    kept = {name: payload[name] for name in names if name in payload}
    if continuation := payload.get("continuation"):
        messages.append({"role": "assistant", "content": continuation})
        how = {"add_generation_prompt": False, "continue_final_message": True, "prompt_logprobs": 0}
        return {**kept, "messages": messages, **how}
    if "logprobs" not in payload:
        return {**kept, "messages": messages}
    return {**kept, "messages": messages, "logprobs": True, "top_logprobs": payload["logprobs"]}


def _chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice. Together shows log-probs of a chat as completions do."""
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
    kept = {"index": choice["index"], "finish_reason": choice.get("finish_reason")}
    return {**kept, "text": choice["message"]["content"] or "", "logprobs": logprobs}


def _sglang_request(payload: dict[str, Any]) -> dict[str, Any]:
    prompts = payload["prompt"]
    names = {"max_tokens": "max_new_tokens", "temperature": "temperature", "top_p": "top_p", "stop": "stop", "n": "n"}
    sampling = {name: payload[key] for key, name in names.items() if key in payload}
    is_scored = "prompt_logprobs" in payload
    return {
        "text" if isinstance(prompts[0], str) else "input_ids": prompts,
        "sampling_params": sampling,
        "return_logprob": is_scored or "logprobs" in payload,
        "logprob_start_len": 0 if is_scored else -1,
        "top_logprobs_num": payload.get("logprobs", 0),
        "return_text_in_logprobs": True,
    }


def _sglang_choice(one: dict[str, Any], payload: dict[str, Any]) -> dict[str, Any]:
    """Return a choice. SGLang shows a token as [log-prob, id, text], and none of the first token's log-prob."""
    meta = one["meta_info"]
    reason = (meta.get("finish_reason") or {}).get("type")
    new = meta.get("output_token_logprobs") or []
    tops = meta.get("output_top_logprobs") or []
    scored = meta.get("input_token_logprobs") or [] if "prompt_logprobs" in payload else []
    shown = [*scored, *new]
    logprobs = {
        "tokens": [text for _, _, text in shown],
        "token_logprobs": [logprob for logprob, _, _ in shown],
        "top_logprobs": [by_text((text, logprob) for logprob, _, text in top) for top in tops],
    }
    by_id = [None if logprob is None else {str(i): {"logprob": logprob}} for logprob, i, _ in scored]
    return {"text": one["text"], "finish_reason": reason, "logprobs": logprobs, "prompt_logprobs": by_id or None}


def _together_choice(choice: dict[str, Any], prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a choice that shows the log-probs of its prompt before its own, as OpenAI's and vLLM's do."""
    of_prompt, own = prompts[choice["index"]]["logprobs"], choice.get("logprobs") or {}
    names = ("tokens", "token_logprobs")
    return {**choice, "logprobs": {name: [*of_prompt[name], *(own.get(name) or [])] for name in names}}
