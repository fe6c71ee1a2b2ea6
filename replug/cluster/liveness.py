"""Whether actors that somebody waits for are alive: each answers `ping` beside its work.

A process that is stopped, or whose machine is gone without a word, keeps its connections; Ray waits for it as long as
it is told to. Only an actor that answered before counts as silent: one that waits for room, or imports, does not yet.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

SILENT_SECONDS = 120.0  # as of a trainer rank: a loaded machine delays an answer by seconds
LOOK_SECONDS = 2.0  # between two looks
PING_GROUP = {"ping": 1}  # a thread of the actor for this method alone


@dataclass(slots=True)
class _Asked:
    """`heard`: when the actor last answered, by this machine's clock; None before it first did."""

    reference: Any
    heard: float | None = None


class Liveness:
    """Of actors whose class has a method `ping` and whose options hold PING_GROUP. For one thread."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self._asked: dict[int, _Asked] = {}

    def replace_silent(self) -> list[int]:
        """The places of those that hang; Ray starts them again, and gives them their calls again."""
        silent = [place for place in range(len(self._actors)) if self._silent_seconds(place) > SILENT_SECONDS]
        for place in silent:
            del self._asked[place]
            ray.kill(self._actors[place], no_restart=False)
        return silent

    def _silent_seconds(self, place: int) -> float:
        now = time.monotonic()
        asked = self._asked.setdefault(place, _Asked(self._ping(place)))
        if ray.wait([asked.reference], timeout=0)[0]:
            heard = now if _is_answer(asked.reference) else None
            asked = self._asked[place] = _Asked(self._ping(place), heard)
        return 0.0 if asked.heard is None else now - asked.heard

    def _ping(self, place: int) -> Any:
        return self._actors[place].ping.options(concurrency_group="ping", max_task_retries=0).remote()


def _is_answer(reference: Any) -> bool:
    """Not where the actor has died: it is being started again, and has not answered since."""
    try:
        ray.get(reference)
    except RayError:
        return False
    return True
