"""Find the sizes of encoders and LMs from a local config.json, a table of well-known models, or a parameter count.

No hub is asked. `modules.json`, or the `Router` of a pair, gives the width of an encoder's vectors.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.paths import SETTINGS_FILE, TUNED_QUERIES
from replug.config.schema import LMConfig, RetrieverConfig

# Hidden size by layers, and the vocabulary, of a model that is known by its parameter count alone.
ENCODER_ASPECT, ENCODER_VOCABULARY = 64, 30_522  # as BERT-base
LM_ASPECT, LM_VOCABULARY = 128, 50_257  # as GPT-3 6.7B
MOST_LAYERS = 200


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Weights and widths. Biases and norms, under 0.2% of the weights, are left out.

    Every token is multiplied by the `layer_parameters`, which do not count embeddings and output layer.
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
        """Return the width of the encoder's vectors."""
        return self.vector_width or self.hidden

    def flop_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOP of one token: two per weight, and attention over the whole sequence."""
        return 2.0 * self.layer_parameters + 4.0 * num_tokens * self.attention_width * self.layers

    @property
    def flop_per_prediction(self) -> float:
        """Return the forward FLOP of the output layer at one position."""
        return 2.0 * self.hidden * self.vocabulary


def transformer(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    vocabulary: int,
    positions: int = 0,
    gated: bool = False,
    tables: int = 1,
    kv_heads: int | None = None,
    head_width: int | None = None,
) -> ModelSize:
    """Return the size of what a config.json says. `kv_heads` share keys and values (None: as many as heads).

    Heads are of `head_width` (None: hidden / heads). A `gated` layer has three matrices of `intermediate`. There are
    two `tables` of the vocabulary where the output layer has its own weights.
    """
    head_width = head_width or hidden // heads
    width, kv_width = heads * head_width, (kv_heads or heads) * head_width
    in_layers = layers * (2 * hidden * (width + kv_width) + (3 if gated else 2) * hidden * intermediate)
    whole = in_layers + hidden * (tables * vocabulary + positions)
    return ModelSize("", layers, hidden, intermediate, vocabulary, width, in_layers, whole, kv_width, gated=gated)


def _bert(layers: int, hidden: int, vocabulary: int = ENCODER_VOCABULARY) -> ModelSize:
    return transformer(layers, hidden, 4 * hidden, hidden // 64, vocabulary, 512)


def _gpt(layers: int, hidden: int, vocabulary: int = 50_257, positions: int = 0, tables: int = 1) -> ModelSize:
    return transformer(layers, hidden, 4 * hidden, hidden // 64, vocabulary, positions, tables=tables)


def _llama(
    layers: int, hidden: int, inner: int, heads: int, kv: int, vocabulary: int, tables: int = 2, each: int | None = None
) -> ModelSize:
    return transformer(layers, hidden, inner, heads, vocabulary, 0, True, tables, kv, each)


_SMALL, _BASE, _LARGE = _bert(12, 384), _bert(12, 768), _bert(24, 1024)
_XLM = 250_002  # vocabulary of XLM-R

ENCODERS = {
    **dict.fromkeys(("contriever", "contriever-msmarco", "bert-base-uncased", "snowflake-arctic-embed-m"), _BASE),
    **dict.fromkeys(("dpr-question_encoder-single-nq-base", "dpr-ctx_encoder-single-nq-base"), _BASE),
    "spar-wiki-bm25-lexmodel-query-encoder": _BASE,
    "mcontriever": _bert(12, 768, 119_547),
    "bert-large-uncased": _LARGE,
    **dict.fromkeys(("all-minilm-l6-v2", "package:minilm", "snowflake-arctic-embed-xs"), _bert(6, 384)),
    "all-minilm-l12-v2": _SMALL,
    "all-mpnet-base-v2": _bert(12, 768, 30_527),
    **{
        name.format(size): architecture
        for size, architecture in (("small", _SMALL), ("base", _BASE), ("large", _LARGE))
        for name in ("e5-{}", "e5-{}-v2", "bge-{}-en", "bge-{}-en-v1.5", "gte-{}")
    },
    "multilingual-e5-small": _bert(12, 384, _XLM),
    "multilingual-e5-base": _bert(12, 768, _XLM),
    "multilingual-e5-large": _bert(24, 1024, _XLM),
    "bge-m3": _bert(24, 1024, _XLM),
    "stand_in": transformer(2, 32, 64, 2, 292, 128),
}

LMS = {
    "distilgpt2": _gpt(6, 768, positions=1024),
    "gpt2": _gpt(12, 768, positions=1024),
    "gpt2-medium": _gpt(24, 1024, positions=1024),
    "gpt2-large": _gpt(36, 1280, positions=1024),
    "gpt2-xl": _gpt(48, 1600, positions=1024),
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
    "pythia-160m": _gpt(12, 768, 50_304, tables=2),
    "pythia-410m": _gpt(24, 1024, 50_304, tables=2),
    "pythia-1.4b": _gpt(24, 2048, 50_304, tables=2),
    "pythia-6.9b": _gpt(32, 4096, 50_432, tables=2),
    "llama-2-7b": _llama(32, 4096, 11_008, 32, 32, 32_000),
    "llama-2-13b": _llama(40, 5120, 13_824, 40, 40, 32_000),
    "llama-2-70b": _llama(80, 8192, 28_672, 64, 8, 32_000),
    "llama-3-8b": _llama(32, 4096, 14_336, 32, 8, 128_256),
    "llama-3-70b": _llama(80, 8192, 28_672, 64, 8, 128_256),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, 128_256, 1),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 8, 128_256, 1),
    "mistral-7b": _llama(32, 4096, 14_336, 32, 8, 32_000),
    "qwen2.5-0.5b": _llama(24, 896, 4864, 14, 2, 151_936, 1),
    "qwen2.5-1.5b": _llama(28, 1536, 8960, 12, 2, 151_936, 1),
    "qwen2.5-7b": _llama(28, 3584, 18_944, 28, 4, 152_064),
    "qwen2.5-32b": _llama(64, 5120, 27_648, 40, 8, 152_064),
    "qwen2.5-72b": _llama(80, 8192, 29_568, 64, 8, 152_064),
    "qwen3-0.6b": _llama(28, 1024, 3072, 16, 8, 151_936, 1, 128),
    "qwen3-1.7b": _llama(28, 2048, 6144, 16, 8, 151_936, 1, 128),
    "qwen3-4b": _llama(36, 2560, 9728, 32, 8, 151_936, 1, 128),
    "qwen3-8b": _llama(36, 4096, 12_288, 32, 8, 151_936, 2, 128),
    **dict.fromkeys(("smollm2-135m", "package:smollm2"), _llama(30, 576, 1536, 9, 3, 49_152, 1)),
    "smollm2-360m": _llama(32, 960, 2560, 15, 5, 49_152, 1),
    "smollm2-1.7b": _llama(24, 2048, 8192, 32, 32, 49_152, 1),
}
# The names of releases that differ from a known size in training only.
LM_RELEASES = {"llama-3.1-": "llama-3-", "meta-llama-3": "llama-3", "qwen2-": "qwen2.5-"}
SUFFIXES = r"(-instruct|-chat|-hf|-it|-base|-deduped|-v0\.\d|-v1\.0|-intermediate-step.*)+$"


def encoder_size(path: str, parameters: float | None = None) -> ModelSize:
    """Return the size of the retriever at `retriever.path`. Raises UserError for one that is not known."""
    if parameters is not None:
        return _of_count(path, parameters, ENCODER_ASPECT, ENCODER_VOCABULARY, "--retriever-parameters")
    if (folder := _folder(path)) is not None:
        transformer = next((inner for kind, inner in _modules(folder) if kind == "Transformer"), folder)
        size = read_size(transformer, "retriever.path")
        width, dense = head_size(folder, size.hidden)
        return replace(size, name=path, parameters=size.parameters + dense, vector_width=width)
    known = ENCODERS.get(path) or ENCODERS.get(_last_part(path))
    if known is None:
        raise UserError(_unknown("retriever.path", path, "--retriever-parameters 110e6", "facebook/contriever"))
    return replace(known, name=path)


def retriever_size(retriever: RetrieverConfig, parameters: float | None = None) -> ModelSize:
    """Return the size of a retriever. Its `parameters` are those of both encoders of a pair."""
    size, second = encoder_size(retriever.path, parameters), 0
    if retriever.query_path is not None:
        second = encoder_size(retriever.query_path, parameters).parameters
    elif retriever.train is TrainedSide.documents:
        second = size.parameters
    elif (folder := _folder(retriever.path)) is not None:  # an export of tuned queries may name its documents' encoder
        known = _read_json(folder / SETTINGS_FILE, "retriever.path", {}).get(TUNED_QUERIES)
        second = encoder_size(known["path"], parameters).parameters if known and known["path"] else 0
    return replace(size, parameters=size.parameters + second)


def lm_size(path: str, parameters: float | None = None) -> ModelSize:
    """Return the size of `lm.path`, or of a server's `lm.model`. Raises UserError for one that is not known."""
    if parameters is not None:
        return _of_count(path, parameters, LM_ASPECT, LM_VOCABULARY, "--lm-parameters")
    if path.partition(":")[0] == "stand_in":  # no weights: a nominal size, so that its work grows with the texts
        return ModelSize(path, 1, 1, 1, 1, 0, 1000, 1000)
    if (folder := _folder(path)) is not None:
        return replace(read_size(folder, "lm.path"), name=path)
    name = re.sub(SUFFIXES, "", _last_part(path))
    for prefix, renamed in LM_RELEASES.items():
        name = renamed + name.removeprefix(prefix) if name.startswith(prefix) else name
    known = LMS.get(path) or LMS.get(name)
    if known is None:
        raise UserError(_unknown("lm.path", path, "--lm-parameters 7e9", "gpt2-xl"))
    return replace(known, name=path)


