"""Random language models small enough to be checked by hand, and the plain computations that they must agree with."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from replug.models.local.hf_lm import HuggingFaceLM

VOCABULARY, MAX_TOKENS = 320, 128
SEPARATOR = "\n\n"
PAIRS = [
    ("the cat sat on the mat", " and the cat slept"),
    ("", "the beginning of a text"),
    (f"{SEPARATOR}the cat", " sat"),
    ("🙂 日本語の文書", "で、続きは🙃です"),
    ("a much longer prefix, " * 4, " short"),
    ("x", " a continuation that is longer than what stands before it"),
]
PREFIXES, CONTINUATIONS = [p for p, _ in PAIRS], [c for _, c in PAIRS]


def write_tokenizer(folder: Path, padding_side: str = "right", template: str | None = None) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PREFIXES + CONTINUATIONS, trainer)
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", padding_side=padding_side
    ).save_pretrained(folder)


def llama(vocab_size: int = VOCABULARY) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=MAX_TOKENS,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config)


def write_llama(folder: Path, vocab_size: int = VOCABULARY) -> None:
    llama(vocab_size).save_pretrained(folder)


def write_gpt2(folder: Path) -> None:
    gpt2().save_pretrained(folder)


def naive_logprobs(lm: HuggingFaceLM, prefix: str, continuation: str) -> np.ndarray:
    """All logits, their log-softmax, and of position t the entry of token t + 1; one pair, no padding."""
    before = lm.tokenizer(prefix)["input_ids"] or [lm.tokenizer.bos_token_id]
    after = lm.tokenizer(continuation, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = lm.model(torch.tensor([before + after])).logits[0]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return np.array([float(logprobs[len(before) + i - 1, token]) for i, token in enumerate(after)])


def num_tokens(lm, text: str) -> int:
    return len(lm.tokenizer(text, add_special_tokens=False)["input_ids"])


DEMONSTRATIONS = "the cat sat on the mat and slept\n" * 6


@pytest.fixture(autouse=True, scope="module")
def random_lms_need_make_no_sense() -> Iterator[None]:
    """For modules or folders of tests that import it."""
    with mock.patch("replug.models.local.hf_lm.require_sense"):
        yield


def write_with_tokenizer(write: Callable[[Path], None], folder: Path) -> Path:
    torch.manual_seed(0)
    write(folder)
    write_tokenizer(folder)
    return folder


def load(write: Callable[[Path], None], folder: Path, **options: Any) -> HuggingFaceLM:
    if not (folder / "config.json").exists():
        write_with_tokenizer(write, folder)
    return HuggingFaceLM(str(folder), **options)


def load_that_speaks(folder: Path, sureness: float) -> HuggingFaceLM:
    """Writes whole characters, where a random LM would write single bytes, and is `sureness` times as sure as one."""
    lm = load(write_llama, folder)
    broken = ["\ufffd" in lm.tokenizer.decode([token]) for token in range(VOCABULARY)]
    lm.model.lm_head.weight.data *= sureness
    lm.model.lm_head.bias = torch.nn.Parameter(torch.where(torch.tensor(broken), -100.0, 0.0))
    return lm


def reference(
    lm: HuggingFaceLM, prompts: Sequence[str], weights: Sequence[float], count: int
) -> tuple[list[int], list[float], list[float]]:
    """Tokens of the greedy answer, their log-probs and entropies (nats).

    Every prompt alone, read anew for every token, in float64.
    """
    rows = [lm.tokenizer(prompt)["input_ids"] for prompt in prompts]
    new, logprobs, entropies = [], [], []
    while len(new) < count and (not new or new[-1] != lm.tokenizer.eos_token_id):
        with torch.no_grad():
            given = [lm.model(torch.tensor([row + new]), use_cache=False).logits[0, -1] for row in rows]
        mixed = sum(weight * row.double().softmax(-1) for weight, row in zip(weights, given, strict=True))
        new.append(int(mixed.argmax()))
        logprobs.append(math.log(mixed[new[-1]]))
        entropies.append(-sum(p * math.log(p) for p in mixed.tolist() if p > 0))
    return new, logprobs, entropies
