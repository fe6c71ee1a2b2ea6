"""What lies in an encoder's folder: weights, tokenizer, and how hidden states become a vector.

Read from a folder or from the hub, plain or of sentence-transformers; written for both.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers.normalizers import BertNormalizer, Lowercase, Normalizer, Sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replug.config.errors import UserError
from replug.data.files import as_other_files, write_json
from replug.data.folder import CHECKSUMS, add_checksum, require_checksums, write_checksums
from replug.models.encoder_backbone import is_dpr, load_backbone, require_encoder, token_limit
from replug.models.encoder_modules import CLS, MEAN, EncoderHead
from replug.models.encoder_prompts import Prompts, prompts_of
from replug.models.model_files import load_tokenizer, loading, read_model_config, require_own_tokenizer
from replug.models.module_chain import (
    KEY,
    POOLING_FILE,
    Module,
    optional_file,
    read_head,
    read_modules,
    read_object,
    require_known,
    write_head,
)

QUERY_FOLDER = "query_encoder"  # of a pair, within the folder of the documents' encoder
QUERY_SIDE = "query_side.json"  # beside a pair of which queries alone were tuned
MODEL_FILE = "config_sentence_transformers.json"  # prompts, similarity
# Of the Transformer module, by the model's kind in older folders.
TEXT_FILES = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
OPTIONS = ("model", "tokenizer", "processor", "config")  # of each, what is handed to transformers
HARMLESS = {"attn_implementation", "torch_dtype", "dtype", "trust_remote_code", "add_pooling_layer", "use_cache"}
# What a chain over text alone has at these; anything else is another model.
FIXED: dict[str, object] = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
TEXT_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
UNSET = ("processing_kwargs", "query_length", "document_length", "query_expansion")


@dataclass(frozen=True, slots=True)
class TextSettings:
    """How texts are read: at most so many tokens (None: the tokenizer's own limit), in lower case or as they are."""

    max_tokens: int | None = None
    lower_case: bool = False


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """An encoder as its folder has it: texts are cut at `max_tokens`, `similarity` is None where none is said."""

    backbone: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    head: EncoderHead
    prompts: Prompts
    similarity: str | None
    max_tokens: int
    lower_case: bool


def load_encoder_files(path: str) -> EncoderFiles:
    """Raises UserError for what is not there, cannot be read, or is no encoder of one vector.

    Or for a file that is not the one which `save_encoder_files` wrote.
    """
    require_checksums(Path(path), f"bring it back; if you changed it yourself, remove {CHECKSUMS} there")
    with loading(KEY, path):  # the hub may have no such name
        modules = read_modules(path)
        inner, texts = _backbone_path(path, modules), _text_settings(path, modules)
        prompts, similarity = model_settings(path)
    config = read_model_config(inner, KEY)
    tokenizer = load_tokenizer(inner, KEY)
    with loading(KEY, path), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a pooler that the folder lacks is drawn: it is not used, but the same everywhere
        model = load_backbone(inner, config, bool(modules))
        head = read_head(path, modules, model.config.hidden_size, CLS if is_dpr(config) else MEAN)
    require_own_tokenizer(tokenizer, len(model.get_input_embeddings().weight), path, KEY)  # type: ignore[arg-type]
    says_pooling = bool(modules) or optional_file(path, POOLING_FILE) is not None
    require_encoder(model, path, head.pooling.modes if says_pooling else None)
    if texts.lower_case:
        _lower(tokenizer)
    limit = token_limit(model, tokenizer, texts.max_tokens)
    return EncoderFiles(model, tokenizer, head, prompts, similarity, limit, texts.lower_case)


def is_query_side(path: str) -> bool:
    """Whether the queries alone of a folder's pair were tuned, so that an index of its documents stays valid."""
    return (Path(path) / QUERY_SIDE).is_file()


def query_encoder_in(path: str) -> str | None:
    """The folder of a pair's encoder of queries within the pair's; None where one encoder has both sides.

    Raises UserError for a pair on the hub, of which the other's files are not at hand.
    """
    if Path(path).is_dir():
        inner = Path(path) / QUERY_FOLDER
        return str(inner) if inner.is_dir() else None
    if optional_file(path, f"{QUERY_FOLDER}/config.json") is not None:
        raise UserError(f"{KEY}: {path} holds a pair of encoders; download it, and name the folder")
    return None


def mark_query_side(folder: Path) -> None:
    """Say so of a pair's folder."""
    write_json(folder / QUERY_SIDE, {"documents": "encoded as before"})
    add_checksum(folder / QUERY_SIDE)


def save_encoder_files(folder: Path, files: EncoderFiles) -> None:
    """Everything that `load_encoder_files` reads, which sentence-transformers reads to the same vectors."""
    folder.mkdir(parents=True, exist_ok=True)
    files.backbone.save_pretrained(folder, safe_serialization=True)
    files.tokenizer.save_pretrained(folder)
    write_head(folder, files.head, is_normalized=files.similarity == "cosine")
    texts = {"max_seq_length": files.max_tokens, "do_lower_case": files.lower_case}
    prompts = {"prompts": files.prompts.all_named(), "default_prompt_name": files.prompts.default}
    for name, content in ((TEXT_FILES[0], texts), (MODEL_FILE, {"similarity_fn_name": files.similarity, **prompts})):
        (folder / name).write_text(json.dumps(content, indent=2))
    write_checksums(folder)
    as_other_files(folder)


def _backbone_path(path: str, modules: list[Module]) -> str:
    """The folder of the Transformer, which older versions kept beside the other modules'."""
    inner = modules[0].folder if modules else ""
    if inner and not Path(path).is_dir():
        raise UserError(f"{KEY}: {path} keeps its Transformer in {inner}; download it, and name the folder")
    return str(Path(path) / inner) if inner else path


def _text_settings(path: str, modules: list[Module]) -> TextSettings:
    """Of a folder of sentence-transformers; raises UserError for a setting that would change the vectors otherwise."""
    inner = modules[0].folder if modules else ""
    files = (optional_file(path, str(Path(inner) / name)) for name in TEXT_FILES)
    file = next((one for one in files if one is not None), None) if modules else None
    if file is None:
        return TextSettings()
    content = read_object(file)
    options = [f"{name}_{form}" for name in OPTIONS for form in ("args", "kwargs")]
    others = ("max_seq_length", "do_lower_case", "modality_config", "unpad_inputs")
    require_known(content, (*others, *FIXED, *UNSET, *options), file)
    wrong = [name for name in UNSET if content.get(name)]
    wrong += [name for name, value in FIXED.items() if content.get(name, value) != value]
    wrong += [name for name in options if set(content.get(name) or {}) - HARMLESS]
    if "modality_config" in content and (content["modality_config"] or {}).get("text") != TEXT_FORWARD:
        wrong.append("modality_config")
    if wrong:
        raise UserError(f"{KEY}: {file} sets {wrong[0]} to {content[wrong[0]]}, which replug does not follow")
    return TextSettings(content.get("max_seq_length"), bool(content.get("do_lower_case")))


def model_settings(path: str) -> tuple[Prompts, str | None]:
    """Prompts and similarity; raises UserError for a model that is not one of one vector."""
    file = optional_file(path, MODEL_FILE)
    content: dict[str, Any] = read_object(file) if file else {}
    kind = content.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise UserError(f"{KEY}: {file} holds a {kind}; expected a SentenceTransformer, which has one vector of a text")
    named, default = content.get("prompts") or {}, content.get("default_prompt_name")
    if not isinstance(named, dict) or not all(isinstance(prompt, str) for prompt in named.values()):
        raise UserError(f"{KEY}: {file} holds prompts that are no texts by name")
    if default is not None and default not in named:
        raise UserError(f"{KEY}: {file} has the default_prompt_name {default!r}, but no such prompt")
    return prompts_of(named, default), content.get("similarity_fn_name")


def _lower(tokenizer: PreTrainedTokenizerBase) -> None:
    """Read texts in lower case, first of all, as sentence-transformers does where the folder says do_lower_case."""
    before = tokenizer.backend_tokenizer.normalizer
    if not _lowers(before):
        lower = Lowercase() if before is None else Sequence([Lowercase(), before])
        tokenizer.backend_tokenizer.normalizer = lower


def _lowers(normalizer: Normalizer | None) -> bool:
    if isinstance(normalizer, Sequence):
        return any(map(_lowers, cast(Iterable[Normalizer], normalizer)))
    return isinstance(normalizer, Lowercase) or (isinstance(normalizer, BertNormalizer) and normalizer.lowercase)