def known_parameters(lm: LMConfig) -> float | None:
    """Return the parameters of an LM by a table or by its own files; None means that neither has it."""
    try:
        return float(lm_size(lm.path or lm.model or "").parameters)
    except UserError:
        return None


def read_size(folder: Path, key: str) -> ModelSize:
    """Read a folder's config.json, whatever its family calls the fields. Raises UserError where one is missing."""
    file = folder / "config.json"
    found = _read_json(file, key, {})

    def optional(*names: str) -> int | None:
        return next((int(found[name]) for name in names if found.get(name)), None)

    def required(*names: str) -> int:
        value = optional(*names)
        if value is None:
            raise UserError(
                f"{file} has none of {', '.join(names)}; give the size by --lm-parameters or --retriever-parameters"
            )
        return value

    hidden = required("hidden_size", "n_embd", "d_model", "dim")
    is_rotary = bool({"rope_theta", "rope_parameters"} & found.keys())
    return transformer(
        layers=required("num_hidden_layers", "n_layer", "n_layers"),
        hidden=hidden,
        intermediate=optional("intermediate_size", "n_inner", "ffn_dim", "hidden_dim") or 4 * hidden,
        heads=required("num_attention_heads", "n_head", "n_heads"),
        vocabulary=required("vocab_size"),
        positions=0 if is_rotary else optional("max_position_embeddings", "n_positions") or 0,
        gated=str(found.get("hidden_act")) == "silu",
        tables=1 if found.get("tie_word_embeddings", True) else 2,
        kv_heads=optional("num_key_value_heads"),
        head_width=optional("head_dim"),
    )


