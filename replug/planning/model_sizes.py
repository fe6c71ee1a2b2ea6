"""Sizes of encoders and language models: a table of the well-known, a local config.json, or a parameter count.

No hub is asked. What a plan needs are the weights in the layers, the width of attention, and the output layer.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.schema import RetrieverConfig
from replug.planning.encoder_head import head_size

# What a model that is known by its parameter count alone is taken for: hidden size by layers, and the vocabulary.
ENCODER_ASPECT, ENCODER_VOCABULARY = 64, 30_522  # as BERT-base
LM_ASPECT, LM_VOCABULARY = 128, 50_257  # as GPT-3 6.7B
MOST_LAYERS = 200


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Weights and widths. Biases and norms, under 0.2% of the weights, are left out.

    `layer_parameters` are those that every token is multiplied by, without embeddings and output layer.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    attention_width: int
    layer_parameters: int
    parameters: int
    kv_width: int = 0  # of keys and of values; 0: as wide as attention
    vector_width: int = 0  # of an encoder's vectors; 0: as wide as its hidden states
    gated: bool = False  # a layer has three matrices of `intermediate`

    @property
    def dim(self) -> int:
        """Numbers of an encoder's vector, behind its modules."""
        return self.vector_width or self.hidden

    def flop_per_token(self, num_tokens: int) -> float:
        """Forward FLOP of one token in a sequence: two for each weight, and attention over the whole sequence."""
        return 2.0 * self.layer_parameters + 4.0 * num_tokens * self.attention_width * self.layers

    @property
    def flop_per_prediction(self) -> float:
        """Forward FLOP of the output layer at one position."""
        return 2.0 * self.hidden * self.vocabulary


