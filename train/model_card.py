"""README.md of a tuned retriever: description, usage, training and results.

Hubs read its front matter (huggingface_hub's `ModelCardData`), people the rest. Its figures come from the run's
`results.json`, with their intervals. It has no checksum: people complete it by hand, and no vector depends on it. It
names no path of the training machine.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load, try_to_load_from_cache
from jinja2 import StrictUndefined, Template

from replug.config.choices import Similarity, TrainedSide
from replug.config.load import flatten
from replug.config.paths import public_name
from replug.config.plain_text import plain_line
from replug.config.schema import Config, RetrieverConfig
from replug.data.files import file_sha256, replace_file
from replug.evals.tables import to_markdown
from replug.models.encoder import ADAPTER
from replug.models.encoder_files import MODULES_FILE, SETTINGS_FILE, document_encoder
from replug.models.ensemble_temperature import PAPER, temperature_in
from replug.models.packaged import MINILM_HUB_NAME, resolve_encoder_path
from replug.train.report import run_blocks

FILE = "README.md"
UNKNOWN = "unknown"  # the hub's id of a licence that is not known
TAGS = ["sentence-transformers", "sentence-similarity", "feature-extraction", "replug-lsr"]
OF_THE_BASE = ("license", "license_name", "license_link", "language")
SETTINGS = (
    *("data.source", "data.corpus", "data.train", "data.heldout", "data.dev", "data.prepared"),
    *("loss.gamma", "loss.beta", "loss.lm_score", "loss.direction", "loss.contrastive", "retrieve.k"),
    *("retriever.similarity", "retriever.max_tokens", "retriever.train", "train.max_steps", "train.epochs"),
    *("index.dims", "lora.rank"),
    *("train.batch_size", "train.lr", "train.labels"),
    *("refresh.every_steps", "seed"),
)
SIDES = {
    TrainedSide.both: "Tuned for queries and documents.",
    TrainedSide.query: "Tuned for queries alone: the untuned retriever embeds documents.",
    TrainedSide.documents: "Tuned for documents alone: the untuned retriever embeds queries.",
}
TEXTS = '["The Loire flows through Nantes.", "The Rhine flows through Basel."]'
QUERY = '["Which river flows through Basel?"]'
TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def write_model_card(
    folder: Path,
    config: Config,
    weights: str,
    made_by: Sequence[str],
    results: Mapping | None = None,
    name: str | None = None,
) -> None:
    """Write the card beside an encoder's files.

    `weights` names their step; `results` are the results of a finished run. `name` is the name for loading the model:
    OWNER/NAME on the hub, by default its folder in the working directory.
    """
    name, retriever = name or f"./{folder.name}", config.retriever
    values = {
        "front_matter": card_metadata(config).to_yaml(),
        "config": config,
        "weights": weights,
        "similarity": _settings(folder / SETTINGS_FILE).get("similarity_fn_name") or "cosine",
        "side": SIDES[retriever.train],
        "adapters": ", ".join(f"`{path.name}/`" for path in sorted(folder.glob(f"*{ADAPTER}"))) or f"`{ADAPTER}/`",
        "temperature": temperature_in(str(folder)) or PAPER,
        "name": name,
        "is_router": (folder / "router_config.json").is_file(),
        "made_by": made_by,
        "settings": _settings_at_work(config),
        "measured": to_markdown(run_blocks(results or {})).rstrip(),
        **_encoders(folder, retriever, name),
        "query": QUERY,
        "texts": TEXTS,
    }
    template = Template(
        TEMPLATE.read_text(),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    replace_file(folder / FILE, str(ModelCard(template.render(values))).encode())


def _settings_at_work(config: Config) -> dict[str, str]:
    """Return the settings in use with their values; labels and epochs replace some keys."""
    known = flatten(config)
    replaced = {"train.max_steps": known["train.epochs"], "refresh.every_steps": known["train.labels"]}
    shown = [key for key in SETTINGS if (known[key] or key == "seed") and not replaced.get(key)]
    return {key: plain_line(public_name(str(known[key]))) for key in shown}


def _encoders(folder: Path, retriever: RetrieverConfig, name: str) -> dict[str, Any]:
    """Return how the card's code loads the encoders: `base` encodes documents where queries alone were tuned."""
    documents, encoder = document_encoder(str(folder)), f'"{name}"'
    if documents is None:
        return {"base": None, "encoder": encoder}
    base = _hub_name(retriever.path) or _local_name(retriever.path)
    weights = _file_of(retriever.path, "model.safetensors")
    modules, settings = (_file_of(retriever.path, file) for file in (MODULES_FILE, SETTINGS_FILE))
    normalizes = modules is not None and json.loads(modules.read_text())[-1]["type"].endswith(".Normalize")
    is_dot = _settings(settings).get("similarity_fn_name") == "dot"
    return {
        "base": base,
        "checksum": f" (SHA-256 of its `model.safetensors`: `{file_sha256(weights)}`)" if weights else "",
        "document_prompt": None if retriever.document_prompt is None else repr(retriever.document_prompt),
        "drops_normalize": retriever.similarity is Similarity.dot and normalizes and not is_dot,
        "encoder": f'"{base}", query_path="{name}"' if Path(documents["path"]).is_absolute() else encoder,
    }


def _settings(file: Path | None) -> dict[str, Any]:
    """Return the settings by which sentence-transformers loads an encoder, empty without their file."""
    return json.loads(file.read_text()) if file is not None and file.is_file() else {}


def _hub_name(path: str) -> str | None:
    """Return the base's name on the hub; None for files of this machine."""
    if path == "package:minilm":
        return MINILM_HUB_NAME
    return None if Path(path).expanduser().exists() or ":" in path or path == "stand_in" else path


def _local_name(path: str) -> str:
    """Return the public name of a local folder as a relative path; of a run directory, its retriever."""
    folder, given = Path(resolve_encoder_path(path)), Path(path).expanduser()
    return f"./{Path(public_name(path)) / (folder.relative_to(given) if folder.is_relative_to(given) else '')}"


def _file_of(path: str, name: str) -> Path | None:
    """Return a file of an encoder on this machine. Nothing is fetched: no network may break the end of a run."""
    folder = resolve_encoder_path(path)
    file = Path(folder) / name if Path(folder).is_dir() else try_to_load_from_cache(folder, name)
    return Path(file) if isinstance(file, (str, Path)) and Path(file).is_file() else None


def card_metadata(config: Config) -> ModelCardData:
    """Return the card's front matter; unknown fields are left out.

    The base model is named if it is on the hub. Licence and language come from the base's card, if its folder or the
    hub's cache holds a readable one.
    """
    known: dict[str, Any] = {}
    if (card := _file_of(config.retriever.path, FILE)) is not None:
        with suppress(ValueError, yaml.YAMLError):
            known = metadata_load(card) or {}
    of_the_base: dict[str, Any] = {key: known.get(key, UNKNOWN if key == "license" else None) for key in OF_THE_BASE}
    return ModelCardData(
        **of_the_base,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        base_model=_hub_name(config.retriever.path),
        tags=TAGS,
    )
