"""`modules.json` of a sentence-transformers folder: which modules make a vector, read and written.

A chain is a Transformer, a Pooling, then any of Dense, LayerNorm, Normalize and Dropout, which does nothing outside of
their training. Whatever else is listed, or said in a module's file, changes the vectors: it is refused by its name.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn

from replug.config.errors import UserError
from replug.models.encoder_modules import (
    ACTIVATIONS,
    CLS,
    MEAN,
    POOLERS,
    Dense,
    EncoderHead,
    LayerNorm,
    Normalize,
    Pooling,
    VectorLayer,
)

KEY = "retriever.path"
MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"  # where sentence-transformers keeps it
WEIGHTS = "model.safetensors"
LAYERS = ("Dense", "LayerNorm", "Normalize", "Dropout")
FLAG = "pooling_mode_"  # of files before a mode had a name: one for each, in the order of POOLERS
FLAGS = {
    **{f"{FLAG}{mode}_tokens": mode for mode in ("max", "mean", "weightedmean")},
    **{f"{FLAG}cls_token": CLS, f"{FLAG}mean_sqrt_len_tokens": "mean_sqrt_len_tokens", f"{FLAG}lasttoken": "lasttoken"},
}
VECTOR = "sentence_embedding"  # what layers read and write in sentence-transformers; anything else is another chain


@dataclass(frozen=True, slots=True)
class Module:
    """A line of `modules.json`: its class's name, and its folder within the encoder's, empty for the encoder's own."""

    kind: str
    folder: str


def read_modules(path: str) -> list[Module]:
    """What the folder or hub name lists; none without the file. Raises UserError for a chain that cannot be read."""
    file = optional_file(path, MODULES_FILE)
    if file is None:
        return []
    modules = [_module(entry, file) for entry in read_object(file, list)]
    kinds = [module.kind for module in modules]
    for kind in kinds[2:]:
        if kind not in LAYERS:
            raise UserError(f"{KEY}: {file} lists {kind} after {kinds[1]}; expected {', '.join(LAYERS)} there")
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise UserError(f"{KEY}: {file} lists {', '.join(kinds[:2])}; expected Transformer and Pooling first")
    return modules


def read_head(path: str, modules: list[Module], width: int, default_pooling: str) -> EncoderHead:
    """What stands behind a backbone whose hidden states are `width` wide.

    Without modules, the pooling that a file says, or the default's. Raises UserError, which names module and file.
    """
    if not modules:
        file = optional_file(path, POOLING_FILE)
        return EncoderHead(_pooling(file, width) if file else Pooling([default_pooling], width))
    pooling = _pooling(_config_file(path, modules[1]), width)
    layers: list[VectorLayer] = []
    for module in modules[2:]:
        if module.kind != "Dropout":
            layers.append(_layer(path, module, EncoderHead(pooling, layers).dim))
    return EncoderHead(pooling, layers)


