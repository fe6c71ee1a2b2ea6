"""What crosses processes in a sweep."""

from collections.abc import Mapping
from dataclasses import dataclass

from replug.config.sweep_space import Value


@dataclass(frozen=True, slots=True)
class Trial:
    """One training: its number, from 0, and its settings by key."""

    number: int
    settings: Mapping[str, Value]

    @property
    def name(self) -> str:
        return f"trial-{self.number:04d}"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What became of a trial on development texts: bits per byte by its best weights, their step, the ensemble's
    temperature and the share of scored documents there, and the steps and seconds of the whole training; or why it
    ended without."""

    dev_bpb: float | None
    step: int | None
    temperature: float | None
    scored_share: float | None
    num_steps: int
    seconds: float
    error: str | None = None
