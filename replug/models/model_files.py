"""Refuse folders and hub names that are not a model of the right kind with its own tokenizer and all of its weights.

transformers accepts many faulty models. Without tokenizer files it invents a tokenizer of five tokens; `AutoModel`
loads a causal LM as an encoder, and `AutoModelForCausalLM` an encoder as an LM. `load_whole` and `require_whole` refuse
missing and unused weights by transformers' loading report: transformers draws missing weights at random, with a line in
a log. Code that comes with a model is never run, and no pickle is read.

Weights with another model's tokenizer, or with untrained layers, give finite scores like any other. But to such an LM a
sentence is as likely as its shuffled words; to an LM trained on its language it is likelier by nats per token. An LM
that looks ahead, as an encoder does, scores a token by the later ones. `require_sense` checks for both.
"""

import hashlib
import json
import logging
import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from replug.config.errors import UserError
from replug.data.sources.records import HTML, LFS_POINTER, other_format
from replug.models.batching import weights_of_layers
from replug.models.black_box_lm import BlackBoxLM
from replug.models.packaged import optional_file
from replug.models.pair_tokens import require_exact

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.bpe", "tekken.json", "tokenizer.tiktoken"),
)
ADAPTER = "adapter_config.json"
CAUSAL_LMS = frozenset(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str))
LEAST_NAMED = 0.5  # of a model's rows of embeddings: models pad their number, but never double it

# Errors of transformers and safetensors at damaged files, and for packages that are not installed.
BROKEN = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError, struct.error),
    ImportError,
    StrictDataclassError,  # a field of config.json of another type
)
MODEL_FILES = (".safetensors", ".gguf", ".json", ".model")


@contextmanager
def loading(key: str, path: str) -> Iterator[None]:
    """Raise UserError, which names the key, for all errors of transformers and safetensors about a folder."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except BROKEN as error:
        for file in Path(path).rglob("*") if Path(path).is_dir() else [Path(path)]:
            if file.suffix in MODEL_FILES and file.is_file() and (kind := other_format(file)) in (LFS_POINTER, HTML):
                raise UserError(f"{key}: {file} is, by its first bytes, {kind}") from error
        where = "" if Path(path).exists() else ", neither a folder nor found on the hub"
        raise UserError(f"{key}: cannot load {path}{where}: {type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()) or "no reason given"
    if "trust_remote_code" in line:
        line = f"{line.partition('. ')[0]}; replug runs no code that comes with a model"
    return line[:SHOWN_CHARACTERS]


def read_model_config(path: str, key: str) -> PreTrainedConfig:
    """Return the model's configuration. Raises UserError if it is missing or unknown, or has an adapter beside it."""
    with loading(key, path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        require_no_adapter(path, key)
    return config


def require_no_adapter(path: str, key: str, inner: str = "") -> None:
    """Raise UserError for an adapter in a model's folder, which transformers reads only if peft is installed."""
    if optional_file(path, str(Path(inner, ADAPTER))) is not None:
        raise UserError(
            f"{key}: {path} holds an adapter ({ADAPTER}); expected whole weights: merge it into them with peft's "
            "merge_and_unload and save_pretrained"
        )


def lm_weights(config: PreTrainedConfig) -> int:
    """Return `weights_of_layers`; all causal LMs of transformers but one have these names in their configuration."""
    text = config.get_text_config()
    return weights_of_layers(getattr(text, "num_hidden_layers", 1), getattr(text, "hidden_size", 1))


def longest_input(config: PreTrainedConfig) -> int | None:
    """Return the most tokens that an LM reads; None if its configuration has no limit.

    The limit of longrope counts (Phi-3, Phi-4): an input beyond it makes the whole pass use other frequencies.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)  # the latter: MPT
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # one for each type of layer
    limits = [one["original_max_position_embeddings"] for one in ropes if one.get("rope_type") == "longrope"]
    return int(min(limits)) if limits else longest


def load_tokenizer(path: str, key: str = "lm.path") -> PreTrainedTokenizerBase:
    """Return the model's own tokenizer. Raises UserError, which names the key, if it has no fast one."""
    require_tokenizer(path, key)
    with loading(key, path):
        # Mistral's own library, if installed, would replace the fast tokenizer.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, mistral_format=False)
    require_own_tokenizer(tokenizer, None, path, key)
    return tokenizer


def require_tokenizer(path: str, key: str) -> None:
    """Raise UserError for a folder without files of a tokenizer: transformers would invent one."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{key}: {path} has no tokenizer (tokenizer.json); copy the files that came with the weights")


def load_lm_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a causal LM without reading its weights. Raises UserError if it is not the LM's own."""
    config = read_model_config(path, "lm.path")
    names = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)]
    if not CAUSAL_LMS & set(names):
        raise UserError(f"lm.path: {path} holds a {names[0]}; expected a causal LM, which predicts the next token")
    return checked_lm_tokenizer(load_tokenizer(path), config, path)


