"""A run as discrete events: the trainer's steps, the pool of scorers, the builders of the index.

At the boundary before step t the refresh policy of training (`replug/config/refresh_policy.py`) says what is adopted, started
and skipped. Then the batch of step t + depth is encoded and sent off: search, then scoring. Then the trainer waits for
the scores of step t and trains. The LM's replicas take units of pairs, first come first served. A wave of units is one
event. There is no chance in it.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import simpy

from replug.config.refresh_policy import Start
from replug.planning.sharing import Processor
from replug.planning.workload import Shape

ROLES = ("score", "embed", "train", "search")
WINDOWS_IN_FLIGHT = 8  # evals/loop.py: EXAMPLES_IN_FLIGHT
Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class ScoringSeconds:
    """What the LM's replicas take. `units` are the calls that a batch is divided into; each goes to one replica."""

    unit: float
    units: int
    window: float = 0.0  # one held-out text of a refresh


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """What comes once. `first_build` is everything until training can begin, `measure` all after the last index."""

    first_build: float
    last_build: float
    start_up: float = 0.0
    measure: float = 0.0


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of each activity on the devices it has, alone on them."""

    encode: float  # the queries of a batch
    search: float  # a batch
    scoring: ScoringSeconds
    train: float  # a step
    build: float  # one refresh, until its vectors can be searched
    stages: StageSeconds
    checkpoint: float = 0.0
    files: int = 1  # of a build, each of them one builder's


@dataclass(frozen=True, slots=True)
class Place:
    """Where one device of a role works: a shared processor, and how much of it it wants."""

    processor: str
    wanted: float


@dataclass(frozen=True, slots=True)
class SharedGPUs:
    """The number of the GPU of every process, where roles are on the same ones; of `search` () in host memory."""

    score: tuple[int, ...]
    embed: tuple[int, ...]
    train: tuple[int, ...]
    search: tuple[int, ...] = ()

    def of(self, role: str) -> set[int]:
        return set(getattr(self, role))

    def sharing(self, role: str) -> list[str]:
        """A role, those that have a GPU with it, and so on."""
        gpus, roles = self.of(role), list[str]()
        while found := [one for one in ROLES if one not in roles and self.of(one) & gpus]:
            roles += found
            gpus |= set().union(*(self.of(one) for one in found))
        return roles or [role]


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """Replicas that score, and who shares what; a role without a place has devices of its own."""

    replicas: int
    processors: Mapping[str, float] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    shared: SharedGPUs | None = None

    def sharing(self, role: str) -> list[str]:
        """The roles whose work is on the same GPUs as a role's, where several are shared."""
        return [role] if self.shared is None else self.shared.sharing(role)

    def devices(self, role: str) -> int:
        """Those that a role's spans are of, and shares of the time are taken of; where GPUs are shared, these."""
        if self.shared is not None:
            return max(1, len(set().union(*(self.shared.of(one) for one in self.sharing(role)))))
        return self.replicas if role == "score" else 1


@dataclass(frozen=True, slots=True)
class Refresh:
    """One refresh: its step and when it began, when it was ready, and its adoption (None: never)."""

    step: int
    began: float
    ready: float | None = None
    adopted_step: int | None = None
    adopted: float | None = None


class Span(NamedTuple):
    """Devices of a role at work from `begin` to `end`, seconds since the run's start; of shared ones its part."""

    begin: float
    end: float
    devices: float


@dataclass(frozen=True, slots=True)
class Milestones:
    """When stages began and ended, seconds since the start of the run."""

    training_began: float
    steps_began: float  # after the first measurement of held-out texts
    training_ended: float
    wall: float


