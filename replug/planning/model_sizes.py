"""Find the size of an encoder or LM by its config.json, or by its name for packaged models and the paper's run.

The file is read from a folder or from the hub's cache, never from the hub.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open

from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.schema import RetrieverConfig


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Weights and widths. Biases and norms, under 0.2% of the weights, are left out.

    Every token is multiplied by the `layer_parameters`, which do not count embeddings and output layer. `dim` is the
    width of an encoder's vectors; a layer that is `gated` has three matrices of `intermediate`.
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    layer_parameters: int
    parameters: int
    dim: int
    gated: bool = False

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
    return ModelSize(layers, hidden, inner, vocabulary, in_layers, whole, hidden, gated)


def static(rows: int, dim: int) -> ModelSize:
    """Return the size of a static encoder: a table of vectors, of which a text has the mean, without a product."""
    return ModelSize(1, dim, 0, rows, 0, rows * dim, dim)


_BERT = transformer(12, 768, 30_522, positions=512)
BERT_BASE = "bert-base-uncased"
FIRST_MODULES = ("Transformer", "StaticEmbedding")
# The packaged models, and those of the paper's run, by the last part of their names.
ENCODERS = {
    **dict.fromkeys((BERT_BASE, "contriever"), _BERT),
    **dict.fromkeys(("all-minilm-l6-v2", "package:minilm"), transformer(6, 384, 30_522, positions=512)),
    "package:wordllama": static(32_000, 256),
    "stand_in": transformer(2, 32, 292, 64, positions=128),
}
LMS = {
    "gpt2": transformer(12, 768, 50_257, positions=1024),
    "gpt2-xl": transformer(48, 1600, 50_257, positions=1024),
    "package:smollm2": transformer(30, 576, 49_152, 1536, gated=True, attention=576, kv=192),
}
STAND_IN_LM = ModelSize(1, 1, 1, 1, 1000, 1000, 1)  # no weights: a nominal size, so that its work grows


def encoder_size(path: str) -> ModelSize:
    """Return the size of the retriever at `retriever.path`. Raises UserError if it is not known."""
    if (folder := _folder(path)) is None:
        return ENCODERS.get(path.rpartition("/")[2].lower()) or _read_from_cache("retriever.path", path)
    modules = _modules(folder)
    kind, inner = next((module for module in modules if module[0] in FIRST_MODULES), ("", folder))
    size = _read_table(inner) if kind == "StaticEmbedding" else _read_size("retriever.path", inner / "config.json")
    dim, dense = size.hidden, 0
    for kind, inner in modules:
        if kind == "Dense":
            before, dim = dim, int(_read_json(inner / "config.json", {}).get("out_features", dim))
            dense += before * dim
    return replace(size, parameters=size.parameters + dense, dim=dim)


def retriever_size(retriever: RetrieverConfig) -> ModelSize:
    """Return the size of a retriever. Its `parameters` count both encoders of a pair."""
    size, second = encoder_size(retriever.path), 0
    if retriever.query_path is not None:
        second = encoder_size(retriever.query_path).parameters
    elif retriever.train is TrainedSide.documents:
        second = size.parameters
    return replace(size, parameters=size.parameters + second)


def lm_size(path: str) -> ModelSize:
    """Return the size of `lm.path`. Raises UserError if it is not known."""
    if path.partition(":")[0] == "stand_in":
        return STAND_IN_LM
    if (folder := _folder(path)) is not None:
        return _read_size("lm.path", folder / "config.json")
    return LMS.get(path.rpartition("/")[2].lower()) or _read_from_cache("lm.path", path)


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
    found = _read_json(file, {})

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
    with safe_open(folder / "model.safetensors", "np") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 - not a dict
    rows, dim = shapes.get("embedding.weight") or shapes["embeddings"]
    return static(shapes.get("mapping", [rows])[0], dim)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return kind and folder of each module of an encoder; for a pair's Router, of the document encoder."""
    router = _read_json(folder / "router_config.json", None)
    if router is not None:
        return [(router["types"][name].rpartition(".")[2], folder / name) for name in router["structure"]["document"]]
    listed = _read_json(folder / "modules.json", [])
    return [(module["type"].rpartition(".")[2], folder / module["path"]) for module in listed]


def _read_json(file: Path, missing: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else missing


def _folder(path: str) -> Path | None:
    """Return the folder of a model, or of a run directory's tuned retriever; None for a name."""
    folder = Path(path).expanduser()
    files = ("config.json", "modules.json")
    return next((place for place in (folder, folder / "retriever") if any((place / f).is_file() for f in files)), None)