def checked_lm_tokenizer(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, path: str
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of an LM with this configuration. Raises UserError if it is not the LM's own."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"lm.path: the tokenizer of {path} has no end-of-text token; set eos_token in its config")
    num_rows = getattr(config.get_text_config(), "vocab_size", None)
    require_own_tokenizer(tokenizer, num_rows, path, "lm.path")
    require_exact(tokenizer, path, "lm.path")
    return tokenizer


def require_own_tokenizer(tokenizer: Any, num_rows: int | None, path: str, key: str) -> None:
    """Raise UserError for a tokenizer that is not fast, or does not belong to a model with `num_rows` of embeddings.

    Such a tokenizer has more tokens than rows, or far fewer. Added tokens do not count: some models name more of them
    than they have rows. Added tokens without a row are removed, so that their texts become ordinary tokens.
    """
    if tokenizer is None or not tokenizer.is_fast:
        raise UserError(f"{key}: {path} has no fast tokenizer (tokenizer.json)")
    if num_rows is None:
        return
    if tokenizer.vocab_size > num_rows or len(tokenizer) < LEAST_NAMED * num_rows:
        raise UserError(
            f"{key}: the tokenizer of {path} has {len(tokenizer):,} tokens, but its model reads {num_rows:,}: it is "
            "another model's; bring back the tokenizer files that came with the weights"
        )
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    known = [token for token in rules["added_tokens"] if token["id"] < num_rows]
    if len(known) < len(rules["added_tokens"]):
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules | {"added_tokens": known}))


SHOWN, SHOWN_CHARACTERS = 3, 300
POOLER = "pooler"  # no vector and no score uses it, so it may be missing
INSIDE_PEFT = "base_model.model."  # the place of the wrapped model in a PeftModel
MASKS = {"bias", "masked_bias"}  # of GPT-2, GPT-J, GPT-Neo, GPT-NeoX: they look like weights
SAFELY = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}


def load_whole(kind: Any, path: str, key: str, **options: Any) -> PreTrainedModel:
    """Load the model of a folder or hub name by a class of transformers.

    Raises UserError as `require_whole` does, and transformers' own errors for unreadable files.
    """
    model, report = kind.from_pretrained(path, **SAFELY, **options)
    require_whole(model, report, path, key)
    return model


def require_whole(model: PreTrainedModel, report: Any, path: str, key: str) -> None:
    """Raise UserError unless a model's weights are complete, and all saved weights of it are read.

    `report` is transformers' loading report. Unread heads of pretraining and tables of earlier versions are a warning;
    other unread weights inside the model belong to another model, such as one with more layers, adapters, or the scales
    of quantized weights.
    """
    kind = type(model).__name__
    if missing := [name for name in report["missing_keys"] if POOLER not in name.split(".")]:
        raise UserError(
            f"{key}: {path} lacks {_named(missing)}, which would be drawn at random: bring all weights of the model, "
            "or the config.json of these weights"
        )
    unread = report["unexpected_keys"]
    if inside := _of_model(model, unread):
        raise UserError(
            f"{key}: {path} holds {_named(inside)}, which {kind} by its config.json does not use: bring the "
            "config.json of these weights"
        )
    if unread:
        warn_once(f"{key}: {path} holds {_named(unread)}, which {kind} does not read")


