"""The front matter of a tuned retriever's card, which model hubs read: huggingface_hub's `ModelCardData`.

Only what is known is said. The base model and a dataset are named where they are names on the hub and no files of this
machine. Licence and language are the base's own, where its folder or the hub's cache holds its card, unless a licence
is given. Nothing is fetched: a card is written at the end of a run too, which no network may break.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, try_to_load_from_cache

from replug.config.schema import Config
from replug.models.packaged import resolve_encoder_path

log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # a licence id of the hub: that the field is empty is said, not left out
TAGS = ["sentence-transformers", "sentence-similarity", "feature-extraction", "replug-lsr"]
OF_THE_BASE = ("license", "license_name", "license_link", "language")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-]+(?:\.\d[\w-]*)*")  # a version may stand in it, a file's suffix may not
FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.MULTILINE | re.DOTALL)


def card_metadata(config: Config, license_id: str | None) -> ModelCardData:
    """`license_id` instead of the base's licence, where it is given."""
    base = _of_the_base(config.retriever.path)
    said: dict[str, Any] = {"license": license_id} if license_id else {name: base.get(name) for name in OF_THE_BASE[:3]}
    return ModelCardData(
        **{**said, "license": said["license"] or UNKNOWN},
        language=base.get("language"),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        base_model=base_name(config),
        datasets=_datasets(config),
        tags=TAGS,
    )


def base_name(config: Config) -> str | None:
    """The name on the hub of the retriever that was tuned."""
    path = config.retriever.path
    return None if Path(path).expanduser().exists() or ":" in path or path == "stand_in" else path


def _datasets(config: Config) -> list[str] | None:
    """`data.source`, where it is a dataset on the hub."""
    name = (config.data.source or "").partition(":")[0]
    is_dataset = HUB_NAME.fullmatch(name) and not Path(name).expanduser().exists()
    return [name] if is_dataset else None


def _of_the_base(path: str) -> Mapping[str, Any]:
    """The front matter of the base's card; empty where there is none here, or none that can be read."""
    card = _base_card(path)
    found = FRONT_MATTER.search(card.read_text(encoding="utf-8", errors="replace")) if card else None
    if found is None:
        return {}
    try:
        content = yaml.safe_load(found[1])
    except yaml.YAMLError:
        log.warning(f"{card} has a front matter that is no YAML: its licence and language are not taken over")
        return {}
    return content if isinstance(content, dict) else {}


def _base_card(path: str) -> Path | None:
    folder = Path(resolve_encoder_path(path))
    if folder.is_dir():
        return folder / "README.md" if (folder / "README.md").is_file() else None
    cached = try_to_load_from_cache(str(folder), "README.md")
    return Path(cached) if isinstance(cached, str) else None
