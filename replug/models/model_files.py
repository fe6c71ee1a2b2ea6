"""Refuse folders and hub names that are not a model of the right kind with its own tokenizer and all of its weights.

transformers accepts much that is wrong. Without tokenizer files it invents a tokenizer of five tokens; `AutoModel`
loads a causal LM as an encoder, and `AutoModelForCausalLM` an encoder as an LM. `models.local.weights` checks what only
weights can tell. `load_whole` and `require_whole` refuse missing and unused weights by transformers' loading report:
transformers draws missing weights at random, with a line in a log. Code that comes with a model is never run, and no
pickle is read.
"""

import importlib.util
import json
import logging
import math
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from replug.config.errors import UserError
from replug.data.sources.lines import HTML, LFS_POINTER, other_format
from replug.models.batching import LMShape
from replug.models.lora import INSIDE_PEFT
from replug.models.packaged import optional_file
from replug.models.pair_tokens import require_exact

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.bpe", "tekken.json", "tokenizer.tiktoken"),
)
ADAPTER = "adapter_config.json"
CAUSAL_LMS = frozenset(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str))
LEAST_NAMED = 0.5  # of a model's rows of embeddings: makers pad their number, but never double it


# transformers names what is to be installed: `pip install -U bitsandbytes>=0.46.1`
INSTALL = re.compile(r"pip install (?:-\S+ +)*['\"]?([\w.-]+(?:\[[\w,]+\])?)")
BROKEN = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError, struct.error),
    StrictDataclassError,  # a field of config.json of another type
)
MODEL_FILES = (".safetensors", ".gguf", ".json", ".model")
CUT = re.compile("incomplete metadata|header too")  # what safetensors says of a file without its end


@contextmanager
def loading(key: str, path: str) -> Iterator[None]:
    """Raise UserError, which names the key, for all that a folder makes transformers and safetensors raise."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise UserError(f"{key}: {path} {_needs(error)}") from error
    except BROKEN as error:
        if (problem := _pointer_problem(Path(path))) is not None:
            raise UserError(f"{key}: {problem}") from error
        where = "" if Path(path).exists() else ", neither a folder nor found on the hub"
        kind = "" if isinstance(error, OSError | ValueError | SafetensorError) else f"{type(error).__name__}: "
        whole = "; is the download complete?" if CUT.search(str(error)) or Path(path).is_file() else ""
        raise UserError(f"{key}: cannot load {path}{where}: {kind}{_one_line(error)}{whole}") from error


def _pointer_problem(path: Path) -> str | None:
    """Return which file of a model is a pointer of Git LFS, or the web page of an error."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.suffix in MODEL_FILES and file.is_file() and (kind := other_format(file)) in (LFS_POINTER, HTML):
            return f"{file} is, by its first bytes, {kind}"
    return None


def _needs(error: ImportError) -> str:
    named = INSTALL.search(str(error))
    package = named[1] if named else error.name
    if package is None:
        return f"needs what is not installed here: {_one_line(error)}"
    return f"needs the package {package}: pip install '{package}', on every machine that loads it"


