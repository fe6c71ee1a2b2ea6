"""An OpenAI-compatible server of a causal LM of transformers, which computes by whole passes without any cache.

It shows the likeliest tokens, as vLLM does: those and the chosen one, by their texts, or by ids where it is asked to.
"""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.support.fault_server import FaultServer


class HFServer(FaultServer):
    """A FaultServer whose answers are those of `model`; `num_tops` limits what it shows (None: what is asked for)."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_tops: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._model, self._tokenizer, self._num_tops = model, tokenizer, num_tops

    def _split(self, prompt: str | list[int]) -> list[Any]:
        return self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    def _choice(self, index: int, words: list[Any], payload: dict, sample: int) -> dict:
        new = self._continue(words, payload["max_tokens"])
        echo = bool(payload.get("echo"))
        shown = [*words, *new] if echo else new
        by_id = payload.get("return_tokens_as_token_ids", False)
        logprobs = self._logprobs([*words, *new])  # [T, V]
        first = 0 if echo else len(words)
        rows = [None if place == 0 else logprobs[place - 1] for place in range(first, first + len(shown))]
        choice = {
            "index": index,
            "text": self._tokenizer.decode(shown, skip_special_tokens=True),
            "finish_reason": "length" if len(new) == payload["max_tokens"] else "stop",
            "logprobs": {
                "tokens": [self._name(token, by_id) for token in shown],
                "token_logprobs": [None if row is None else float(row[t]) for row, t in zip(rows, shown, strict=True)],
                "top_logprobs": [
                    self._tops(row, t, payload.get("logprobs", 1), by_id) for row, t in zip(rows, shown, strict=True)
                ],
            },
        }
        if "prompt_logprobs" in payload:
            entries = [{str(t): {"logprob": float(row[t])}} for row, t in zip(logprobs, words[1:], strict=False)]
            return choice | {"prompt_logprobs": [None, *entries]}
        return choice

    def _continue(self, ids: list[int], number: int) -> list[int]:
        new: list[int] = []
        while len(new) < number and self._tokenizer.eos_token_id not in new:
            new.append(int(self._logprobs([*ids, *new])[-1].argmax()))
        return new

    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def _name(self, token: int, by_id: bool) -> str:
        return f"token_id:{token}" if by_id else str(self._tokenizer.decode([token]))

    def _tops(self, row: torch.Tensor | None, chosen: int, number: int, by_id: bool) -> dict[str, float] | None:
        if row is None:
            return None
        top = row.topk(min(number, self._num_tops or number)).indices.tolist()
        return {self._name(token, by_id): float(row[token]) for token in dict.fromkeys([*top, chosen])}