def _of_model(model: PreTrainedModel, unread: Iterable[str]) -> list[str]:
    """Return the unread weights that lie inside the model, except for tables that it computes, and masks."""
    prefix = f"{model.base_model_prefix}."
    parts = {name for part in (model, model.base_model) for name, _ in part.named_children()}
    tables = MASKS | {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    inside: list[str] = []
    for weight in unread:
        inner = weight.removeprefix(INSIDE_PEFT)
        names = inner.removeprefix(prefix).split(".")
        if (inner.startswith(prefix) or names[0] in parts) and names[-1] not in tables and POOLER not in names:
            inside.append(weight)
    return inside


@cache  # a run loads its encoder several times
def warn_once(line: str) -> None:
    """Log a warning once in a process."""
    log.warning(line)


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return f"{', '.join(ordered[:SHOWN])}{more}"


Stamp = tuple[str, int, int]  # name, bytes and modification time (ns) of a file: known without reading it


def lm_identity(path: str, dtype: torch.dtype) -> str:
    """Return the hash of a folder's configuration, tokenizer and weights, or a hub name, with the dtype."""
    folder, name = Path(path), path
    if folder.is_dir():
        files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])
        stamps = tuple((file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files)
        name = _digest(folder, stamps)
    return f"{name}:{str(dtype).removeprefix('torch.')}"


def loaded_identity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of a loaded LM's configuration, tokenizer and weights."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update((model.config.to_json_string() + tokenizer.backend_tokenizer.to_str()).encode())
    for name, weight in model.state_dict().items():
        content = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(content)
    return f"loaded-{digest.hexdigest()}"


@lru_cache(maxsize=8)  # a process asks for an identity more than once
def _digest(folder: Path, stamps: tuple[Stamp, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, *_ in stamps:
        with (folder / name).open("rb") as stream:
            digest.update(name.encode() + hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def load_causal_lm(path: str, dtype: torch.dtype, device_map: str | None) -> PreTrainedModel:
    """Load weights onto the CPU or all visible GPUs. Raises UserError for other models and too little memory."""
    with loading("lm.path", path):
        model = load_whole(AutoModelForCausalLM, path, "lm.path", dtype=dtype, device_map=device_map)
    places = getattr(model, "hf_device_map", {}) if torch.cuda.is_available() else {}
    if outside := [name for name, place in places.items() if str(place) in ("cpu", "disk")]:
        raise UserError(
            f"lm.path: its GPUs do not hold {path}: {len(outside)} of its {len(places)} parts "
            f"({outside[0]}, ...) would lie elsewhere; expected larger GPUs or a smaller LM"
        )
    return model


ENGLISH = (
    "The keeper of the lighthouse painted seven wooden boats green before the storm came in from the sea.",
    "To bake bread you need flour and water and salt and a warm oven and a little patience.",
    "The committee met on Tuesday and agreed on a budget for the new school in the north of the city.",
)
OTHERS = (  # for LMs that read little or no English
    "El tren de la mañana llega a la estación a las ocho y sale otra vez a las nueve.",
    "Der Zug aus Hamburg kommt um acht Uhr an und fährt um neun Uhr wieder in den Norden ab.",
    "Le train du matin arrive à la gare à huit heures et repart vers le nord à neuf heures.",
    "Утренний поезд приходит на вокзал в восемь часов и снова уходит на север в девять часов.",
    "早上的火车八点钟到达车站，九点钟又开往北方的城市。",
    "朝の電車は八時に駅に着いて、九時にまた北の町へ出発します。",
    "for row in range(len(table)): for column in range(len(table[row])): total = total + table[row][column]",
)
# Gain of the right order in nats per token. LMs of 135M parameters have 1.5 to 4.4; wrong tokenizers give -0.8 to 0.5.
LEAST_GAIN, LEAST_TEXTS = 1.0, 2
TOLERANCE_NATS = 0.15  # of a token's log-prob, which in bfloat16 depends on the other texts of its batch


def require_sense(lm: BlackBoxLM, path: str) -> None:
    """Raise UserError for an LM that ignores word order, or looks ahead, by its scores of a dozen short texts."""
    half = " ".join(ENGLISH[0].split()[:9])  # short, for LMs that hold few tokens
    short, long = lm.score([""] * 2, [half, ENGLISH[0]])
    known = min(short.num_tokens, long.num_tokens)
    moved = np.abs(short.token_logprobs[:known] - long.token_logprobs[:known])
    if np.mean(moved) > TOLERANCE_NATS:
        raise UserError(f"lm.path: {path} scores a token by later ones; expected a causal LM, not an encoder")
    for texts in (ENGLISH, OTHERS):
        scores = lm.score([""] * 2 * len(texts), [*texts, *map(shuffled, texts)])
        means = np.array([score.sum_logprob / score.num_tokens for score in scores]).reshape(2, -1)
        gain = np.sort(means[0] - means[1])[-LEAST_TEXTS]
        if gain >= LEAST_GAIN:
            return
    raise UserError(
        f"lm.path: {path} makes no sense of language: sentences are only {gain:.2f} nats a token likelier than their "
        f"words in another order, expected {LEAST_GAIN:g}; do the tokenizer and the weights belong together, and were "
        "the weights trained?"
    )


def shuffled(text: str) -> str:
    """Return a text's words in a fixed other order; its characters if it has few spaces."""
    words = text.split()
    parts, space = (words, " ") if len(words) > 3 else (list(text), "")
    return space.join(random.Random(0).sample(parts, len(parts)))
