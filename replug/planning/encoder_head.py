"""How many numbers an encoder's vectors have: as many as its hidden states, or as its modules make of them. Pure.

A folder's `modules.json` is read as `models/module_chain.py` reads it, which needs torch and refuses what is wrong.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replug.config.errors import UserError

POOLING_FILE = "1_Pooling/config.json"  # of a folder without modules.json
MODE, FLAG = "pooling_mode", "pooling_mode_"  # of newer files; of each mode that is on, in older ones


@dataclass(frozen=True, slots=True)
class HeadSize:
    """What stands behind the layers: the numbers of a vector, and the weights of Dense modules."""

    width: int
    parameters: int = 0


def head_size(folder: Path, hidden: int) -> HeadSize:
    """Of hidden states of `hidden` numbers. Raises UserError for a file that is no JSON.

    Every mode of the Pooling gives as many numbers; a Dense gives its `out_features`.
    """
    modules = _read(folder / "modules.json", [])
    if not modules:
        return HeadSize(hidden * _num_modes(_read(folder / POOLING_FILE, {})))
    width, parameters = hidden, 0
    for module in modules:
        kind, settings = module["type"].rpartition(".")[2], _read(folder / module["path"] / "config.json", {})
        if kind == "Pooling":
            width *= _num_modes(settings)
        elif kind == "Dense":
            before, width = width, int(settings.get("out_features", width))
            parameters += before * width
    return HeadSize(width, parameters)


def _num_modes(pooling: dict[str, Any]) -> int:
    said = pooling.get(MODE)
    if said:
        return 1 if isinstance(said, str) else len(said)
    return max(1, sum(bool(value) for name, value in pooling.items() if name.startswith(FLAG)))


def _read(file: Path, missing: Any) -> Any:
    if not file.is_file():
        return missing
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"retriever.path: {file} cannot be read as JSON: {error}") from error