@dataclass(frozen=True, slots=True)
class Attention:
    """`kv_heads` share keys and values (None: as many as heads); heads are of `width` (None: hidden / heads)."""

    heads: int
    kv_heads: int | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a config.json says. A `gated` layer has three matrices of `intermediate`.

    `tables` are embedding tables of the vocabulary: 2 where the output layer has its own.
    """

    layers: int
    hidden: int
    intermediate: int
    attention: Attention
    vocabulary: int
    positions: int = 0
    gated: bool = False
    tables: int = 1

    def size(self, name: str) -> ModelSize:
        heads, kv_heads = self.attention.heads, self.attention.kv_heads or self.attention.heads
        head_width = self.attention.width or self.hidden // heads
        width, kv_width = heads * head_width, kv_heads * head_width
        attention = 2 * self.hidden * (width + kv_width)
        in_layers = self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.intermediate)
        embeddings = self.hidden * (self.tables * self.vocabulary + self.positions)
        return ModelSize(
            name,
            self.layers,
            self.hidden,
            self.intermediate,
            self.vocabulary,
            width,
            in_layers,
            in_layers + embeddings,
            kv_width,
            gated=self.gated,
        )


def _bert(layers: int, hidden: int, vocabulary: int = ENCODER_VOCABULARY) -> Architecture:
    return Architecture(layers, hidden, 4 * hidden, Attention(hidden // 64 or 1), vocabulary, 512)


def _gpt(layers: int, hidden: int, vocabulary: int = 50_257, positions: int = 0, tables: int = 1) -> Architecture:
    return Architecture(layers, hidden, 4 * hidden, Attention(hidden // 64), vocabulary, positions, tables=tables)


def _llama(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int],
    vocabulary: int,
    tables: int = 2,
    head_dim: int | None = None,
) -> Architecture:
    return Architecture(
        layers, hidden, intermediate, Attention(*heads, head_dim), vocabulary, gated=True, tables=tables
    )


_BASE, _LARGE, _MINI = _bert(12, 768), _bert(24, 1024), _bert(6, 384)
_XLM = 250_002  # vocabulary of XLM-R

ENCODERS = {
    "contriever": _BASE,
    "contriever-msmarco": _BASE,
    "mcontriever": _bert(12, 768, 119_547),
    "bert-base-uncased": _BASE,
    "bert-large-uncased": _LARGE,
    "all-minilm-l6-v2": _MINI,
    "all-minilm-l12-v2": _bert(12, 384),
    "all-mpnet-base-v2": _bert(12, 768, 30_527),
    "dpr-question_encoder-single-nq-base": _BASE,
    "dpr-ctx_encoder-single-nq-base": _BASE,
    "spar-wiki-bm25-lexmodel-query-encoder": _BASE,
    **{
        f"e5-{size}{v}": a
        for size, a in (("small", _bert(12, 384)), ("base", _BASE), ("large", _LARGE))
        for v in ("", "-v2")
    },
    "multilingual-e5-small": _bert(12, 384, _XLM),
    "multilingual-e5-base": _bert(12, 768, _XLM),
    "multilingual-e5-large": _bert(24, 1024, _XLM),
    **{
        f"bge-{size}-en{v}": a
        for size, a in (("small", _bert(12, 384)), ("base", _BASE), ("large", _LARGE))
        for v in ("", "-v1.5")
    },
    "bge-m3": _bert(24, 1024, _XLM),
    **{f"gte-{size}": a for size, a in (("small", _bert(12, 384)), ("base", _BASE), ("large", _LARGE))},
    "snowflake-arctic-embed-xs": _MINI,
    "snowflake-arctic-embed-m": _BASE,
    "snowflake-arctic-embed-l": _LARGE,
    "package:minilm": _MINI,
    "stand_in": Architecture(2, 32, 64, Attention(2), 292, 128),
}

LMS = {
    "distilgpt2": _gpt(6, 768, positions=1024),
    "gpt2": _gpt(12, 768, positions=1024),
    "gpt2-medium": _gpt(24, 1024, positions=1024),
    "gpt2-large": _gpt(36, 1280, positions=1024),
    "gpt2-xl": _gpt(48, 1600, positions=1024),
    "gpt-neo-125m": _gpt(12, 768, positions=2048),
    "gpt-neo-1.3b": _gpt(24, 2048, positions=2048),
    "gpt-neo-2.7b": _gpt(32, 2560, positions=2048),
    "gpt-j-6b": _gpt(28, 4096, 50_400, tables=2),
    "gpt-neox-20b": _gpt(44, 6144, 50_432, tables=2),
    "opt-125m": _gpt(12, 768, 50_272, 2050),
    "opt-350m": _gpt(24, 1024, 50_272, 2050),  # its embeddings are of width 512: 7% less in truth
    "opt-1.3b": _gpt(24, 2048, 50_272, 2050),
    "opt-2.7b": _gpt(32, 2560, 50_272, 2050),
    "opt-6.7b": _gpt(32, 4096, 50_272, 2050),
    "opt-13b": _gpt(40, 5120, 50_272, 2050),
    "opt-30b": _gpt(48, 7168, 50_272, 2050),
    "opt-66b": _gpt(64, 9216, 50_272, 2050),
    "bloom-560m": _gpt(24, 1024, 250_880),
    "bloom-1b1": _gpt(24, 1536, 250_880),
    "bloom-1b7": _gpt(24, 2048, 250_880),
    "bloom-3b": _gpt(30, 2560, 250_880),
    "bloom-7b1": _gpt(30, 4096, 250_880),
    "bloom": _gpt(70, 14_336, 250_880),
    "pythia-70m": _gpt(6, 512, 50_304, tables=2),
    "pythia-160m": _gpt(12, 768, 50_304, tables=2),
    "pythia-410m": _gpt(24, 1024, 50_304, tables=2),
    "pythia-1b": _gpt(16, 2048, 50_304, tables=2),
    "pythia-1.4b": _gpt(24, 2048, 50_304, tables=2),
    "pythia-2.8b": _gpt(32, 2560, 50_304, tables=2),
    "pythia-6.9b": _gpt(32, 4096, 50_432, tables=2),
    "pythia-12b": _gpt(36, 5120, 50_688, tables=2),
    "phi-2": _gpt(32, 2560, 51_200, tables=2),
    "llama-2-7b": _llama(32, 4096, 11_008, (32, 32), 32_000),
    "llama-2-13b": _llama(40, 5120, 13_824, (40, 40), 32_000),
    "llama-2-70b": _llama(80, 8192, 28_672, (64, 8), 32_000),
    "llama-3-8b": _llama(32, 4096, 14_336, (32, 8), 128_256),
    "llama-3-70b": _llama(80, 8192, 28_672, (64, 8), 128_256),
    "llama-3.2-1b": _llama(16, 2048, 8192, (32, 8), 128_256, 1),
    "llama-3.2-3b": _llama(28, 3072, 8192, (24, 8), 128_256, 1),
    "tinyllama-1.1b": _llama(22, 2048, 5632, (32, 4), 32_000),
    "mistral-7b": _llama(32, 4096, 14_336, (32, 8), 32_000),
    "qwen2.5-0.5b": _llama(24, 896, 4864, (14, 2), 151_936, 1),
    "qwen2.5-1.5b": _llama(28, 1536, 8960, (12, 2), 151_936, 1),
    "qwen2.5-3b": _llama(36, 2048, 11_008, (16, 2), 151_936, 1),
    "qwen2.5-7b": _llama(28, 3584, 18_944, (28, 4), 152_064),
    "qwen2.5-14b": _llama(48, 5120, 13_824, (40, 8), 152_064),
    "qwen2.5-32b": _llama(64, 5120, 27_648, (40, 8), 152_064),
    "qwen2.5-72b": _llama(80, 8192, 29_568, (64, 8), 152_064),
    "qwen3-0.6b": _llama(28, 1024, 3072, (16, 8), 151_936, 1, 128),
    "qwen3-1.7b": _llama(28, 2048, 6144, (16, 8), 151_936, 1, 128),
    "qwen3-4b": _llama(36, 2560, 9728, (32, 8), 151_936, 1, 128),
    "qwen3-8b": _llama(36, 4096, 12_288, (32, 8), 151_936, 2, 128),
    "smollm2-135m": _llama(30, 576, 1536, (9, 3), 49_152, 1),
    "smollm2-360m": _llama(32, 960, 2560, (15, 5), 49_152, 1),
    "smollm2-1.7b": _llama(24, 2048, 8192, (32, 32), 49_152, 1),
    "package:smollm2": _llama(30, 576, 1536, (9, 3), 49_152, 1),
}
# The names of releases that differ from a known size in training only.
LM_RELEASES = {"llama-3.1-": "llama-3-", "meta-llama-3": "llama-3", "qwen2-": "qwen2.5-"}
SUFFIXES = r"(-instruct|-chat|-hf|-it|-base|-deduped|-v0\.\d|-v1\.0|-intermediate-step.*)+$"


def encoder_size(path: str, parameters: float | None = None) -> ModelSize:
    """The retriever named by `retriever.path`. Raises UserError for one that is not known."""
    if parameters is not None:
        return _of_count(path, parameters, ENCODER_ASPECT, ENCODER_VOCABULARY, "--retriever-parameters")
    if (folder := _folder(path)) is not None:
        size = read_architecture(folder, "retriever.path").size(path)
        head = head_size(folder, size.hidden)
        return replace(size, parameters=size.parameters + head.parameters, vector_width=head.width)
    known = ENCODERS.get(path) or ENCODERS.get(_last_part(path))
    if known is None:
        raise UserError(_unknown("retriever.path", path, "--retriever-parameters 110e6", "facebook/contriever"))
    return known.size(path)


def retriever_size(retriever: RetrieverConfig, parameters: float | None = None) -> ModelSize:
    """Of `retriever.path`; `parameters` are those of both encoders of a pair, one of which a token passes through."""
    size, second = encoder_size(retriever.path, parameters), 0
    if retriever.query_path is not None:
        second = encoder_size(retriever.query_path, parameters).parameters
    elif retriever.train is TrainedSide.documents:
        second = size.parameters
    return replace(size, parameters=size.parameters + second)


def lm_size(path: str, parameters: float | None = None) -> ModelSize:
    """The LM named by `lm.path`, or by `lm.model` of a server. Raises UserError for one that is not known."""
    if parameters is not None:
        return _of_count(path, parameters, LM_ASPECT, LM_VOCABULARY, "--lm-parameters")
    if path.partition(":")[0] == "stand_in":  # no weights: a nominal size, so that its work grows with the texts
        return ModelSize(path, 1, 1, 1, 1, 0, 1000, 1000)
    if (folder := _folder(path)) is not None:
        return read_architecture(folder, "lm.path").size(path)
    known = LMS.get(path) or LMS.get(_release(path))
    if known is None:
        raise UserError(_unknown("lm.path", path, "--lm-parameters 7e9", "gpt2-xl"))
    return known.size(path)


def stand_in_seconds(path: str) -> float:
    """What a stand-in LM sleeps in each call, as its path says; 0 for any other."""
    name, _, seconds = path.partition(":")
    return float(seconds or 0) if name == "stand_in" else 0.0


def read_architecture(folder: Path, key: str) -> Architecture:
    """From a folder's config.json, whatever its family calls the fields. Raises UserError where one is missing."""
    file = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {file} cannot be read as JSON: {error}") from error
    hidden = _field(found, file, "hidden_size", "n_embd", "d_model", "dim")
    attention = Attention(
        heads=_field(found, file, "num_attention_heads", "n_head", "n_heads"),
        kv_heads=_optional(found, "num_key_value_heads"),
        width=_optional(found, "head_dim"),
    )
    return Architecture(
        layers=_field(found, file, "num_hidden_layers", "n_layer", "n_layers"),
        hidden=hidden,
        intermediate=_optional(found, "intermediate_size", "n_inner", "ffn_dim", "hidden_dim") or 4 * hidden,
        attention=attention,
        vocabulary=_field(found, file, "vocab_size"),
        positions=0
        if {"rope_theta", "rope_parameters"} & found.keys()
        else _optional(found, "max_position_embeddings", "n_positions") or 0,
        gated=str(found.get("hidden_act")) == "silu",
        tables=1 if found.get("tie_word_embeddings", True) else 2,
    )


