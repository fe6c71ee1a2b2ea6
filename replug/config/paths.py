"""Check that the files of a configuration exist and its folders can be written, before heavy imports."""

import os
import re
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.hub_names import DATA, is_here, names_of_data
from replug.config.schema import Config

SHIPPED = Path(__file__).parents[1] / "configs"
STORES = ("qdrant:", "postgresql:", "postgres:", "lance:")  # hosts write postgres:, which libpq takes too
RUN_CONFIG = "config.yaml"  # of a run's folder
SETTINGS_FILE = "config_sentence_transformers.json"  # in an encoder's folder
TUNED_QUERIES = "replug_tuned_queries"  # a key there: queries alone were tuned, and what encodes documents


def find_config(name: str) -> Path:
    """Return the file or run of that name, or the shipped configuration that is called so: `debug`."""
    path = Path(name).expanduser()
    inside = path.relative_to("configs") if path.is_relative_to("configs") else path
    shipped = SHIPPED / inside.with_suffix(".yaml")
    is_own = path.is_file() or (path / RUN_CONFIG).is_file()
    return shipped if not is_own and shipped.is_file() else path


def shipped_names() -> list[str]:
    """Return the names of the shipped configurations: `debug`, `paper_tables/popqa_opt13b`."""
    return sorted(str(path.relative_to(SHIPPED).with_suffix("")) for path in SHIPPED.rglob("*.yaml"))


def public_name(path: str) -> str:
    """Return a name that means the same everywhere as it is, and the last part of a file's or folder's path."""
    if names_store(path):
        return f"{path.partition(':')[0]}:?{'&'.join(re.findall(r'(?:collection|table)=[^&]*', path))}"
    file = Path(path).expanduser()
    return file.absolute().name if file.is_absolute() or file.exists() or path.startswith(".") else path


def names_store(corpus: str | None) -> bool:
    """Return whether `data.corpus` is the URL of a vector store, in which documents stay (`data.vector_stores`)."""
    return (corpus or "").startswith(STORES)


def require_folder(key: str, path: Path) -> None:
    """Raise UserError for a folder that cannot be written, or be made; nothing is made."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"{key}: {there} is a file; expected a folder, or a name that is free")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}: {there} cannot be written by this user; give a folder that can")


def check_paths(config: Config, corpus_only: bool = False) -> None:
    """Raise UserError for the first path that is missing or cannot be written; an index is of the corpus only."""
    data = config.data
    for key, folder in (("run_dir", config.run_dir), ("data.out", data.out)):
        if folder:
            require_folder(key, Path(folder).expanduser())
    if config.lm.cache and Path(config.lm.cache).expanduser().is_dir():
        raise UserError(f"lm.cache: {config.lm.cache} is a folder; expected a file in it, such as scores.sqlite")
    for name in ("corpus",) if corpus_only else ("corpus", "train", "heldout", "dev"):
        value = getattr(data, name)
        has_others = data.prepared is not None or (data.source is not None and (name == "corpus" or not data.train))
        if value is None and name != "dev" and not has_others:
            raise UserError(
                f"data.{name} is missing; expected data.corpus, data.train and data.heldout (files of rows), "
                "or data.source (raw texts), or data.prepared"
            )
    _check_data(config)


def check_evaluation_paths(config: EvaluationConfig) -> None:
    """Raise UserError for the first path of an evaluation that is missing or cannot be written."""
    require_folder("out", Path(config.out).expanduser())
    texts = config.texts.path
    if texts is not None and texts.startswith((".", "/", "~")) and not Path(texts).expanduser().exists():
        raise UserError(f"texts.path: {texts} does not exist; expected a file or folder of your own")
    _check_data(config)


def _check_data(config: Config | EvaluationConfig) -> None:
    for key, name in names_of_data(config):
        is_here(key, name, DATA)
    data = config.data
    if data.prepared is not None and not (Path(data.prepared).expanduser() / "manifest.json").is_file():
        raise UserError(f"data.prepared: {data.prepared} is not a prepared set (manifest.json is missing)")
