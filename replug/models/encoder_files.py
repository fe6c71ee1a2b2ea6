"""Read an encoder through sentence-transformers, and refuse folders that would silently load as another model.

sentence-transformers reads modules, pooling, prompts, similarity and pairs (`Router`), from a folder or from the hub. A
folder without `modules.json` is wrapped with mean pooling, as Contriever needs it; DPR's encoders take their first
token. This file refuses, by name: code that comes with a model, pickles, weights that are missing or of no use, another
model's tokenizer, and models that make no vector of a text.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from torch import Tensor, nn
from transformers import BertConfig, BertModel, DPRContextEncoder, DPRQuestionEncoder, PreTrainedConfig, PreTrainedModel

from replug.config.errors import UserError
from replug.config.paths import SETTINGS_FILE, TUNED_QUERIES
from replug.data.files import write_json
from replug.data.folder import CHECKSUMS, add_checksum, require_checksums
from replug.models.architecture import trust_given_masks, use_fused_gelu
from replug.models.model_files import (
    CAUSAL_LMS,
    SAFELY,
    load_whole,
    loading,
    read_model_config,
    require_no_adapter,
    require_own_tokenizer,
    require_tokenizer,
    require_whole,
)
from replug.models.packaged import optional_file

KEY = "retriever.path"
TASKS = ("query", "document")
MODULES_FILE = "modules.json"
DPR_ENCODERS = {"DPRContextEncoder": DPRContextEncoder, "DPRQuestionEncoder": DPRQuestionEncoder}
NO_LIMIT = 10**9  # a tokenizer without a known limit has an absurd one
UNKNOWN_LIMIT = 512  # tokens, if neither tokenizer nor model has a limit
TEXT_FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
OUR_OPTIONS = ("torch_dtype", "attn_implementation")  # in a folder's model_args; replug sets its own
TOKEN_SETTINGS = ("query_length", "document_length", "query_expansion", "processing_kwargs")


class WholeTransformer(Transformer):
    """A `Transformer` with all of its weights in its files, as safetensors."""

    @torch.random.fork_rng(devices=[])  # the program's own randomness stays as it is
    def _load_model(self, model_name_or_path: str, *given: Any, **options: Any) -> PreTrainedModel:
        path, config = model_name_or_path, given[1]  # behind the task
        torch.manual_seed(0)  # a pooler that the files lack is random: unused, but the same everywhere
        if config.model_type == "dpr":
            return _load_dpr(path, config)
        ours = {name: options[name] for name in options if name not in OUR_OPTIONS}
        loaded: Any = super()._load_model(path, *given, **{**ours, **SAFELY, "dtype": torch.float32})
        model, report = loaded
        require_whole(model, report, path, KEY)
        return model


class _Container(SentenceTransformer):
    """A loader of whole transformers that refuses models of another kind than `SentenceTransformer`."""

    _module_classes = {  # noqa: RUF012
        f"sentence_transformers.{place}.Transformer": WholeTransformer
        for place in ("models", "models.Transformer", "base.modules.transformer", "sentence_transformer.modules")
    }

    def _load_converted_modules(self, model_name_or_path: str, *_: Any, **options: Any) -> Any:
        raise UserError(
            f"{KEY}: {model_name_or_path} holds a {options['model_type']}; expected a SentenceTransformer, with "
            "one vector for each text"
        )


def load_container(path: str) -> SentenceTransformer:
    """Return the encoder in a folder or under a hub name, on the CPU, in float32.

    Raises UserError if it is missing, damaged, incomplete, or not an encoder with one vector for each text.
    """
    require_checksums(Path(path), f"bring it back; if you changed it yourself, remove {CHECKSUMS} there")
    is_folder = Path(path).is_dir()
    with loading(KEY, path), torch.random.fork_rng(devices=[]):
        modules_file = optional_file(path, MODULES_FILE)
        if modules_file is None:
            container = SentenceTransformer(modules=_plain_modules(path), device="cpu")
        else:
            _check_modules(path, modules_file)
            container = _Container(path, device="cpu", trust_remote_code=False, local_files_only=is_folder)
        first: dict[Any, None] = dict.fromkeys(chain(container, task, path)[0] for task in TASKS)
        for module in first:
            if isinstance(module, StaticEmbedding):
                _check_static(module, path)
            else:
                _check_transformer(module, path)
    return container


def chain(container: SentenceTransformer, task: str, path: str = "") -> list[nn.Module]:
    """Return the modules that encode a query or a document."""
    modules: list[nn.Module] = []
    for module in container:
        routes: Any = module.sub_modules if isinstance(module, Router) else {task: [module]}
        if task not in routes:
            raise UserError(f"{KEY}: {path} has a Router of {', '.join(routes)}; expected query and document")
        modules += routes[task]
    return modules


def most_tokens(model: nn.Module) -> int:
    """Return the most tokens that a model's position table holds; NO_LIMIT without one.

    RoBERTa and its kin count positions from behind the padding's, so their table holds fewer tokens than it has rows.
    """
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if isinstance(table, nn.Embedding):
        return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else NO_LIMIT


def in_words(module: nn.Module) -> str:
    """Return the name of a module with the settings that change its vectors."""
    if isinstance(module, Pooling):
        modes = [module.pooling_mode] if isinstance(module.pooling_mode, str) else module.pooling_mode
        return "+".join(modes) + ("" if module.include_prompt else " without the prompt")
    if isinstance(module, StaticEmbedding):
        return "static"
    if isinstance(module, Dense):
        return f"Dense({module.out_features}, {type(module.activation_function).__name__})"
    return type(module).__name__


def has_tuned_queries(folder: str) -> bool:
    """Return whether a folder has tuned queries alone, so that an index of its documents stays valid."""
    return Path(folder).is_dir() and TUNED_QUERIES in _settings(folder)


def document_encoder(path: str) -> dict[str, str] | None:
    """Return the documents' encoder of a folder or hub name that holds an encoder of queries alone, else None.

    In the result, `path` is as in `retriever.path`, and `sha256` is `Encoder.documents_sha256`.
    """
    return _settings(path).get(TUNED_QUERIES)


def mark_tuned_queries(folder: Path, documents: Mapping[str, str] | None) -> None:
    """Mark a folder as tuned queries alone; `documents` as `document_encoder` returns it, None for a pair.

    The mark lies in a file that every loader fetches from the hub, so a cache always has it.
    """
    write_json(folder / SETTINGS_FILE, {**_settings(str(folder)), TUNED_QUERIES: documents})
    add_checksum(folder / SETTINGS_FILE)


def numbers_sha256(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of weights and their names, in the order of the names."""
    digest = hashlib.sha256()
    for name, weight in sorted(named, key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _settings(path: str) -> dict[str, Any]:
    file = optional_file(path, SETTINGS_FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file else {}


def _plain_modules(path: str) -> list[nn.Module]:
    """Return the modules for a plain folder of transformers: the model and a pooling."""
    config = read_model_config(path, KEY)
    names, is_dpr = config.architectures or [], config.model_type == "dpr"
    if CAUSAL_LMS & set(names):
        raise UserError(
            f"{KEY}: {path} holds a {names[0]}, which reads from left to right as language models do; expected a "
            "BERT-like encoder, or a folder of sentence-transformers that names its pooling"
        )
    require_tokenizer(path, KEY)
    safe = {"trust_remote_code": False}
    transformer = WholeTransformer(path, processor_kwargs=dict(safe), config_kwargs=dict(safe))
    return [transformer, Pooling(transformer.get_embedding_dimension(), "cls" if is_dpr else "mean")]


def _check_modules(path: str, modules_file: Path) -> None:
    """Raise UserError for missing files that sentence-transformers would replace, with a warning at most.

    These are a tokenizer, and weights as safetensors. An adapter is refused too.
    """
    for module in json.loads(modules_file.read_text(encoding="utf-8")):
        inner, kind = module["path"], module["type"].rpartition(".")[2]
        if kind == "Transformer":
            require_tokenizer(str(Path(path) / inner), KEY)
            require_no_adapter(path, KEY, inner)
        weights = str(Path(inner, "model.safetensors"))
        if kind in ("Dense", "LayerNorm", "StaticEmbedding") and optional_file(path, weights) is None:
            raise UserError(
                f"{KEY}: {path} has no {weights}, the weights of its {kind}; pickled weights "
                "(pytorch_model.bin) are not read: load the model with SentenceTransformer and save it again"
            )


def _check_static(module: StaticEmbedding, path: str) -> None:
    """Make a loaded table float32. Raises UserError for another model's tokenizer."""
    rows, last = module.num_embeddings, max(module.tokenizer.get_vocab().values())
    if last >= rows:
        raise UserError(
            f"{KEY}: the tokenizer of {path} has tokens up to number {last:,}, but its table has {rows:,} rows: it is "
            "another model's; bring back the tokenizer.json that came with the weights"
        )
    module.base_model = path
    module.float()


def _check_transformer(transformer: nn.Module, path: str) -> None:
    """Make a loaded transformer the library's own class, with its token limit. Raises UserError for other models.

    replug tokenizes texts without the module, so settings of the module that change token ids are refused.
    """
    if not isinstance(transformer, WholeTransformer):
        raise UserError(
            f"{KEY}: {path} begins with a {type(transformer).__name__}; expected a Transformer or a StaticEmbedding"
        )
    transformer.__class__ = Transformer  # saved folders load without replug
    model, tokenizer, config = transformer.model, transformer.tokenizer, transformer.model.config
    has_decoder = config.is_encoder_decoder and hasattr(model, "decoder")
    if has_decoder or not isinstance(getattr(config, "hidden_size", None), int):
        raise UserError(f"{KEY}: {path} holds a {type(model).__name__}; expected an encoder of text alone")
    changed = [name for name in TOKEN_SETTINGS if getattr(transformer, name)]
    if transformer.modality_config.get("text") != TEXT_FORWARD or transformer.module_output_name != "token_embeddings":
        changed.append("modality_config")
    if changed:
        raise UserError(f"{KEY}: {path} sets {changed[0]} of its Transformer, which replug does not support")
    require_own_tokenizer(tokenizer, len(model.get_input_embeddings().weight), path, KEY)
    limit = min(tokenizer.model_max_length or NO_LIMIT, most_tokens(model))
    tokenizer.model_max_length = limit if limit < NO_LIMIT else UNKNOWN_LIMIT
    if getattr(model, "pooler", None) is not None:
        model.pooler.requires_grad_(False)
    use_fused_gelu(model)
    trust_given_masks(model)


def _load_dpr(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the BERT inside a folder's encoder of DPR (Karpukhin et al. 2020), for questions or for contexts.

    `AutoModel` takes both for an encoder of questions, and would initialize an encoder of contexts at random.
    """
    name = (config.architectures or ["nameless part"])[0]
    if name not in DPR_ENCODERS or config.projection_dim:
        raise UserError(
            f"{KEY}: {path} holds a {name} of DPR, projection_dim {config.projection_dim}; "
            f"expected {' or '.join(DPR_ENCODERS)} without a projection"
        )
    whole = load_whole(DPR_ENCODERS[name], path, KEY, config=config, dtype=torch.float32)
    fields = config.to_dict() | {"model_type": "bert", "architectures": ["BertModel"]}
    bert = BertModel(BertConfig.from_dict(fields), add_pooling_layer=False)
    bert.load_state_dict(whole.get_submodule(f"{whole.base_model_prefix}.bert_model").state_dict())
    return bert