def write_head(folder: Path, head: EncoderHead, is_normalized: bool) -> None:
    """Modules, their files and weights beside the backbone's; a Normalize at the end where vectors have length 1."""
    layers = [*head.layers, *([Normalize()] if is_normalized and not head.ends_normalized else [])]
    names = ["", "1_Pooling", *(f"{place}_{layer.kind}" for place, layer in enumerate(layers, 2))]
    kinds = ["Transformer", "Pooling", *(layer.kind for layer in layers)]
    modules = [
        {"idx": place, "name": str(place), "path": name, "type": f"sentence_transformers.models.{kind}"}
        for place, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    _write(folder / MODULES_FILE, modules)
    _write(folder / POOLING_FILE, _pooling_settings(head.pooling))
    for name, layer in zip(names[2:], layers, strict=True):
        if settings := layer.settings():
            _write(folder / name / "config.json", settings)
            save_file({key: value.contiguous() for key, value in layer.state_dict().items()}, folder / name / WEIGHTS)


def read_object(file: Path, kind: type = dict) -> Any:
    """Raise UserError, which names the file, for what is no JSON, or none of this kind."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{KEY}: {file} is not valid JSON ({error})") from error
    if not isinstance(content, kind):
        raise UserError(f"{KEY}: {file} holds no JSON {'list' if kind is list else 'object'}")
    return content


def require_known(content: dict[str, Any], known: Iterable[str], file: Path) -> None:
    """Raise UserError for a setting that we do not follow: it would be ignored."""
    if unknown := sorted(set(content) - set(known)):
        raise UserError(f"{KEY}: {file} sets {unknown[0]}, which replug does not know; expected {', '.join(known)}")


def optional_file(path: str, name: str) -> Path | None:
    """A file of a folder, or of the hub; without a network, of what was fetched from there before."""
    if Path(path).is_dir():
        return Path(path) / name if (Path(path) / name).is_file() else None
    try:
        return Path(hf_hub_download(path, name))
    except EntryNotFoundError:
        return None


def _module(entry: Any, file: Path) -> Module:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or not isinstance(entry.get("path"), str):
        raise UserError(f"{KEY}: {file} holds {entry!r}; expected modules with type and path")
    package, _, kind = entry["type"].rpartition(".")
    if package.partition(".")[0] != "sentence_transformers" or kind not in ("Transformer", "Pooling", *LAYERS):
        raise UserError(
            f"{KEY}: {file} lists {entry['type']}, which replug cannot read; expected Transformer, Pooling, "
            f"{', '.join(LAYERS)} of sentence_transformers"
        )
    folder = Path(entry["path"])
    if folder.is_absolute() or ".." in folder.parts:
        raise UserError(f"{KEY}: {file} names files elsewhere: {entry['path']}")
    return Module(kind, entry["path"])


def _config_file(path: str, module: Module) -> Path:
    name = str(Path(module.folder) / "config.json")
    file = optional_file(path, name)
    if file is None:
        raise UserError(f"{KEY}: {path} has no {name}, which its {module.kind} needs; bring it back")
    return file


def _pooling(file: Path, width: int) -> Pooling:
    content = read_object(file)
    names = ("embedding_dimension", "word_embedding_dimension")
    require_known(content, ("pooling_mode", "include_prompt", *names, *FLAGS), file)
    modes = _pooling_modes(content)
    if unknown := [mode for mode in modes if mode not in POOLERS]:
        raise UserError(f"{KEY}: {file} pools by {unknown[0]}; expected {', '.join(POOLERS)}")
    said = next((content[name] for name in names if name in content), width)
    if said != width:
        raise UserError(f"{KEY}: {file} pools vectors of {said} numbers, but the model has {width}: it is another's")
    return Pooling(modes, width, bool(content.get("include_prompt", True)))


def _pooling_modes(content: dict[str, Any]) -> list[str]:
    """One key in newer files, a flag for each mode in older ones."""
    if given := content.get("pooling_mode"):
        return [given] if isinstance(given, str) else list(given)
    on = {mode for flag, mode in FLAGS.items() if content.get(flag)}
    return [mode for mode in POOLERS if mode in on] or [MEAN]


def _pooling_settings(pooling: Pooling) -> dict[str, object]:
    """One mode as a flag, which every version of sentence-transformers reads; several in the order they have."""
    rest: dict[str, object] = {} if pooling.include_prompt else {"include_prompt": False}
    if len(pooling.modes) > 1:
        return {"embedding_dimension": pooling.width, "pooling_mode": list(pooling.modes), **rest}
    shown = {flag: mode in pooling.modes for flag, mode in FLAGS.items() if mode in (MEAN, CLS, *pooling.modes)}
    return {"word_embedding_dimension": pooling.width, **shown, **rest}


def _layer(path: str, module: Module, dim: int) -> VectorLayer:
    """A layer that takes vectors of `dim` numbers, with its weights."""
    if module.kind == "Normalize":
        if (file := optional_file(path, str(Path(module.folder) / "config.json"))) is not None:
            _require_vectors(read_object(file), (), file)
        return Normalize()
    file = _config_file(path, module)
    content, expected = read_object(file), "in_features" if module.kind == "Dense" else "dimension"
    layer = _dense(content, file) if module.kind == "Dense" else _layer_norm(content, file)
    if content[expected] != dim:
        raise UserError(f"{KEY}: {file} takes vectors of {content[expected]} numbers, but {dim} come before it")
    _load_weights(layer, path, module)
    return layer


def _dense(content: dict[str, Any], file: Path) -> Dense:
    _require_vectors(content, ("in_features", "out_features", "bias", "activation_function", "use_residual"), file)
    if content.get("use_residual"):
        raise UserError(f"{KEY}: {file} sets use_residual, which replug does not read; expected a plain Dense")
    package, _, activation = str(content.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    if package.partition(".")[0] != "torch" or activation not in ACTIVATIONS:
        raise UserError(
            f"{KEY}: {file} has the activation_function {content['activation_function']}; expected one of torch.nn's "
            f"{', '.join(ACTIVATIONS)}"
        )
    into, out_of = (_size(content, name, file) for name in ("in_features", "out_features"))
    return Dense(into, out_of, bool(content.get("bias", True)), activation)


def _layer_norm(content: dict[str, Any], file: Path) -> LayerNorm:
    require_known(content, ("dimension",), file)
    return LayerNorm(_size(content, "dimension", file))


def _size(content: dict[str, Any], name: str, file: Path) -> int:
    value = content.get(name)
    if type(value) is not int or value < 1:
        raise UserError(f"{KEY}: {file} has {name} {value!r}; expected a number of numbers")
    return value


def _require_vectors(content: dict[str, Any], known: Iterable[str], file: Path) -> None:
    """Raise UserError for a layer of something else than the text's vector, such as of each token's."""
    ends = ("module_input_name", "module_output_name")
    require_known(content, (*known, *ends), file)
    for name in ends:
        if content.get(name) not in (None, VECTOR):
            raise UserError(f"{KEY}: {file} has {name} {content[name]}; expected {VECTOR}")


def _load_weights(layer: nn.Module, path: str, module: Module) -> None:
    name = str(Path(module.folder) / WEIGHTS)
    file = optional_file(path, name)
    if file is None:
        raise UserError(
            f"{KEY}: {path} has no {name}, the weights of its {module.kind}; pickled ones (pytorch_model.bin) are not "
            "read: load the model with SentenceTransformer and save it again"
        )
    weights, own = load_file(file), layer.state_dict()
    shapes = [{key: tuple(value.shape) for key, value in of.items()} for of in (weights, own)]
    if shapes[0] != shapes[1]:
        raise UserError(f"{KEY}: {file} holds {shapes[0]}; expected {shapes[1]}, by its config.json")
    layer.load_state_dict(weights)


def _write(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
