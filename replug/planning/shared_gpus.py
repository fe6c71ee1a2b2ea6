"""A run whose roles are on the same GPUs, as discrete events: each GPU is a processor that its processes share.

What is under way on a GPU gets equal parts of it, as the CUDA driver gives time slices to processes. A step of the
trainer ends with its slowest rank. Stretches in which nothing changes but the step are simulated at their beginning,
and the rest of them is jumped over. From refresh to refresh all goes as from the first to the second.
"""

from dataclasses import dataclass

import simpy

from replug.config.refresh_policy import Start
from replug.planning.shared_pool import SharedPool
from replug.planning.sharing import Processor
from replug.planning.simulate import DeviceAllocation, Durations, Refresh, Run, SharedGPUs, SimulatedRun, Span
from replug.planning.workload import Shape

CROWDED = 0.95  # of a GPU's speed while several processes take turns: a guess, it was not measured
SETTLING, WINDOW = 10, 30  # steps: before the pace is measured, and over which it is


def simulate_shared(shape: Shape, durations: Durations, gpus: SharedGPUs, jumps: bool = True) -> SimulatedRun:
    """As `simulate`. Without `jumps` every step is simulated, which takes many times as long."""
    run = SharedRun(shape, durations, gpus, jumps)
    run.env.run(run.env.process(run.whole()))
    return run.simulated()


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the window began by which the pace is measured."""

    step: int
    now: float
    waits: dict[str, float]
    built: list[float]  # by builders, seconds of work


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a refresh began, and what was there already."""

    step: int
    now: float
    waits: dict[str, float]
    num_spans: dict[str, int]
    num_waits: int


