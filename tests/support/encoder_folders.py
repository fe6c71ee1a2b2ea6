"""Small random encoders of many architectures, as folders that sentence-transformers and replug read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5EncoderModel,
    UMT5EncoderModel,
)

from replug.models.packaged import write_stand_in_encoder

WIDTH = 16
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # the padding is 1, as RoBERTa's kin have it
WORDS = [f"w{number}" for number in range(60)] + ["query", "passage", ":"]
SMALL = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
BERT = {
    **SMALL,
    **{"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    **{"max_position_embeddings": 40, "initializer_range": 0.3},
}
T5 = {**SMALL, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
NARROW = {**BERT, "embedding_size": 8}
CAUSAL = {**BERT, "num_key_value_heads": 1, "head_dim": 8}
# By the names that transformers has for them.
ARCHITECTURES: dict[str, dict] = {
    **dict.fromkeys(["bert", "xlm-roberta", "mpnet", "nomic_bert"], BERT),
    "modernbert": {**BERT, "cls_token_id": 0, "sep_token_id": 2},
    "distilbert": {**SMALL, "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 40},
    **dict.fromkeys(["electra", "albert"], NARROW),
    **dict.fromkeys(["t5", "umt5"], T5),
    "qwen3": CAUSAL,
    "gemma3_text": {**CAUSAL, "use_bidirectional_attention": True},
}
WITH_A_DECODER = {"t5": T5EncoderModel, "umt5": UMT5EncoderModel}


def config_of(architecture: str) -> PreTrainedConfig:
    return AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])


def write_encoder(folder: Path, architecture: str, padding_side: str = "right") -> None:
    """A random model and its tokenizer, in the plain format of transformers."""
    config = config_of(architecture)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = WITH_A_DECODER.get(architecture, AutoModel.from_config)(config)
    model.save_pretrained(folder)
    _tokenizer("$A </s>" if architecture == "qwen3" else "<s> $A </s>", padding_side).save_pretrained(folder)


def write_chain(
    folder: Path,
    pooling: Mapping[str, object],
    layers: Sequence[str] = (),
    prompts: Mapping[str, str] | None = None,
    **settings: object,
) -> None:
    """`modules.json` and what it names: `layers` are Dense (to 12 numbers, Tanh), LayerNorm, Normalize, Dropout."""
    width = WIDTH * (len(modes) if isinstance(modes := pooling.get("pooling_mode"), list) else 1)
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": WIDTH, **pooling})
    kinds = ["Transformer", "Pooling", *layers]
    names = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds[1:], 1))]
    for name, kind in zip(names[2:], layers, strict=True):
        width = _write_layer(folder / name, kind, width)
    write_json(
        folder / "modules.json",
        [
            {"idx": place, "name": str(place), "path": name, "type": f"sentence_transformers.models.{kind}"}
            for place, (name, kind) in enumerate(zip(names, kinds, strict=True))
        ],
    )
    write_json(folder / "config_sentence_transformers.json", {"prompts": dict(prompts or {}), **settings})


def write_static(folder: Path, prompts: Mapping[str, str] | None = None, layers: Sequence[str] = ()) -> None:
    """A random table as model2vec writes it (float16 rows shared by tokens, weighted), and what follows it."""
    folder.mkdir(parents=True)
    generator, rows = torch.Generator().manual_seed(3), len(SPECIAL) + len(WORDS)
    table = {
        "embeddings": torch.randn(40, WIDTH, generator=generator).half(),
        "mapping": torch.arange(rows) % 40,
        "weights": torch.rand(rows, generator=generator) + 0.5,
    }
    save_file(table, folder / "model.safetensors")
    _tokenizer("<s> $A </s>", "right").backend_tokenizer.save(str(folder / "tokenizer.json"))
    write_chain(folder, {}, layers, prompts)
    [first, _, *others] = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [{**first, "type": "sentence_transformers.models.StaticEmbedding"}, *others])


def write_json(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def _write_layer(folder: Path, kind: str, width: int) -> int:
    """Returns the numbers of a vector behind it."""
    generator = torch.Generator().manual_seed(len(kind))
    if kind == "Dense":
        activation = "torch.nn.modules.activation.Tanh"
        sizes = {"in_features": width, "out_features": 12, "bias": True, "activation_function": activation}
        write_json(folder / "config.json", sizes)
        weights = {"linear.weight": torch.randn(12, width, generator=generator), "linear.bias": torch.ones(12) / 3}
    elif kind == "LayerNorm":
        write_json(folder / "config.json", {"dimension": width})
        weights = {"norm.weight": torch.rand(width, generator=generator), "norm.bias": torch.ones(width) / 5}
    else:
        write_json(folder / "config.json", {"dropout": 0.9} if kind == "Dropout" else {})
        return width
    save_file(weights, folder / "model.safetensors")
    return 12 if kind == "Dense" else width


def _tokenizer(template: str, padding_side: str) -> PreTrainedTokenizerFast:
    ids = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=32,
        padding_side=padding_side,
    )


def write_dpr(folder: Path, kind: type[PreTrainedModel], seed: int, projection_dim: int = 0) -> Path:
    """One of DPR's models with the words of the stand-in."""
    write_stand_in_encoder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = DPRConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.2,
        projection_dim=projection_dim,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder)
    return folder


def write_dpr_pair(folder: Path) -> tuple[Path, Path]:
    """Encoders of documents and of questions."""
    return write_dpr(folder / "ctx", DPRContextEncoder, 1), write_dpr(folder / "question", DPRQuestionEncoder, 2)