def read_model_config(path: str, key: str) -> PreTrainedConfig:
    """Return the model's configuration. Raises UserError if it is missing or unknown, or has an adapter beside it."""
    with loading(key, path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        require_no_adapter(path, key)
        require_of_weights(config, path, key)
    return config


def require_of_weights(config: PreTrainedConfig, path: str, key: str) -> None:
    """Raise UserError for more layers, or wider ones, than the weights' headers have: a model of them may fill memory.

    Weights on the hub are not looked at.
    """
    names: list[str] = []
    widest = 0
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                names.append(name)
                widest = max(widest, *weights.get_slice(name).get_shape(), 0)
    layers, width = lm_shape(config).layers, lm_shape(config).hidden
    if names and (layers > len(names) or width > widest):
        raise UserError(
            f"{key}: config.json in {path} has {layers:,} layers of width {width:,}, but the weights are "
            f"{len(names):,} tensors, of {widest:,} numbers at most: bring the config.json of these weights"
        )


def require_no_adapter(path: str, key: str, inner: str = "") -> None:
    """Raise UserError for an adapter in a model's folder, which transformers reads only if peft is installed."""
    if optional_file(path, str(Path(inner, ADAPTER))) is not None:
        raise UserError(
            f"{key}: {path} holds an adapter ({ADAPTER}); expected whole weights: merge it into them with peft's "
            "merge_and_unload and save_pretrained"
        )


def lm_shape(config: PreTrainedConfig) -> LMShape:
    """Layers and width, which all causal LMs of transformers but one name alike."""
    text = config.get_text_config()
    return LMShape(getattr(text, "num_hidden_layers", 1), getattr(text, "hidden_size", 1))


def longest_input(config: PreTrainedConfig) -> int | None:
    """Return the most tokens that an LM reads; None if its configuration does not say.

    Inputs end at the limit of longrope (Phi-3, Phi-4): an input beyond it makes the whole pass use other frequencies.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)  # the latter: MPT
    limit = longrope_limit(config)
    return longest if limit == math.inf else int(limit)


def longrope_limit(config: PreTrainedConfig) -> float:
    """Return the most tokens of an input that is read by longrope's short factors; infinity without longrope."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    ropes = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # one for each type of layer
    limits = [one["original_max_position_embeddings"] for one in ropes if one.get("rope_type") == "longrope"]
    return min(limits, default=math.inf)


def load_tokenizer(path: str, key: str = "lm.path") -> PreTrainedTokenizerBase:
    """Return the model's own tokenizer. Raises UserError, which names the key, if it has no fast one."""
    require_tokenizer(path, key)
    with loading(key, path), _naming_sentencepiece(path):
        # Mistral's own library would replace the fast tokenizer wherever it happens to be installed.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, mistral_format=False)
    if not tokenizer.is_fast:
        raise UserError(f"{key}: {path} has no fast tokenizer (tokenizer.json)")
    return tokenizer


@contextmanager
def _naming_sentencepiece(path: str) -> Iterator[None]:
    """Name the package without which transformers takes a file of SentencePiece for one of tiktoken."""
    try:
        yield
    except ValueError as error:
        files = (optional_file(path, name) for name in TOKENIZER_FILES if name.endswith(".model"))
        is_its = any(file is not None and file.read_bytes()[:1] == b"\n" for file in files)  # tiktoken's are of base64
        if is_its and importlib.util.find_spec("sentencepiece") is None:
            raise ImportError("pip install sentencepiece") from error
        raise


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
    tokenizer = load_tokenizer(path)
    if tokenizer.eos_token_id is None:
        raise UserError(f"lm.path: the tokenizer of {path} has no end-of-text token; set eos_token in its config")
    num_rows = getattr(config.get_text_config(), "vocab_size", None)
    require_own_tokenizer(tokenizer, num_rows, path, "lm.path")
    drop_unknown_tokens(tokenizer, num_rows)
    require_exact(tokenizer, path, "lm.path")
    return tokenizer


def drop_unknown_tokens(tokenizer: PreTrainedTokenizerBase, num_rows: int | None) -> None:
    """Take tokens out of a tokenizer that were added to it and that its model cannot read; texts have other tokens."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    known = [token for token in rules["added_tokens"] if num_rows is None or token["id"] < num_rows]
    if len(known) < len(rules["added_tokens"]):
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules | {"added_tokens": known}))


def require_own_tokenizer(tokenizer: PreTrainedTokenizerBase, num_rows: int | None, path: str, key: str) -> None:
    """Raise UserError for a tokenizer with more tokens than the model has rows of embeddings, or with far fewer.

    Tokens that were added later do not count: some makers name more of them than their model can read.
    """
    own, all_of_it = tokenizer.vocab_size, len(tokenizer)
    if num_rows is None or (own <= num_rows and all_of_it >= LEAST_NAMED * num_rows):
        return
    raise UserError(
        f"{key}: the tokenizer of {path} has {all_of_it:,} tokens, but its model reads {num_rows:,}: it is another "
        "model's; bring back the tokenizer files that came with the weights"
    )


def require_safetensors(path: str, key: str) -> None:
    """Raise UserError for a folder without weights that can be read: pickled ones are not."""
    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        if not any(folder.glob("*.bin")):
            raise UserError(f"{key}: {path} has no *.safetensors: is the download complete?")
        raise UserError(
            f"{key}: {path} has no *.safetensors, and pickled weights (pytorch_model.bin) are not read; load the model "
            "by transformers and write it by save_pretrained"
        )


def require_quantizer(path: str, key: str) -> None:
    """Raise UserError for quantized weights that transformers does not know, or whose package is not installed.

    What else they want, such as a GPU, is known where they are loaded.
    """
    config = read_model_config(path, key)
    how = getattr(config, "quantization_config", None) or getattr(config.get_text_config(), "quantization_config", None)
    if how is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer  # seconds to import

    with loading(key, path):
        if not AutoHfQuantizer.supports_quant_method(how):
            raise UserError(f"{key}: {path} is quantized by {how['quant_method']}, which transformers cannot read")
        try:
            AutoHfQuantizer.from_config(how, pre_quantized=True).validate_environment(
                device_map=None, weights_only=True
            )
        except ImportError as error:
            if "install" in str(error) or error.name is not None:
                raise
        except RuntimeError:  # no GPU here
            return


SHOWN, SHOWN_CHARACTERS = 3, 300
POOLER = "pooler"  # neither a vector nor a score is made by it, so that it may be there or not
MASKS = ("bias", "masked_bias")  # of GPT-2, GPT-J, GPT-Neo, GPT-NeoX
REPORTED: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # for `require_whole`


def load_whole(kind: Any, path: str, key: str, **options: Any) -> PreTrainedModel:
    """Load the model of a folder or hub name by a class of transformers.

    Raises UserError as `require_whole` does, and what transformers raises for what it cannot read.
    """
    model, report = kind.from_pretrained(path, use_safetensors=True, trust_remote_code=False, **REPORTED, **options)
    require_whole(model, report, path, key)
    return model


def require_whole(model: PreTrainedModel, report: Any, path: str, key: str) -> None:
    """Raise UserError unless a model's weights are all there, of its shapes, and all that were saved of it are read.

    `report` is what transformers says of loading it. Heads that the model was pretrained with, and tables that earlier
    versions saved, are a warning; other weights inside the model make another one of it, such as layers of another
    depth, adapters, or the scales of quantized weights.
    """
    kind = type(model).__name__
    if missing := [name for name in report["missing_keys"] if POOLER not in name.split(".")]:
        raise UserError(
            f"{key}: {path} lacks {_named(missing)}, which would be drawn at random: bring all weights of the model, "
            "or a config.json that is theirs"
        )
    if shapes := [f"{name} {list(found)}, not {list(asked)}" for name, found, asked in report["mismatched_keys"]]:
        raise UserError(
            f"{key}: the weights in {path} do not fit its config.json: it holds {_named(shapes)} as {kind} has it: "
            "bring the config.json of these weights"
        )
    unread = report["unexpected_keys"]
    if inside := _of_model(model, unread):
        raise UserError(
            f"{key}: {path} holds {_named(inside)}, which {kind} by its config.json has no use for: bring the "
            "config.json of these weights"
        )
    if unread:
        warn_once(f"{key}: {path} holds {_named(unread)}, which {kind} does not read")


def _of_model(model: PreTrainedModel, unread: Iterable[str]) -> list[str]:
    """Return which of the weights that were not read lie inside the model, and are no table of an earlier version.

    Such a table is a buffer that the model computes (`inv_freq`), or a mask on a module of several parts (`attn.bias`).
    """
    inside: list[str] = []
    prefix = f"{model.base_model_prefix}."
    modules = {name.removeprefix(prefix): module for name, module in model.named_modules()}
    weights = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    tables = {name.rpartition(".")[2] for name, _ in model.named_buffers()} - weights
    for weight in unread:
        inner = weight.removeprefix(INSIDE_PEFT)
        place, _, name = inner.removeprefix(prefix).rpartition(".")
        is_inside = inner.startswith(prefix) or place.partition(".")[0] in modules
        around = modules.get(place)
        is_mask = name in MASKS and around is not None and around._modules and name not in around._parameters
        if is_inside and name not in tables and not is_mask and POOLER not in place.split("."):
            inside.append(weight)
    return inside


@cache  # a run loads its encoder several times
def warn_once(line: str) -> None:
    """Log a warning that comes once in a process."""
    log.warning(line)


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return f"{', '.join(ordered[:SHOWN])}{more}"


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split())
    if "trust_remote_code" in line:
        return f"{line.partition('. ')[0]}; replug runs no code that comes with a model"
    return (line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]} ...") or "no reason is given"
