"""Tell a mistyped path or name from a name on the hub, before torch and Ray are imported.

A path is never looked up. A possible name on the hub is looked up once, unless it was fetched before.
"""

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.schema import Config

FILES = r"gguf|jsonl|ndjson|json|csv|tsv|parquet|txt|gz|zst|bz2"  # endings that no name on the hub has
NAME = re.compile(rf"(?![.]|.*[.](?:{FILES})$)[\w.-]+(/[\w.-]+)?")  # NAME or OWNER/NAME
OURS = re.compile(r"package:.*|stand_in")  # sources
BACKENDS = re.compile(r"\w+:.*|stand_in")  # what `models` looks up, such as package:minilm
SWAPPED = {"retriever.path": "package:smollm2", "lm.path": "package:minilm"}
HUB_SECONDS = 5.0
MODEL, DATASET = "model", "dataset"
DATA = "a file of rows or texts, a folder of them, or a dataset's name on the hub"


def is_here(key: str, name: str, expected: str) -> bool:
    """Return whether a file or folder is here; False for what may be a name on the hub. Raises UserError otherwise."""
    if (path := Path(name).expanduser()).exists():
        require_no_pipe(key, path)
        return True
    if NAME.fullmatch(name.partition(":")[0]) is None:
        raise UserError(f"{key}: {_nothing_at(name)}; expected {expected}")
    return False


def require_no_pipe(key: str, path: Path) -> None:
    """Raise UserError for a pipe, a socket or a device such as /dev/stdin: what is read once has no checksum."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{key}: {path} is a pipe or a device; expected a file or folder, which is read several times")


def check_names(config: Config | EvaluationConfig) -> None:
    """Raise UserError for the first model or source that is neither on this machine nor on the hub."""
    for key, name in _models(config):
        if name == SWAPPED.get(key):
            found, wanted = ("an LM", "an encoder") if key == "retriever.path" else ("an encoder", "an LM")
            raise UserError(f"{key}: {name} is {found}; expected {wanted}: are retriever.path and lm.path swapped?")
        if not BACKENDS.fullmatch(name):
            require_name(key, name, MODEL, "a folder of a model, or a name on the hub")
    folder = config.run_dir if isinstance(config, Config) else config.out
    if not (Path(config.data.out or f"{folder}/data").expanduser() / "manifest.json").is_file():
        for key, name in names_of_data(config):
            require_name(key, name, DATASET, DATA)


def names_of_data(config: Config | EvaluationConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that name texts or rows, with their values; no pattern of files, URL of a store or stand-in."""
    named = {f"data.{name}": getattr(config.data, name) for name in ("source", "corpus", "train", "heldout", "dev")}
    if isinstance(config, EvaluationConfig):
        named |= {f"questions.{name}": getattr(config.questions, name) for name in ("path", "demonstrations", "qrels")}
    for key, name in named.items():
        is_ours = key == "data.source" and OURS.fullmatch(name or "")
        if name and not is_ours and "*" not in name and "://" not in name:
            yield key, name


def _models(config: Config | EvaluationConfig) -> Iterator[tuple[str, str]]:
    retriever, lm = config.retriever, config.lm
    named = {"retriever.path": retriever.path, "retriever.query_path": retriever.query_path, "lm.path": lm.path}
    if isinstance(config, EvaluationConfig):
        named |= {f"retrievers.{name}": path for name, path in config.retrievers.items()}
    yield from ((key, name) for key, name in named.items() if name)


def require_name(key: str, name: str, kind: str, expected: str) -> None:
    """Raise UserError for a name that is neither on this machine nor on the hub."""
    if is_here(key, name, expected):
        return
    if (reason := _hub_refusal(name.partition(":")[0], kind)) is not None:
        raise UserError(f"{key}: {_nothing_at(name)}. {reason}; expected {expected}")


def _nothing_at(name: str) -> str:
    """Say in which folder the path ends, with a near name that is there."""
    path = Path(name).expanduser().absolute()
    folder = next(parent for parent in path.parents if parent.is_dir())
    missing = path.relative_to(folder).parts[0]
    names = [path.name for path in folder.iterdir()] if os.access(folder, os.R_OK) else []
    near = difflib.get_close_matches(missing, names, n=1, cutoff=0.5)
    return f"{name} does not exist: {folder} has no {missing}" + (f" (did you mean {near[0]}?)" if near else "")


def _hub_refusal(name: str, kind: str) -> str | None:
    """Return why the hub does not give a name; None if it may: then loading it says what is wrong with it."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, RepositoryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    if (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
        return None
    api = HfApi()
    try:
        (api.model_info if kind == MODEL else api.dataset_info)(name, timeout=HUB_SECONDS)
    except GatedRepoError:
        return None
    except RepositoryNotFoundError:
        return f"The hub has no {kind} of that name"
    except HfHubHTTPError:
        return None
    except (HTTPError, OSError):  # no network, no answer in time, HF_HUB_OFFLINE
        return f"The hub, which may have a {kind} of that name, does not answer"
    return None
