"""What a run does while it is rehearsed: its actors and their places, what they hold, the index versions on disk."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from replug.rehearsal.fake_cluster import FakeActor, FakeCluster
from replug.rehearsal.processes import Held, Limits, held_by, limits_of

DRIVER = "rank 0"


@dataclass(frozen=True, slots=True)
class Most:
    """The most that any process of a role held at once, and what it may hold."""

    descriptors: Held
    mappings: Held
    resident: int
    limits: Limits

    def beside(self, held: Held) -> "Most":
        return replace(
            self,
            descriptors=max(self.descriptors, held, key=lambda one: one.descriptors.total()),
            mappings=max(self.mappings, held, key=lambda one: one.mappings.total()),
            resident=max(self.resident, held.resident),
        )


@dataclass
class Watch:
    """Looks at a cluster now and then; keeps the most that it saw."""

    cluster: FakeCluster
    corpus: Path
    index: Path
    fullest: list[FakeActor] = field(default_factory=list)  # when most actors were up
    ended: list[FakeActor] = field(default_factory=list)  # all that there ever were, at the last look
    most: dict[str, Most] = field(default_factory=dict)
    most_versions: int = 0

    def look(self, driver: int) -> None:
        self.ended = self.cluster.actors()
        up = [actor for actor in self.ended if actor.is_up]
        self.fullest = max(self.fullest, up, key=len)
        for role, pid in [(DRIVER, driver), *((actor.role, actor.pid) for actor in up)]:
            self._measure(role, pid)
        self.most_versions = max(self.most_versions, len(list(self.index.glob("v*"))))

    def never_up(self) -> list[FakeActor]:
        """Of the start that was not interrupted."""
        job = max((actor.job for actor in self.ended), default="")
        return [actor for actor in self.ended if actor.job == job and not actor.was_up]

    def _measure(self, role: str, pid: int) -> None:
        held = held_by(pid, {"corpus": self.corpus, "index": self.index})
        if held is None:
            return
        if role in self.most:
            self.most[role] = self.most[role].beside(held)
        elif (limits := limits_of(pid)) is not None:
            self.most[role] = Most(held, held, held.resident, limits)