class SharedRun(Run):
    """The state of one simulation."""

    def __init__(self, shape: Shape, durations: Durations, gpus: SharedGPUs, jumps: bool = True) -> None:
        super().__init__(shape, durations, DeviceAllocation(len(gpus.score), shared=gpus))
        everyone = [*gpus.score, *gpus.embed, *gpus.train]
        processors = {gpu: Processor(self.env, 1.0, CROWDED) for gpu in {*everyone, *gpus.search}}
        self._scorers = SharedPool(  # type: ignore[assignment] # of the same method
            self, "score", [processors[gpu] for gpu in gpus.score], durations.scoring.unit
        )
        self._builders = SharedPool(self, "embed", [processors[gpu] for gpu in gpus.embed])
        self._ranks = [processors[gpu] for gpu in gpus.train]
        fullest = max(gpus.search, key=everyone.count, default=None)  # whose search a batch waits for
        self._slowest_search = None if fullest is None else processors[fullest]
        self._may_jump = jumps and not durations.checkpoint
        self._phase: tuple[int, int, bool] | None = None
        self._settled = 0  # the step from which on the pace is that of the phase
        self._mark: _Mark | None = None
        self._starts: list[_Start] = []  # of refreshes

    def note(self, role: str, began: float, seconds: float) -> None:
        """Work of a role on one GPU, so many seconds of it, from `began` until now."""
        if self.now > began:
            self._spans[role].append(Span(began, self.now, seconds / (self.now - began)))

    def _embed(self, seconds: float) -> simpy.Event:
        done, files = self.env.event(), self._durations.files
        self._builders.submit(files, done, seconds * len(self._builders.servers) / files)
        return done

    def _encode(self) -> simpy.Event:
        return self._piece("train", self._ranks[0], self._durations.encode)

    def _train(self) -> simpy.Event:
        return self.env.all_of([self._piece("train", rank, self._durations.train) for rank in self._ranks])

    def _work(self, role: str, seconds: float, devices: int = 1) -> simpy.Event:
        """Of searches, which may be in host memory."""
        if self._slowest_search is None:
            return self._noted(role, self.env.timeout(seconds), seconds)
        return self._piece(role, self._slowest_search, seconds)

    def _piece(self, role: str, processor: Processor, seconds: float) -> simpy.Event:
        return self._noted(role, processor.work(seconds, 1.0), seconds)

    def _noted(self, role: str, worked: simpy.Event, seconds: float) -> simpy.Event:
        """Noted as so many seconds, however long a stretch of steps is passed over meanwhile."""
        began = self.now
        assert worked.callbacks is not None
        worked.callbacks.append(lambda _: self.note(role, began, seconds))
        return worked

    def _jump(self, step: int) -> int:
        if not self._may_jump:
            return 0
        return self._jump_cycles(step) or self._jump_phase(step)

    def _jump_cycles(self, step: int) -> int:
        """At the start of the second refresh: to that of the last one."""
        if len(self._refreshes) == len(self._starts):
            return 0
        spans = {role: len(spans) for role, spans in self._spans.items()}
        self._starts.append(_Start(step - 1, self.now, dict(self._waits), spans, len(self._index_waits)))
        every, is_regular = self._policy.every_steps, self._policy.fixed_lag is not None and not self._skipped
        cycles = sum(self._policy.starts_at(at) for at in range(step - 1 + every, self._shape.steps, every))
        if len(self._starts) != 2 or not cycles or not is_regular or self._pending is None:
            return 0
        first, second = self._starts
        for cycle in range(1, cycles + 1):
            self._repeat(first, second, cycle)
        self._move_on(cycles, cycles * every, cycles * (second.now - first.now))
        return cycles * every

    def _repeat(self, first: _Start, second: _Start, cycle: int) -> None:
        """What happened from the first start to the second, that much later."""
        seconds, steps = cycle * (second.now - first.now), cycle * (second.step - first.step)
        self._step_ends += [end + seconds for end in self._step_ends[first.step + 1 : second.step + 1]]
        for role, spans in self._spans.items():
            spans += [_later(span, seconds) for span in spans[first.num_spans[role] : second.num_spans[role]]]
        self._index_waits += [_later(span, seconds) for span in self._index_waits[first.num_waits : second.num_waits]]
        for cause in self._waits:
            self._waits[cause] += second.waits[cause] - first.waits[cause]
        self._refreshes.insert(-1, _refresh_later(self._refreshes[0], steps, seconds))

    def _move_on(self, cycles: int, steps: int, seconds: float) -> None:
        """The refresh that has just begun is the last."""
        pending, last = self._pending, self._refreshes[-1]
        assert pending is not None
        self._refreshes[-1] = Refresh(last.step + steps, last.began + seconds)
        pending.number, pending.step = pending.number + cycles, pending.step + steps
        self._live_step, self._live_since = self._live_step + steps, self._live_since + seconds
        self._scored = {ahead + steps: scored for ahead, scored in self._scored.items()}
        self._jumped += seconds

    def _jump_phase(self, step: int) -> int:
        """Measures the pace in a phase, then jumps to shortly before its end. A build's last files are not jumped."""
        if not self._is_steady():
            self._mark = None
            return 0
        phase = (len(self._refreshes), self._live_step, self._builders.waiting > 0)
        if phase != self._phase:
            self._phase, self._settled, self._mark = phase, step + SETTLING, None
        if self._mark is None and step >= self._settled:
            self._mark = self._marked(step)
        if self._mark is None or step < self._mark.step + WINDOW:
            return 0
        mark, self._mark = self._mark, None
        steps = self._steps_of_phase(step, mark)
        self._settled = step + steps + (SETTLING if steps else self._shape.steps)  # once in a phase
        if steps:
            self._jump_over(step, steps, mark)
        return steps

    def _is_steady(self) -> bool:
        """Whether files wait for builders, or none of them works and no refresh is under way."""
        is_measuring = self._pending is not None and not self._pending.ready.processed
        return self._builders.waiting > 0 or not (self._builders.is_working or is_measuring)

    def _marked(self, step: int) -> _Mark:
        return _Mark(step, self.now, dict(self._waits), self._builders.done_seconds())

    def _steps_of_phase(self, step: int, mark: _Mark) -> int:
        """Steps until something is decided or the builders run out of files, less what is under way then."""
        pending = self._pending
        margin = 2 * (self._shape.step.depth + 2)

        def is_event(at: int) -> bool:
            if self._policy.start(at, self._live_step, pending.step if pending else None) is not Start.nothing:
                return True
            ready = bool(pending and pending.ready.processed)
            return pending is not None and self._policy.is_due(at, self._live_step, pending.step, ready)

        most = next((at for at in range(step, self._shape.steps) if is_event(at)), self._shape.steps) - step - margin
        if self._builders.waiting:
            files = sum(self._built_since(mark)) / self._builders.queue[0].seconds / WINDOW  # a step
            most = min(most, int((self._builders.waiting - len(self._builders.servers) / 4) / files))
        return most if most > margin else 0

    def _built_since(self, mark: _Mark) -> list[float]:
        return [now - then for now, then in zip(self._builders.done_seconds(), mark.built, strict=True)]

    def _jump_over(self, step: int, steps: int, mark: _Mark) -> None:
        times, began = steps / WINDOW, self.now
        pace = (began - mark.now) / WINDOW
        built = [times * seconds for seconds in self._built_since(mark)]
        for server, seconds in zip(self._builders.servers, built, strict=True):
            if seconds:
                self._builders.advance(server, seconds)
        for cause, seconds in self._waits.items():
            self._waits[cause] = seconds + times * (seconds - mark.waits[cause])
        self._scored = {ahead + steps: scored for ahead, scored in self._scored.items()}
        self._step_ends += [began + pace * number for number in range(1, steps + 1)]
        self._jumped += pace * steps
        for role, seconds in self._work_of_step().items():
            self.note(role, began, steps * seconds)
        self.note("embed", began, sum(built))

    def _work_of_step(self) -> dict[str, float]:
        """GPU seconds of each role."""
        durations = self._durations
        return {
            "score": durations.scoring.units * durations.scoring.unit,
            "train": durations.encode + len(self._ranks) * durations.train,
            "search": durations.search,
        }


def _later(span: Span, seconds: float) -> Span:
    return Span(span.begin + seconds, span.end + seconds, span.devices)


def _refresh_later(refresh: Refresh, steps: int, seconds: float) -> Refresh:
    assert refresh.ready is not None and refresh.adopted is not None and refresh.adopted_step is not None
    return Refresh(
        refresh.step + steps,
        refresh.began + seconds,
        refresh.ready + seconds,
        refresh.adopted_step + steps,
        refresh.adopted + seconds,
    )
