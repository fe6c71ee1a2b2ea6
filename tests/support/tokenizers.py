"""Small tokenizers of the families that LMs have, trained on a few lines."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.model_files import load_tokenizer
from tests.support.tiny_lms import write_llama

LINES = [
    "The river that flows through Basel is the Rhine and the city lies on its banks . Paris is the capital of France",
    "def f():\n    return [0]\n",
    "a line\n\nRhine In 1984 Answer: A the cat sat on the mat",
] * 20
BYTES = [f"<0x{i:02X}>" for i in range(256)]
CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _sentencepiece(prepend: bool, metaspace: str | None = None) -> Tokenizer:
    """Byte-pair encoding of SentencePiece's: Llama 1 and 2, Mistral (`prepend`, or a Metaspace), Gemma (neither)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    blanks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prepend else blanks
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=CONTROL + BYTES, show_progress=False)
    tokenizer.train_from_iterator([f" {word}" for line in LINES for word in line.split(" ")], trainer)
    if metaspace:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=metaspace == "always")
    begun = [decoders.Strip(" ", 1, 0)] if prepend or metaspace else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *begun]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=CONTROL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    rules = json.loads(tokenizer.to_str())
    rules["model"] |= {"byte_fallback": True, "vocab": rules["model"]["vocab"] + [[byte, -20.0] for byte in BYTES]}
    tokenizer = Tokenizer.from_str(json.dumps(rules))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def _byte_level(add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "byte-level with add_prefix_space": lambda: _byte_level(True),
    "Llama 2": lambda: _sentencepiece(prepend=True),
    "Llama 2 as Metaspace": lambda: _sentencepiece(prepend=False, metaspace="first"),
    "Mistral as Metaspace": lambda: _sentencepiece(prepend=False, metaspace="always"),
    "Gemma": lambda: _sentencepiece(prepend=False),
    "Unigram": _unigram,
}


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each ASCII character."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def write_family(name: str, folder: Path) -> PreTrainedTokenizerFast:
    """Save the tokenizer of a family, and load it as an LM's."""
    rules = json.loads(FAMILIES[name]().to_str())  # bytes are tokens of the model, and no control tokens
    rules["added_tokens"] = [token for token in rules["added_tokens"] if token["content"] in CONTROL]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder))


def llama_with(family: str, folder: Path) -> HuggingFaceLM:
    """Return a random LM with a tokenizer of a family; whoever calls it lets random LMs make no sense."""
    tokenizer = write_family(family, folder)
    torch.manual_seed(0)
    write_llama(folder, len(tokenizer))
    return HuggingFaceLM(str(folder))
