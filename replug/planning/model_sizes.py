"""Find the size of an encoder or LM by its config.json, or by its name for the models of the papers.

The file is read from a folder or from the hub's cache, never from the hub.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.paths import SETTINGS_FILE, TUNED_QUERIES
from replug.config.schema import RetrieverConfig


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Weights and widths. Biases and norms, under 0.2% of the weights, are left out.

    Every token is multiplied by the `layer_parameters`, which do not count embeddings and output layer. `dim` is the
    width of an encoder's vectors; a layer that is `gated` has three matrices of `intermediate`. `positions` are the
    tokens that its table of positions holds, 0 where it has none.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    layer_parameters: int
    parameters: int
    dim: int
    gated: bool = False
    positions: int = 0

    def flop_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOP of one token: two per weight, and attention over the whole sequence."""
        return 2.0 * self.layer_parameters + 4.0 * num_tokens * self.hidden * self.layers

    @property
    def flop_per_prediction(self) -> float:
        """Return the forward FLOP of the output layer at one position."""
        return 2.0 * self.hidden * self.vocabulary


def transformer(
    layers: int,
    hidden: int,
    vocabulary: int,
    intermediate: int | None = None,
    positions: int = 0,
    gated: bool = False,
    tables: int = 1,
    attention: int | None = None,
    kv: int | None = None,
) -> ModelSize:
    """Return the size of a transformer; queries have `attention` numbers, keys and values `kv` (None: `hidden`).

    There are two `tables` of the vocabulary where the output layer has its own weights.
    """
    inner, width = intermediate or 4 * hidden, attention or hidden
    in_layers = layers * hidden * (2 * (width + (kv or width)) + (3 if gated else 2) * inner)
    whole = in_layers + hidden * (tables * vocabulary + positions)
    return ModelSize("", layers, hidden, inner, vocabulary, in_layers, whole, hidden, gated, positions)


def static(rows: int, dim: int) -> ModelSize:
    """Return the size of a static encoder: a table of vectors, of which a text has the mean, without a product."""
    return ModelSize("", 1, dim, 0, rows, 0, rows * dim, dim)


_gpt2 = partial(transformer, vocabulary=50_257, positions=1024)
_opt = partial(transformer, vocabulary=50_272, positions=2048)  # and two unused positions
_bloom = partial(transformer, vocabulary=250_880)
_llama2 = partial(transformer, vocabulary=32_000, gated=True, tables=2)
_BERT = transformer(12, 768, 30_522, positions=512)
BERT_BASE = "bert-base-uncased"

FIRST_MODULES = ("Transformer", "StaticEmbedding")
ENCODERS = {
    **dict.fromkeys((BERT_BASE, "contriever", "contriever-msmarco"), _BERT),
    **dict.fromkeys(("dpr-question_encoder-single-nq-base", "dpr-ctx_encoder-single-nq-base"), _BERT),
    **dict.fromkeys(("all-minilm-l6-v2", "package:minilm"), transformer(6, 384, 30_522, positions=512)),
    "package:wordllama": static(32_000, 256),
    "stand_in": transformer(2, 32, 292, 64, positions=128),
}
LMS = {
    "gpt2": _gpt2(12, 768),
    "gpt2-medium": _gpt2(24, 1024),
    "gpt2-large": _gpt2(36, 1280),
    "gpt2-xl": _gpt2(48, 1600),
    "opt-125m": _opt(12, 768),
    "opt-350m": _opt(24, 1024),  # its embeddings have width 512: really 7% less
    "opt-1.3b": _opt(24, 2048),
    "opt-2.7b": _opt(32, 2560),
    "opt-6.7b": _opt(32, 4096),
    "opt-13b": _opt(40, 5120),
    "opt-30b": _opt(48, 7168),
    "opt-66b": _opt(64, 9216),
    "bloom-560m": _bloom(24, 1024),
    "bloom-1b1": _bloom(24, 1536),
    "bloom-1b7": _bloom(24, 2048),
    "bloom-3b": _bloom(30, 2560),
    "bloom-7b1": _bloom(30, 4096),
    "llama-2-7b": _llama2(32, 4096, intermediate=11_008),
    "llama-2-13b": _llama2(40, 5120, intermediate=13_824),
    "llama-2-70b": _llama2(80, 8192, intermediate=28_672, kv=1024),
    **dict.fromkeys(
        ("smollm2-135m", "package:smollm2"), transformer(30, 576, 49_152, 1536, gated=True, attention=576, kv=192)
    ),
}
SUFFIXES = r"(-instruct|-chat|-hf)+$"
STAND_IN_LM = ModelSize("", 1, 1, 1, 1, 1000, 1000, 1)  # no weights: a nominal size, so that its work grows


def encoder_size(path: str) -> ModelSize:
    """Return the size of the retriever at `retriever.path`. Raises UserError if it is not known."""
    if (folder := _folder(path)) is None:
        known = ENCODERS.get(path) or ENCODERS.get(_last_part(path))
        return replace(known or _read_from_cache("retriever.path", path), name=path)
    modules = _modules(folder)
    kind, inner = next((module for module in modules if module[0] in FIRST_MODULES), ("", folder))
    size = _read_table(inner) if kind == "StaticEmbedding" else _read_size("retriever.path", inner / "config.json")
    dim, dense = size.hidden, 0
    for kind, inner in modules:
        settings = _read_json("retriever.path", inner / "config.json", {})
        if kind == "Pooling":
            dim *= _num_modes(settings)
        elif kind == "Dense":
            before, dim = dim, int(settings.get("out_features", dim))
            dense += before * dim
    return replace(size, name=path, parameters=size.parameters + dense, dim=dim)