@dataclass(frozen=True, slots=True)
class IndexHistory:
    """What became of the refreshes; `skipped` are the steps at which one was to start while another was under way."""

    refreshes: list[Refresh]
    skipped: list[int]
    waits: list[Span]
    max_lag_steps: int
    max_lag_seconds: float


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A run as it was simulated. Times in seconds since its start."""

    times: Milestones
    step_ends: list[float]
    spans: dict[str, list[Span]]  # by role
    waits: dict[str, float]  # of the trainer, by cause
    index: IndexHistory

    def busy(self, role: str) -> float:
        """Device-seconds that a role was at work, slowed down or not; of shared GPUs those that it had."""
        return sum((span.end - span.begin) * span.devices for span in self.spans[role])


def simulate(shape: Shape, durations: Durations, allocation: DeviceAllocation) -> SimulatedRun:
    """The run from start-up to the end of the measurements; `shared_gpus` has those of roles on the same GPUs."""
    run = Run(shape, durations, allocation)
    run.env.run(run.env.process(run.whole()))
    return run.simulated()


class _Pool:
    """Servers that take units in the order in which batches arrive; equal units that start together are one event."""

    def __init__(self, servers: int, unit_seconds: float, work: Callable[[float, int], simpy.Event]) -> None:
        self._servers = self._free = servers
        self._unit_seconds, self._work = unit_seconds, work
        self._queue: deque[_Batch] = deque()

    def submit(self, units: int, done: simpy.Event, unit_seconds: float | None = None) -> None:
        seconds = self._unit_seconds if unit_seconds is None else unit_seconds
        self._queue.append(_Batch(units, units, seconds, done))
        self._dispatch()

    def _dispatch(self) -> None:
        while self._free and self._queue:
            batch = self._queue[0]
            servers = min(self._free, batch.waiting)
            rounds = batch.waiting // servers if servers == self._servers else 1
            batch.waiting -= servers * rounds
            if not batch.waiting:
                self._queue.popleft()
            self._free -= servers
            worked = self._work(rounds * batch.unit_seconds, servers)
            assert worked.callbacks is not None
            worked.callbacks.append(partial(self._finish, batch, servers, rounds))

    def _finish(self, batch: "_Batch", servers: int, rounds: int, _: simpy.Event) -> None:
        self._free += servers
        batch.unfinished -= servers * rounds
        if not batch.unfinished:
            batch.done.succeed()
        self._dispatch()


@dataclass(slots=True)
class _Batch:
    waiting: int
    unfinished: int
    unit_seconds: float
    done: simpy.Event


@dataclass(slots=True)
class _Pending:
    number: int  # among the refreshes
    step: int
    ready: simpy.Event


class Run:
    """The state of one simulation."""

    def __init__(self, shape: Shape, durations: Durations, allocation: DeviceAllocation) -> None:
        self.env = simpy.Environment()
        self._shape, self._durations, self._allocation = shape, durations, allocation
        self._policy = shape.refresh
        self._processors = {name: Processor(self.env, capacity) for name, capacity in allocation.processors.items()}
        self._searchers = _Pool(1, durations.search, partial(self._work, "search"))
        self._scorers = _Pool(allocation.replicas, durations.scoring.unit, partial(self._work, "score"))
        self._scored: dict[int, simpy.Event] = {}
        self._pending: _Pending | None = None
        self._live_step, self._live_since = 0, 0.0  # when the weights of the live index were the trainer's
        self._spans: dict[str, list[Span]] = {role: [] for role in ROLES}
        self._waits = {"scores": 0.0, "index": 0.0}
        self._index_waits: list[Span] = []
        self._refreshes: list[Refresh] = []
        self._step_ends: list[float] = []
        self._skipped: list[int] = []
        self._max_lag_steps = 0
        self._max_lag_seconds = self._training_began = self._steps_began = self._training_ended = 0.0
        self._jumped = 0.0  # seconds

    @property
    def now(self) -> float:
        return float(self.env.now) + self._jumped

    def whole(self) -> Process:
        """Start-up, first index, training, last index, measurements."""
        durations = self._durations
        yield self.env.timeout(durations.stages.start_up)
        yield self._embed(durations.stages.first_build)
        self._training_began = self._live_since = self.now
        yield from self._measure_heldout()
        self._steps_began = self.now
        step = 0
        while step < self._shape.steps:
            yield from self._step(step)
            step += 1 + self._jump(step + 1)
        self._training_ended = self.now
        if self._pending is not None:
            yield from self._wait("index", self._pending.ready)
        yield self._embed(durations.stages.last_build)
        yield self.env.timeout(durations.stages.measure)

    def simulated(self) -> SimulatedRun:
        lags = (self._max_lag_steps, self._max_lag_seconds)
        return SimulatedRun(
            times=Milestones(self._training_began, self._steps_began, self._training_ended, wall=self.now),
            step_ends=self._step_ends,
            spans=self._spans,
            waits=self._waits,
            index=IndexHistory(self._refreshes, self._skipped, self._index_waits, *lags),
        )

    def _step(self, step: int) -> Process:
        yield from self._boundary(step)
        yield from self._fill(step)
        yield from self._wait("scores", self._scored.pop(step))
        yield self._train()
        self._step_ends.append(self.now)
        if (step + 1) % self._shape.checkpoint_every == 0 or step + 1 == self._shape.steps:
            yield self.env.timeout(self._durations.checkpoint)

    def _jump(self, step: int) -> int:
        """Steps from this one on that go on as those before and are not simulated one by one."""
        return 0

    def _encode(self) -> simpy.Event:
        return self._work("train", self._durations.encode)

    def _train(self) -> simpy.Event:
        return self._work("train", self._durations.train)

    def _embed(self, seconds: float) -> simpy.Event:
        """The whole corpus, which takes so long where all builders are alone on their devices."""
        return self._work("embed", seconds)

    def _boundary(self, step: int) -> Process:
        yield from self._adopt(step)
        self._trigger(step)
        if self._policy.adopts_at_start:
            yield from self._adopt(step)
        self._max_lag_steps = max(self._max_lag_steps, step - self._live_step)
        self._max_lag_seconds = max(self._max_lag_seconds, self.now - self._live_since)

    def _fill(self, step: int) -> Process:
        for ahead in range(step, min(step + self._shape.step.depth, self._shape.steps - 1) + 1):
            if ahead not in self._scored:
                yield self._encode()
                self._send(ahead)

    def _send(self, ahead: int) -> None:
        """Search, then score, in the background."""
        found, scored = self.env.event(), self.env.event()
        assert found.callbacks is not None
        found.callbacks.append(lambda _: self._scorers.submit(self._durations.scoring.units, scored))
        self._scored[ahead] = scored
        self._searchers.submit(1, found)

    def _trigger(self, step: int) -> None:
        start = self._policy.start(step, self._live_step, self._pending.step if self._pending else None)
        if start is Start.skip:
            self._skipped.append(step)
        elif start is Start.begin:
            self._start_refresh(step)

    def _start_refresh(self, step: int) -> None:
        number, ready = len(self._refreshes), self.env.process(self._refresh())
        self._refreshes.append(Refresh(step, self.now))
        pending = self._pending = _Pending(number, step, ready)
        assert ready.callbacks is not None
        ready.callbacks.append(lambda _: self._note(pending.number, ready=self.now))

    def _refresh(self) -> Process:
        """Embed the corpus, then have the LM measure what the new index finds; both are waited for."""
        yield self._embed(self._durations.build)
        yield from self._measure_heldout()

    def _measure_heldout(self) -> Process:
        """A call for each text, so many at a time, in a queue with the batches of training."""
        left = self._shape.heldout.refresh_windows
        while left:
            some = min(left, WINDOWS_IN_FLIGHT)
            done = self.env.event()
            self._scorers.submit(some, done, self._durations.scoring.window)
            yield done
            left -= some

    def _adopt(self, step: int) -> Process:
        if self._pending is None or not self._is_due(self._pending, step):
            return
        pending = self._pending
        self._max_lag_steps = max(self._max_lag_steps, step - self._live_step)
        yield from self._wait("index", pending.ready)
        self._max_lag_seconds = max(self._max_lag_seconds, self.now - self._live_since)
        self._pending, self._live_step = None, pending.step
        self._live_since = self._refreshes[pending.number].began
        self._note(pending.number, adopted_step=step, adopted=self.now)

    def _is_due(self, pending: _Pending, step: int) -> bool:
        return self._policy.is_due(step, self._live_step, pending.step, bool(pending.ready.processed))

    def _note(self, number: int, **known: float) -> None:
        self._refreshes[number] = replace(self._refreshes[number], **known)  # type: ignore[arg-type]

    def _wait(self, cause: str, event: simpy.Event) -> Process:
        start = self.now
        yield event
        self._waits[cause] += self.now - start
        if cause == "index" and self.now > start:
            self._index_waits.append(Span(start, self.now, 1))

    def _work(self, role: str, seconds: float, devices: int = 1) -> simpy.Event:
        """Work of a role on so many of its devices, on its own or where it shares a processor."""
        place, start = self._allocation.places.get(role), self.now
        if place is None or not place.wanted:
            worked: simpy.Event = self.env.timeout(seconds)
        else:
            worked = self._processors[place.processor].work(seconds, place.wanted * devices)
        assert worked.callbacks is not None
        worked.callbacks.append(lambda _: self._spans[role].append(Span(start, self.now, devices)))
        return worked