def head_size(folder: Path, hidden: int) -> tuple[int, int]:
    """Return the numbers of an encoder's vectors, and the weights of its Dense modules.

    Every mode of the Pooling gives `hidden` numbers; a Dense gives its `out_features`.
    """
    key = "retriever.path"
    width, parameters = hidden, 0
    for kind, inner in _modules(folder):
        settings = _read_json(inner / "config.json", key, {})
        if kind == "Pooling":
            width *= _num_modes(settings)
        elif kind == "Dense":
            before, width = width, int(settings.get("out_features", width))
            parameters += before * width
    return width, parameters


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return kind and folder of each module of an encoder; of a pair's Router, those of documents."""
    key = "retriever.path"
    router = _read_json(folder / "router_config.json", key, None)
    if router is not None:
        return [(router["types"][name].rpartition(".")[2], folder / name) for name in router["structure"]["document"]]
    listed = _read_json(folder / "modules.json", key, [])
    return [(module["type"].rpartition(".")[2], folder / module["path"]) for module in listed]


def _num_modes(pooling: dict[str, Any]) -> int:
    """Count the modes of a Pooling: named in newer files, a flag each in older ones."""
    named = pooling.get("pooling_mode")
    if named:
        return 1 if isinstance(named, str) else len(named)
    return max(1, sum(bool(value) for name, value in pooling.items() if name.startswith("pooling_mode_")))


def _read_json(file: Path, key: str, missing: Any) -> Any:
    if not file.is_file():
        return missing
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {file} cannot be read as JSON: {error}") from error


def _folder(path: str) -> Path | None:
    folder = Path(path).expanduser()
    places = (folder, folder / "retriever")  # the latter of a run directory
    names = ("config.json", "modules.json")
    return next((place for place in places if any((place / name).is_file() for name in names)), None)


def _last_part(path: str) -> str:
    return path.rpartition("/")[2].lower()


def _of_count(name: str, parameters: float, aspect: int, vocabulary: int, flag: str) -> ModelSize:
    """Return a model of so many parameters in the usual proportions: `aspect` units of width for each layer."""
    if not 1e5 <= parameters <= 1e13:
        raise UserError(f"{flag} is {parameters:g}; expected a number of parameters, such as 110e6 or 7e9")

    def proportioned(layers: int) -> int:
        hidden = aspect * layers
        return 12 * layers * hidden**2 + hidden * vocabulary

    layers = min(range(1, MOST_LAYERS), key=lambda number: abs(proportioned(number) - parameters))
    hidden = aspect * layers
    in_layers = max(round(parameters / 2), round(parameters) - hidden * vocabulary)
    return ModelSize(name, layers, hidden, 4 * hidden, vocabulary, hidden, in_layers, round(parameters))


def _unknown(key: str, path: str, flag: str, example: str) -> str:
    return (
        f"{key}: the size of {path!r} is not known here and no hub is asked; expected a well-known name such as "
        f"{example}, a folder with config.json, or {flag}"
    )
