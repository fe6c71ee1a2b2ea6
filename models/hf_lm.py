"""The local language model: any Hugging Face causal LM, scored in right-padded batches of similar length.

With a causal model and right padding no mask is needed, and left padding without position ids is
silently wrong for some models, so padding is always on the right. Only the positions that predict
the continuation reach the output layer, and log-softmax runs in float32 over chunks of them.
Prefix and continuation are tokenized apart: the continuation has the same tokens after every document.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from configs.errors import UserError
from models.black_box_lm import ContinuationScore, check_pairs
from models.encoder import token_budget_batches

# Rows of [V] float32 logits held at once: 512 x 50k x 4 bytes is 100 MB.
LOGIT_ROWS_PER_CHUNK = 512


class HuggingFaceLM:
    """A `BlackBoxLM` over local weights."""

    def __init__(
        self,
        path: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tokens_per_batch: int = 4096,
    ) -> None:
        self.tokenizer = load_tokenizer(path)
        if self.tokenizer.eos_token_id is None:
            raise UserError(f"lm.path: the tokenizer of {path} has no end-of-text token; set eos_token in its config")
        self.model = _load_model(path, dtype)
        self.model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.tokens_per_batch = tokens_per_batch
        self.identity = lm_identity(path, dtype)
        self.max_tokens: int | None = getattr(self.model.config, "max_position_embeddings", None)
        self._head = _separable_head(self.model)

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        """Log-probs in nats. Raises ValueError for empty continuations and inputs beyond `max_tokens`."""
        check_pairs(prefixes, continuations)
        pairs = [self._token_ids(p, c) for p, c in zip(prefixes, continuations, strict=True)]
        self._check_lengths(pairs)
        scores: list[ContinuationScore | None] = [None] * len(pairs)
        for rows in token_budget_batches([len(p) + len(c) for p, c in pairs], self.tokens_per_batch):
            for row, logprobs in zip(rows, self._score_batch([pairs[row] for row in rows]), strict=True):
                scores[row] = ContinuationScore(logprobs)
        return [score for score in scores if score is not None]

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None = None) -> list[str]:
        """Greedy continuations, one prompt at a time. Raises ValueError beyond `max_tokens`."""
        return [self._generate_one(prompt, max_new_tokens, stop) for prompt in prompts]

    def _token_ids(self, prefix: str, continuation: str) -> tuple[list[int], list[int]]:
        before = self.tokenizer(prefix)["input_ids"] if prefix else []
        end = self.tokenizer.eos_token_id
        if before and before[-1] == end:  # some tokenizers close every text
            before = before[:-1]
        if not before:  # the first token needs something to be predicted from
            start = self.tokenizer.bos_token_id
            before = [start if start is not None else end]
        return before, self.tokenizer(continuation, add_special_tokens=False)["input_ids"]

    def _check_lengths(self, pairs: list[tuple[list[int], list[int]]]) -> None:
        for row, (before, after) in enumerate(pairs):
            if not after:
                raise ValueError(f"continuation {row} has no tokens: the LM's tokenizer drops all of it")
            if self.max_tokens is not None and len(before) + len(after) > self.max_tokens:
                raise ValueError(
                    f"input {row} has {len(before)} + {len(after)} tokens (prefix + continuation), "
                    f"but the LM holds {self.max_tokens}: shorten the documents or take an LM with a longer context"
                )

    def _score_batch(self, pairs: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        device = self.model.device
        inputs = nn.utils.rnn.pad_sequence([torch.tensor(p + c) for p, c in pairs], batch_first=True)
        # Position t predicts token t + 1, so the continuation is predicted from one position earlier on.
        row = torch.cat([torch.full((len(c),), i) for i, (_, c) in enumerate(pairs)])
        position = torch.cat([torch.arange(len(p) - 1, len(p) + len(c) - 1) for p, c in pairs])
        target = torch.tensor([token for _, c in pairs for token in c])
        with torch.inference_mode():
            logprobs = self._logprobs(inputs.to(device), row.to(device), position.to(device), target.to(device))
        return [part.numpy() for part in logprobs.cpu().split([len(c) for _, c in pairs])]

    def _logprobs(self, inputs: Tensor, row: Tensor, position: Tensor, target: Tensor) -> Tensor:
        if self._head is None:
            rows_of_logits = self.model(input_ids=inputs, use_cache=False).logits[row, position]
            return _target_logprobs(rows_of_logits, target, None)
        hidden = self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state[row, position]
        return _target_logprobs(hidden, target, self._head)

    def _generate_one(self, prompt: str, max_new_tokens: int, stop: str | None) -> str:
        ids, _ = self._token_ids(prompt, " ")
        self._check_lengths([(ids, [0] * max_new_tokens)])
        with torch.inference_mode():
            output = self.model.generate(  # type: ignore[operator]
                torch.tensor([ids], device=self.model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=self.tokenizer.eos_token_id,
                **({"stop_strings": [stop], "tokenizer": self.tokenizer} if stop else {}),
            )
        text = str(self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
        return text.split(stop)[0] if stop else text


def _target_logprobs(rows: Tensor, target: Tensor, head: nn.Module | None) -> Tensor:
    """Float32 log-probs [N] of targets [N] given logits [N, V], or hidden states [N, D] and the output layer."""
    parts = []
    for chunk, wanted in zip(rows.split(LOGIT_ROWS_PER_CHUNK), target.split(LOGIT_ROWS_PER_CHUNK), strict=True):
        logits = (head(chunk) if head is not None else chunk).float()
        chosen = logits.gather(1, wanted[:, None])[:, 0]
        parts.append(chosen - logits.logsumexp(1))
    return torch.cat(parts)


def _separable_head(model: PreTrainedModel) -> nn.Module | None:
    """The output layer, where logits are that layer of the last hidden state and nothing more.

    Models that scale or cap their logits differ; they are scored through their whole forward pass.
    """
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return None
    probe = torch.arange(8, device=model.device)[None]
    with torch.inference_mode():
        whole = model(input_ids=probe, use_cache=False).logits
        apart = head(model.base_model(input_ids=probe, use_cache=False).last_hidden_state)
    return head if whole.shape == apart.shape and torch.allclose(whole, apart) else None


def lm_identity(path: str, dtype: torch.dtype) -> str:
    """Hash of a local model's configuration, tokenizer and weights, with the dtype it runs in."""
    digest = hashlib.blake2b(digest_size=16)
    folder = Path(path)
    if not folder.is_dir():
        return f"{path}:{str(dtype).removeprefix('torch.')}"
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        with file.open("rb") as stream:
            digest.update(file.name.encode() + hashlib.file_digest(stream, "blake2b").digest())
    return f"{digest.hexdigest()}:{str(dtype).removeprefix('torch.')}"


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The LM's own tokenizer; raises UserError where it cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"lm.path: cannot load a tokenizer from {path}: {str(error).splitlines()[0]}") from error


def _load_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"lm.path: cannot load {path}: {str(error).strip().splitlines()[0]}") from error