def _field(found: dict[str, Any], file: Path, *names: str) -> int:
    value = _optional(found, *names)
    if value is None:
        raise UserError(
            f"{file} has none of {', '.join(names)}; give the size by --lm-parameters or --retriever-parameters"
        )
    return value


def _optional(found: dict[str, Any], *names: str) -> int | None:
    return next((int(found[name]) for name in names if found.get(name)), None)


def _folder(path: str) -> Path | None:
    folder = Path(path).expanduser()
    return folder if (folder / "config.json").is_file() else None


def _last_part(path: str) -> str:
    return path.rpartition("/")[2].lower()


def _release(path: str) -> str:
    name = re.sub(SUFFIXES, "", _last_part(path))
    for prefix, known in LM_RELEASES.items():
        name = known + name.removeprefix(prefix) if name.startswith(prefix) else name
    return name


def _of_count(name: str, parameters: float, aspect: int, vocabulary: int, flag: str) -> ModelSize:
    """A model of so many parameters in the usual proportions: `aspect` units of width for each layer."""
    if not 1e5 <= parameters <= 1e13:
        raise UserError(f"{flag} is {parameters:g}; expected a number of parameters, such as 110e6 or 7e9")
    layers = min(range(1, MOST_LAYERS), key=lambda n: abs(_proportioned(n, aspect, vocabulary) - parameters))
    hidden = aspect * layers
    in_layers = max(round(parameters / 2), round(parameters) - hidden * vocabulary)
    return ModelSize(name, layers, hidden, 4 * hidden, vocabulary, hidden, in_layers, round(parameters))


def _proportioned(layers: int, aspect: int, vocabulary: int) -> int:
    hidden = aspect * layers
    return 12 * layers * hidden**2 + hidden * vocabulary


def _unknown(key: str, path: str, flag: str, example: str) -> str:
    return (
        f"{key}: the size of {path!r} is not known here and no hub is asked; expected a well-known name such as "
        f"{example}, a folder with config.json, or {flag}"
    )