def retriever_size(retriever: RetrieverConfig) -> ModelSize:
    """Return the size of a retriever. Its `parameters` count both encoders of a pair."""
    size, second = encoder_size(retriever.path), 0
    if retriever.query_path is not None:
        second = encoder_size(retriever.query_path).parameters
    elif retriever.train is TrainedSide.documents:
        second = size.parameters
    elif (folder := _folder(retriever.path)) is not None:  # an export of tuned queries may name its documents' encoder
        tuned = _read_json("retriever.path", folder / SETTINGS_FILE, {}).get(TUNED_QUERIES)
        second = encoder_size(tuned["path"]).parameters if tuned and tuned["path"] else 0
    return replace(size, parameters=size.parameters + second)


def lm_size(path: str) -> ModelSize:
    """Return the size of `lm.path`. Raises UserError if it is not known."""
    if path.partition(":")[0] == "stand_in":
        return replace(STAND_IN_LM, name=path)
    if (folder := _folder(path)) is not None:
        return replace(_read_size("lm.path", folder / "config.json"), name=path)
    known = LMS.get(path) or LMS.get(re.sub(SUFFIXES, "", _last_part(path)))
    return replace(known or _read_from_cache("lm.path", path), name=path)


def _read_from_cache(key: str, path: str) -> ModelSize:
    """Read a config.json from the hub's cache. Raises UserError if there is none."""
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path)
    file = try_to_load_from_cache(path, "config.json") if is_name else None
    if not isinstance(file, str):
        raise UserError(
            f"{key}: the size of {path} is not known; expected a folder with config.json, or a model of the hub after "
            f"`hf download {path} config.json`"
        )
    return _read_size(key, Path(file))


def _read_size(key: str, file: Path) -> ModelSize:
    """Read a config.json with its family's names of the fields. Raises UserError if a field is missing."""
    found = _read_json(key, file, {})

    def optional(*names: str) -> int | None:
        return next((int(found[name]) for name in names if found.get(name)), None)

    def required(*names: str) -> int:
        if (value := optional(*names)) is None:
            raise UserError(f"{key}: {file} has none of {', '.join(names)}; expected a transformer's config.json")
        return value

    hidden, heads = required("hidden_size", "n_embd", "d_model", "dim"), required("num_attention_heads", "n_head")
    head_width = optional("head_dim") or hidden // heads
    is_rotary = bool({"rope_theta", "rope_parameters"} & found.keys())
    return transformer(
        layers=required("num_hidden_layers", "n_layer", "n_layers"),
        hidden=hidden,
        vocabulary=required("vocab_size"),
        intermediate=optional("intermediate_size", "n_inner", "ffn_dim", "hidden_dim"),
        positions=0 if is_rotary else optional("max_position_embeddings", "n_positions") or 0,
        gated=str(found.get("hidden_act")) == "silu",
        tables=1 if found.get("tie_word_embeddings", True) else 2,
        attention=heads * head_width,
        kv=(optional("num_key_value_heads") or heads) * head_width,
    )


def _read_table(folder: Path) -> ModelSize:
    """Read the shape of a static encoder's table, by its name in sentence-transformers or model2vec."""
    file = folder / "model.safetensors"
    try:
        with safe_open(file, "np") as weights:
            shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 - not a dict
        rows, dim = shapes.get("embedding.weight") or shapes["embeddings"]
    except (OSError, SafetensorError, LookupError) as error:
        raise UserError(f"retriever.path: {file} cannot be read as a table of embeddings: {error}") from error
    return static(shapes.get("mapping", [rows])[0], dim)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return kind and folder of each module of an encoder; for a pair's Router, of the document encoder."""
    router = _read_json("retriever.path", folder / "router_config.json", None)
    if router is not None:
        return [(router["types"][name].rpartition(".")[2], folder / name) for name in router["structure"]["document"]]
    listed = _read_json("retriever.path", folder / "modules.json", [])
    return [(module["type"].rpartition(".")[2], folder / module["path"]) for module in listed]


def _num_modes(pooling: dict[str, Any]) -> int:
    """Return the number of modes of a Pooling: names in newer files, flags in older files."""
    named = pooling.get("pooling_mode")
    if named:
        return 1 if isinstance(named, str) else len(named)
    return max(1, sum(bool(value) for name, value in pooling.items() if name.startswith("pooling_mode_")))


def _read_json(key: str, file: Path, missing: Any) -> Any:
    if not file.is_file():
        return missing
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {file} cannot be read as JSON: {error}") from error


def _folder(path: str) -> Path | None:
    """Return the folder of a model, or of a run directory's tuned retriever; None for a name."""
    folder = Path(path).expanduser()
    files = ("config.json", "modules.json")
    return next((place for place in (folder, folder / "retriever") if any((place / f).is_file() for f in files)), None)


def _last_part(path: str) -> str:
    return path.rpartition("/")[2].lower()
