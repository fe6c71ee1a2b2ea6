"""What lies in an encoder's folder: weights, tokenizer, and how hidden states become a vector.

Read from a folder or from the hub, written for `transformers` and `sentence-transformers`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    DPRContextEncoder,
    DPRQuestionEncoder,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from replug.configs.errors import UserError
from replug.data.checksums import NAME as CHECKSUMS
from replug.data.checksums import add_checksum, require_checksums, write_checksums
from replug.data.files import as_other_files, write_json
from replug.models.model_files import load_tokenizer, loading, read_model_config, require_own_tokenizer
from replug.models.whole_weights import load_whole

KEY = "retriever.path"
QUERY_SIDE = "query_side.json"  # beside an encoder that was tuned for queries alone
MEAN, CLS = "mean", "cls"  # over all tokens (Contriever), or of the first alone (DPR, BGE)
POOLING_FLAGS = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS}
DPR_ENCODERS = {"DPRContextEncoder": DPRContextEncoder, "DPRQuestionEncoder": DPRQuestionEncoder}
POOLING_FILE = "1_Pooling/config.json"  # where sentence-transformers keeps it
PROBE_TOKENS = 4  # of two short texts that differ after their first token
# Of no use to vectors: the pooler, and the heads that a model was pretrained with.
UNUSED = ("pooler", "cls.predictions", "cls.seq_relationship", "lm_head")


def load_encoder_files(path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Model, fast tokenizer and pooling. Raises UserError for what is not there, or is no encoder of one vector.

    Or for a file that is not the one which `save_encoder_files` wrote.
    """
    require_checksums(Path(path), f"bring it back; if you changed it yourself, remove {CHECKSUMS} there")
    config = read_model_config(path, KEY)
    tokenizer = load_tokenizer(path, KEY)
    with loading(KEY, path):
        pooling = _pooling(path, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a pooler that the folder lacks is drawn: it is not used, but the same everywhere
            model = _load_model(path, config)
    if getattr(model, "pooler", None) is not None:
        model.pooler.requires_grad_(False)  # neither pooling uses it
    require_own_tokenizer(tokenizer, len(model.get_input_embeddings().weight), path, KEY)  # type: ignore[arg-type]
    _require_encoder(model, path)
    return model, tokenizer, pooling


def is_query_side(path: str) -> bool:
    """Whether a folder's encoder was tuned for queries alone, so that another embeds the documents."""
    return (Path(path) / QUERY_SIDE).is_file()


def mark_query_side(folder: Path) -> None:
    """Say so of an encoder's folder."""
    write_json(folder / QUERY_SIDE, {"documents": "another encoder, which stayed as it was"})
    add_checksum(folder / QUERY_SIDE)


def save_encoder_files(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pooling: str,
    max_tokens: int,
    similarity: str,
) -> None:
    """Everything that `load_encoder_files` reads, and what sentence-transformers reads besides."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    files = _sentence_transformers_files(model.config.hidden_size, pooling, max_tokens, similarity)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2))
    write_checksums(folder)
    as_other_files(folder)


def _load_model(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    return _load_dpr(path, config) if _is_dpr(config) else _load(AutoModel, path, config)


def _load(kind: Any, path: str, config: PreTrainedConfig) -> PreTrainedModel:
    return load_whole(kind, path, KEY, UNUSED, config=config, dtype=torch.float32)


def _require_encoder(model: PreTrainedModel, path: str) -> None:
    """Raise UserError for a causal LM: its first state knows nothing of the tokens after it, so a mean of states is
    mostly that of words without their context. Encoders with a decoder want more than a text.
    """
    if model.config.is_encoder_decoder:
        raise UserError(f"{KEY}: {path} holds a {type(model).__name__}, which has a decoder; expected an encoder alone")
    texts = torch.arange(PROBE_TOKENS).repeat(2, 1)
    texts[1, 1:] += PROBE_TOKENS
    with torch.inference_mode():
        first, other = model.eval()(input_ids=texts, attention_mask=torch.ones_like(texts)).last_hidden_state[:, 0]
    if torch.allclose(first, other, rtol=0, atol=1e-6):
        raise UserError(
            f"{KEY}: {path} holds a {type(model).__name__}, which reads from left to right as language models do; "
            "expected a BERT-like encoder"
        )


def _is_dpr(config: PreTrainedConfig) -> bool:
    return config.model_type == "dpr"


def _load_dpr(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The BERT inside one of DPR's two encoders (Karpukhin et al. 2020): the one that the folder holds.

    `AutoModel` takes every one of them for an encoder of questions, and would draw the weights of the other at random.
    """
    name = (config.architectures or ["nameless part"])[0]
    if name not in DPR_ENCODERS or config.projection_dim:
        raise UserError(
            f"retriever.path: {path} holds a {name} of DPR, projection_dim {config.projection_dim}; "
            f"expected {' or '.join(DPR_ENCODERS)} without a projection"
        )
    whole = _load(DPR_ENCODERS[name], path, config)
    fields = config.to_dict() | {"model_type": "bert", "architectures": ["BertModel"]}
    bert = BertModel(BertConfig.from_dict(fields), add_pooling_layer=False)
    bert.load_state_dict(whole.get_submodule(f"{whole.base_model_prefix}.bert_model").state_dict())
    return bert


def _pooling(path: str, config: PreTrainedConfig) -> str:
    """As sentence-transformers wrote it down; else that of DPR for DPR, and Contriever's for all others."""
    file = optional_file(path, POOLING_FILE)
    if file is None:
        return CLS if _is_dpr(config) else MEAN
    modes = _pooling_modes(json.loads(file.read_text()))
    if modes not in ([MEAN], [CLS]):
        raise UserError(f"retriever.path: {path} pools by {' and '.join(modes)} ({POOLING_FILE}); expected mean or cls")
    return modes[0]


def optional_file(path: str, name: str) -> Path | None:
    """A file of a folder, or of the hub; without a network, of what was fetched from there before."""
    if Path(path).is_dir():
        return Path(path) / name if (Path(path) / name).is_file() else None
    try:
        return Path(hf_hub_download(path, name))
    except EntryNotFoundError:
        return None


def _pooling_modes(content: dict[str, Any]) -> list[str]:
    """One key in newer files, a flag for each mode in older ones."""
    if given := content.get("pooling_mode"):
        return [given] if isinstance(given, str) else list(given)
    flags = [name for name, is_on in content.items() if name.startswith("pooling_mode_") and is_on]
    return [POOLING_FLAGS.get(flag, flag) for flag in flags] or [MEAN]


def _sentence_transformers_files(dim: int, pooling: str, max_tokens: int, similarity: str) -> dict[str, object]:
    kinds = ["Transformer", "Pooling"] + (["Normalize"] if similarity == "cosine" else [])
    folders = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": folders[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        POOLING_FILE: {"word_embedding_dimension": dim} | {flag: pooling == of for flag, of in POOLING_FLAGS.items()},
        "config_sentence_transformers.json": {"similarity_fn_name": similarity},
    }
