"""Loading weights, all of them and no others: what a folder lacks transformers draws at random, with a line in a log.

The one place from which weights are loaded. Code that comes with a model is never run, and no pickle is read.
"""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from replug.config.errors import UserError

COMPUTED = ("position_ids", "inv_freq")  # tables that follow from the configuration, in files of earlier versions
SHOWN = 3


def load_whole(kind: Any, path: str, key: str, unused: tuple[str, ...] = (), **options: Any) -> PreTrainedModel:
    """The model of a folder or hub name, by a class of transformers.

    Parts that are `unused` (such as `pooler`) may be there or not. Raises UserError for anything else that is missing,
    of another shape, or of no use, and what transformers raises for what it cannot read.
    """
    try:
        model, report = kind.from_pretrained(
            path, output_loading_info=True, use_safetensors=True, trust_remote_code=False, **options
        )
    except RuntimeError as error:  # weights of another shape than the configuration's
        raise UserError(f"{key}: the weights in {path} do not fit its config.json: {_first_line(error)}") from error
    missing = [name for name in report["missing_keys"] if not _is_of(name, unused)]
    unexpected = [name for name in report["unexpected_keys"] if not _is_of(name, unused) and not _is_computed(name)]
    if missing:
        raise UserError(
            f"{key}: {path} lacks {_named(missing)}, which would be drawn at random: bring all weights of the model, "
            "or a config.json that is theirs"
        )
    if unexpected:
        raise UserError(
            f"{key}: {path} holds {_named(unexpected)}, which a {type(model).__name__} by its config.json has no use "
            "for: bring the config.json of these weights"
        )
    return model


def _is_of(name: str, parts: Iterable[str]) -> bool:
    """Whether a weight belongs to one of these parts, at whatever depth."""
    return any(f".{part}." in f".{name}" for part in parts)


def _is_computed(name: str) -> bool:
    return name.rpartition(".")[2] in COMPUTED


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return f"{', '.join(ordered[:SHOWN])}{more}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
