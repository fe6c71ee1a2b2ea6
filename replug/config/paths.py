"""Check that files and names of a configuration exist and its folders can be written, before heavy imports.

A path is never looked up on the hub. A possible name on the hub is looked up once, unless it was fetched before.
"""

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.schema import Config

SHIPPED = Path(__file__).parents[1] / "configs"
STORES = ("qdrant:", "postgresql:", "postgres:", "lance:")  # hosts write postgres:, which libpq takes too
RUN_CONFIG = "config.yaml"  # in a run directory
SETTINGS_FILE = "config_sentence_transformers.json"  # in an encoder's folder
TUNED_QUERIES = "replug_tuned_queries"  # a key there, if only queries were tuned: the document encoder


def find_config(name: str) -> Path:
    """Return the file or run at a path, or the shipped configuration of that name, such as `debug`."""
    path = Path(name).expanduser()
    inside = path.relative_to("configs") if path.is_relative_to("configs") else path
    shipped = SHIPPED / inside.with_suffix(".yaml")
    is_own = path.is_file() or (path / RUN_CONFIG).is_file()
    return shipped if not is_own and shipped.is_file() else path


def shipped_names() -> list[str]:
    """Return the names of the shipped configurations: `debug`, `paper_tables/popqa_opt13b`."""
    return sorted(str(path.relative_to(SHIPPED).with_suffix("")) for path in SHIPPED.rglob("*.yaml"))


def public_name(path: str) -> str:
    """Return the last part of a local path, a store's scheme and collection, or any other name unchanged."""
    if names_store(path):
        return f"{path.partition(':')[0]}:?{'&'.join(re.findall(r'(?:collection|table)=[^&]*', path))}"
    file = Path(path).expanduser()
    return file.absolute().name if file.is_absolute() or file.exists() or path.startswith(".") else path


def names_store(corpus: str | None) -> bool:
    """Return whether `data.corpus` is the URL of a vector store (`data.vector_stores`)."""
    return (corpus or "").startswith(STORES)


def require_folder(key: str, path: Path) -> None:
    """Raise UserError for a folder that cannot be written or created. Creates nothing."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"{key}: {there} is a file; expected a folder, or a name that is free")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}: {there} cannot be written by this user; give a folder that can")


def check_paths(config: Config | EvaluationConfig, corpus_only: bool = False) -> None:
    """Raise UserError for the first path that is missing or cannot be written; `corpus_only` skips the other splits."""
    data = config.data
    if isinstance(config, EvaluationConfig):
        require_folder("out", Path(config.out).expanduser())
    else:
        for key, folder in (("run_dir", config.run_dir), ("data.out", data.out)):
            if folder:
                require_folder(key, Path(folder).expanduser())
        for name in ("corpus",) if corpus_only else ("corpus", "train", "heldout"):
            has_others = data.prepared is not None or (data.source is not None and (name == "corpus" or not data.train))
            if getattr(data, name) is None and not has_others:
                raise UserError(
                    f"data.{name} is missing; expected data.corpus, data.train and data.heldout (files of rows), "
                    "or data.source (raw texts), or data.prepared"
                )
    for key, name in names_of_data(config):
        is_here(key, name, DATA)
    if data.prepared is not None and not (Path(data.prepared).expanduser() / "manifest.json").is_file():
        raise UserError(f"data.prepared: {data.prepared} is not a prepared set (manifest.json is missing)")


# Names, which may be of the hub --------------------------------------------------------------------------------------

FILES = r"gguf|jsonl|ndjson|json|csv|tsv|parquet|txt|gz|zst|bz2"  # endings that no name on the hub has
NAME = re.compile(rf"(?![.]|.*[.](?:{FILES})$)[\w.-]+(/[\w.-]+)?")  # NAME or OWNER/NAME
OURS = re.compile(r"package:.*|stand_in")  # sources
BACKENDS = re.compile(r"\w+:.*|stand_in")  # resolved by `models`, such as package:minilm
HUB_SECONDS = 5.0
MODEL, DATASET = "model", "dataset"
DATA = "a file of rows or texts, a folder of them, or a dataset's name on the hub"


def is_here(key: str, name: str, expected: str) -> bool:
    """Return whether a file or folder exists; False for a possible name on the hub. Raises UserError otherwise.

    A pipe, a socket or a device such as /dev/stdin is refused: it can be read only once, so it has no checksum.
    """
    path = Path(name).expanduser()
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{key}: {path} is a pipe or a device; expected a file or folder, which is read several times")
    if not path.exists() and NAME.fullmatch(name.partition(":")[0]) is None:
        raise UserError(f"{key}: {_nothing_at(name)}; expected {expected}")
    return path.exists()


def check_names(config: Config | EvaluationConfig) -> None:
    """Raise UserError for the first model or source that is neither on this machine nor on the hub."""
    retriever, lm = config.retriever, config.lm
    models = {"retriever.path": retriever.path, "retriever.query_path": retriever.query_path, "lm.path": lm.path}
    if isinstance(config, EvaluationConfig):
        models |= {f"retrievers.{name}": path for name, path in config.retrievers.items()}
    for key, model in models.items():
        if model and not BACKENDS.fullmatch(model):
            require_name(key, model, MODEL, "a folder of a model, or a name on the hub")
    folder = config.run_dir if isinstance(config, Config) else config.out
    if not (Path(config.data.out or f"{folder}/data").expanduser() / "manifest.json").is_file():
        for key, name in names_of_data(config):
            require_name(key, name, DATASET, DATA)


def names_of_data(config: Config | EvaluationConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that name texts or rows, with their values, except patterns, URLs and stand-ins."""
    named = {f"data.{name}": getattr(config.data, name) for name in ("source", "corpus", "train", "heldout", "dev")}
    if isinstance(config, EvaluationConfig):
        named |= {f"questions.{name}": getattr(config.questions, name) for name in ("path", "demonstrations", "qrels")}
        named["texts.path"] = config.texts.path
    for key, name in named.items():
        is_ours = key in ("data.source", "texts.path") and OURS.fullmatch(name or "")
        if name and not is_ours and "*" not in name and "://" not in name:
            yield key, name


def require_name(key: str, name: str, kind: str, expected: str) -> None:
    """Raise UserError for a name that is neither on this machine nor on the hub."""
    if is_here(key, name, expected):
        return
    if (reason := _hub_refusal(name.partition(":")[0], kind)) is not None:
        raise UserError(f"{key}: {_nothing_at(name)}. {reason}; expected {expected}")


def _nothing_at(name: str) -> str:
    """Describe where the path ends to exist, with a similar name from that folder."""
    path = Path(name).expanduser().absolute()
    folder = next(parent for parent in path.parents if parent.is_dir())
    missing = path.relative_to(folder).parts[0]
    names = [path.name for path in folder.iterdir()] if os.access(folder, os.R_OK) else []
    near = difflib.get_close_matches(missing, names, n=1, cutoff=0.5)
    return f"{name} does not exist: {folder} has no {missing}" + (f" (did you mean {near[0]}?)" if near else "")


def _hub_refusal(name: str, kind: str) -> str | None:
    """Return why the hub lacks a name; None if it may have it, since loading then reports any other problem."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, RepositoryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    if (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
        return None
    api = HfApi()
    try:
        (api.model_info if kind == MODEL else api.dataset_info)(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        return None if isinstance(error, GatedRepoError) else f"The hub has no {kind} of that name"
    except HfHubHTTPError:
        return None
    except (HTTPError, OSError):  # no network, no answer in time, HF_HUB_OFFLINE
        return f"The hub, which may have a {kind} of that name, does not answer"
    return None
