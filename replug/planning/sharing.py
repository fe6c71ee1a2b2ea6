"""Processors that roles share: where more is wanted at once than there is, all that runs slows down alike."""

import heapq
from functools import partial
from itertools import count

import simpy


class Processor:
    """Shares `capacity` (cores, or one GPU) among the work under way, each piece wanting some of it.

    Kept as a clock of its own that runs at the share everyone gets: a piece of s seconds ends when that clock has
    moved on by s, so an arrival changes the speed of the clock and no piece's end on it. `crowded` is the share of its
    capacity that is left while several pieces take turns.
    """

    def __init__(self, env: simpy.Environment, capacity: float, crowded: float = 1.0) -> None:
        self._env, self._capacity, self._crowded = env, capacity, crowded
        self._wanted = self._clock = self._read_at = 0.0
        self._ends: list[tuple[float, int, float, simpy.Event]] = []  # on the own clock, in order of arrival
        self._numbers, self._alarm = count(), 0

    def work(self, seconds: float, wanted: float) -> simpy.Event:
        """An event that comes when a piece is done that takes `seconds` where it gets all it wants."""
        done = self._env.event()
        self._read_clock()
        heapq.heappush(self._ends, (self._clock + seconds, next(self._numbers), wanted, done))
        self._wanted += wanted
        self._set_alarm()
        return done

    def left(self, done: simpy.Event) -> float:
        """Seconds of a piece that are still to do."""
        self._read_clock()
        return next(end for end, _, _, event in self._ends if event is done) - self._clock

    def change(self, done: simpy.Event, left: float) -> None:
        """A piece has so many seconds to do from now on."""
        self._read_clock()
        entries = [(self._clock + left if event is done else end, n, w, event) for end, n, w, event in self._ends]
        heapq.heapify(entries)
        self._ends = entries
        self._set_alarm()

    @property
    def _speed(self) -> float:
        capacity = self._capacity * (self._crowded if len(self._ends) > 1 else 1.0)
        return min(1.0, capacity / self._wanted) if self._wanted > 0 else 1.0

    def _read_clock(self) -> None:
        self._clock += (self._env.now - self._read_at) * self._speed
        self._read_at = self._env.now

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._clock) / self._speed
            timeout = self._env.timeout(left)
            assert timeout.callbacks is not None
            timeout.callbacks.append(partial(self._ring, self._alarm))

    def _ring(self, alarm: int, event: simpy.Event) -> None:
        if alarm != self._alarm:
            return  # something arrived or ended since
        self._read_clock()
        self._clock = max(self._clock, self._ends[0][0])  # without what rounding left over
        while self._ends and self._ends[0][0] <= self._clock:
            _, _, wanted, done = heapq.heappop(self._ends)
            self._wanted -= wanted
            done.succeed()
        if not self._ends:
            self._wanted = 0.0
        self._set_alarm()
