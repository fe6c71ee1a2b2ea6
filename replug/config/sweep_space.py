"""Which values a sweep tries for which keys, as they are typed.

    loss.gamma=[0.03,0.05,0.1]     these values
    train.lr=log(1e-5,1e-3)        anything between, evenly in the logarithm; with --samples
    loss.contrastive=uniform(0,1)  anything between; with --samples

Everything else of the form key=VALUE is the same for all trials.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from replug.config.errors import UserError

RANGE = re.compile(r"(log|uniform)\(([^,()]+),([^,()]+)\)")
Value = bool | int | float | str
# What trials must share: what they are trained and measured on, and what the sweep itself says.
SHARED = ("data.", "lm.", "label.", "retrieve.", "evaluate.", "ensemble.", "ray.", "wandb.", "resources.")
SHARED_KEYS = ("run_dir", "train.labels", "train.dev_measure", "train.dev_every_steps", "train.patience")


@dataclass(frozen=True, slots=True)
class Choices:
    """Some values, two or more, no two of them equal."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, evenly, or evenly in their logarithm."""

    low: float
    high: float
    is_log: bool


Space = Mapping[str, Choices | Range]  # by key, in the order that they were typed


def read_space(overrides: Sequence[str]) -> tuple[Space, list[str]]:
    """What is tried, and what is the same for all. Raises UserError for what is neither, and for a key typed twice."""
    space: dict[str, Choices | Range] = {}
    fixed: list[str] = []
    for override in overrides:
        key, _, text = override.partition("=")
        tried = _tried(key, text.strip())
        if tried is None:
            fixed.append(override)
        elif key in space:
            raise UserError(f"{key} is swept twice; expected one list or range for each key")
        else:
            space[key] = tried
    for problem in _problems(space, fixed):
        raise UserError(problem)
    return space, fixed


def _tried(key: str, text: str) -> Choices | Range | None:
    if found := RANGE.fullmatch(text):
        return _range(key, *found.groups())
    if text.startswith("["):
        return Choices(tuple(_values(key, text)))
    return None


def _range(key: str, kind: str, low: str, high: str) -> Range:
    try:
        made = Range(float(low), float(high), kind == "log")
    except ValueError as error:
        raise UserError(f"{key}: {kind}({low},{high}) has no two numbers; expected such as log(1e-5,1e-3)") from error
    if not -math.inf < made.low < made.high < math.inf or (made.is_log and made.low <= 0):
        raise UserError(f"{key}: {kind}({low},{high}) is no range; expected a lower and a higher number")
    return made


def _values(key: str, text: str) -> list[Value]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{key}: {text} is no list; expected such as {key}=[0.03,0.1]") from error
    if not isinstance(values, list) or any(not isinstance(value, Value) for value in values):
        raise UserError(f"{key}: {text} is no list of values; expected such as {key}=[0.03,0.1]")
    read = [_number(value) for value in values]
    if len(read) < 2 or len({repr(value) for value in read}) < len(read):
        raise UserError(f"{key}: {text}; expected two or more values, no two of them equal")
    return read


def _number(value: Value) -> Value:
    """YAML takes 1e-4 for a word."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _problems(space: Space, fixed: Sequence[str]) -> list[str]:
    if not space:
        return ["nothing is swept; expected a list or a range of a key, such as 'loss.gamma=[0.03,0.05,0.1]'"]
    shared = [key for key in space if key in SHARED_KEYS or key.startswith(SHARED)]
    twice = [key for key in space if any(override.startswith(f"{key}=") for override in fixed)]
    return [
        *(f"{key} cannot be swept: trials must share what they are trained and measured on" for key in shared),
        *(f"{key} is swept and set as well; expected one of both" for key in twice),
    ]
