"""Measure what a training step costs rank 0 beside the training: milliseconds of its process's processor time.

    python -m benchmarks.pool_overhead --pairs 160 640 1280 --replicas 8 64

Replicas and searchers answer at once, so all that is measured is rank 0's own: a search of every shard, as many as
replicas, and prompts, the cache on disk, units and calls to replicas, or one message to the feeder that does these. The
time is that of all threads of a process, Ray's among them; replicas and searchers are other processes. The last lines
fit a + b * pairs + c * replicas.
"""

import argparse
import functools
import pickle
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import ray

from benchmarks.machine import describe_machine
from replug.cluster.actor_pool import ActorPool
from replug.cluster.ray_cluster import own_ray
from replug.config.schema import LMConfig
from replug.data.records import Example
from replug.index_workers.service import SearcherGroup
from replug.models import scorer_pool
from replug.models.black_box_lm import ScoreCall
from replug.models.lm_source import GivenSource
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate
from replug.models.scorer_pool import ScorerPool, TimedScores
from replug.train import workers
from replug.train.workers import Workers

K, TEXT_BYTES, TOKENS, DIM = 20, 512, 128, 768  # documents of a query, sizes of texts and vectors, as in paper.yaml
PROCESSES = 8  # that all replicas or all shards share, as handles of rank 0: a hundred processes take minutes to start
AHEAD = 2  # steps that are scored beside the one that is waited for
OWN = psutil.Process()

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # for the feeder


class Pickled:
    """Bytes that unpickle to an object, so that a process sends what it does not import: torch, 64 times."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple:
        return pickle.loads, (self.data,)


class InstantLM(GivenSource):
    """Stands in for a source of local weights."""

    def __init__(self, replicas: int, unit_tokens: int, answers: list[bytes]) -> None:
        super().__init__(StandInLM())
        self._replicas, self._unit_tokens = replicas, unit_tokens
        self.answers = answers  # to units of no pair, of one, and so on

    def tokens_per_unit(self, on_gpu: bool) -> int:
        return self._unit_tokens

    def open(self, lm: LMConfig, second: Any = None) -> ScorerPool:
        """Start replicas that answer at once, and wait until they are up."""
        with patch.multiple(scorer_pool, Scorer=Replica, ActorPool=Handles):
            pool = ScorerPool(self, self._replicas, threads=1)  # type: ignore[arg-type]
        pool._units_per_call = scorer_pool.UNITS_PER_CALL_GPU
        while pool.pool.num_up < self._replicas:
            time.sleep(0.1)
        return pool


def _answer(pairs: int) -> TimedScores:
    scores = [(-float(TOKENS), TOKENS)] * pairs
    return scores, {"tokens": pairs * TOKENS, "padded_tokens": pairs * TOKENS, "busy_seconds": 0.0}


class Replica:
    """Stands in for a `Scorer`. Imports no torch: 64 of them are on one machine."""

    def __init__(self, lm: InstantLM, *_: object) -> None:
        self._answers = lm.answers

    def probe(self) -> list[np.ndarray]:
        return [np.zeros(1, np.float32)]

    def score(self, units: list[ScoreCall], number: int = 0) -> list[Pickled]:
        return [Pickled(self._answers[len(unit)]) for unit in units]


class Handles(ActorPool):
    """A pool whose replicas share a few processes."""

    def __init__(self, make_actor: Callable[[int], Any], *arguments: Any, **options: Any) -> None:
        make = functools.cache(make_actor)
        super().__init__(lambda number: make(number % PROCESSES), *arguments, **options)


class Shard:
    """Stands in for a `Searcher`."""

    def search(self, version: int, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32)


def milliseconds(steps: int, step: Callable[[int], object], process: psutil.Process) -> float:
    """Return the mean of a step, without the first ones, which find nothing to wait for."""
    for number in range(steps):
        if number == AHEAD + 1:
            began = sum(process.cpu_times()[:2])
        step(number)
    return 1000 * (sum(process.cpu_times()[:2]) - began) / (steps - AHEAD - 1)


def scoring(workers: Workers, pairs: int, steps: int, process: psutil.Process) -> float:
    rng, waiting = np.random.default_rng(), deque()

    def text() -> str:
        return rng.bytes(TEXT_BYTES // 2).hex()

    examples = [[Example(f"{step} {i}", text(), text(), "") for i in range(pairs // K)] for step in range(steps)]
    documents = [[text() for _ in range(K)] for _ in range(pairs // K)]

    def step(number: int) -> None:
        waiting.append(workers.lm.submit_examples(workers.template, examples[number], documents))
        if len(waiting) > AHEAD:
            waiting.popleft().result(300)

    found = milliseconds(steps, step, process)
    for future in waiting:
        future.result(300)
    return found


def searched(arguments: argparse.Namespace, shards: int) -> dict[int, float]:
    """Return the milliseconds of searching every shard, by pairs."""
    actor = ray.remote(num_cpus=0)(Shard)
    processes = [actor.remote() for _ in range(PROCESSES)]
    with closing(SearcherGroup(lambda shard: processes[shard % PROCESSES], shards, 300)) as group:
        found = {}
        for pairs in arguments.pairs:
            vectors = np.random.default_rng().random((pairs // K, DIM), np.float32)
            found[pairs] = milliseconds(arguments.steps, lambda _, vectors=vectors: group.search(0, vectors, K), OWN)
        return found


def scored(arguments: argparse.Namespace, replicas: int, is_fed: bool) -> dict[int, tuple[float, float]]:
    """Return the milliseconds of scoring by pairs: rank 0's, and the feeder's."""
    source = InstantLM(replicas, arguments.unit_tokens, [pickle.dumps(_answer(n)) for n in range(129)])
    fed_here = 0 if is_fed else replicas
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(workers, "MOST_FED_HERE", fed_here),
        patch.object(workers, "scorer_actors", lambda: (replicas, 0.0)),
        workers.started_lm(LMConfig(), source, Path(folder, "scores.sqlite")) as opened,  # type: ignore[arg-type]
    ):
        both = Workers(opened, None, PromptTemplate())  # type: ignore[arg-type]
        both.lm.submit_examples(both.template, [Example("", "a", "b", "")], [["c"]]).result(300)
        feeders = [
            one
            for one in psutil.process_iter(["cmdline"])
            if (one.info["cmdline"] or [""])[0].startswith("ray::Feeder")
        ]
        found = {}
        for pairs in arguments.pairs:
            own = scoring(both, pairs, arguments.steps, OWN)
            found[pairs] = (own, scoring(both, pairs, arguments.steps, feeders[0]) if is_fed else 0.0)
        return found


@own_ray(starts=True)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[160, 640, 1280])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--unit-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    print(describe_machine(1))
    ray.init(num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    measured: dict[str, list[tuple[int, int, float]]] = {"rank 0": [], "rank 0 with a feeder": [], "the feeder": []}
    for replicas in arguments.replicas:
        search = searched(arguments, replicas)
        here, fed = scored(arguments, replicas, is_fed=False), scored(arguments, replicas, is_fed=True)
        for pairs in arguments.pairs:
            (own, _), (beside, feeder) = here[pairs], fed[pairs]
            print(
                f"{replicas:3} replicas, {pairs:5} pairs: search {search[pairs]:5.1f} ms, scores {own:5.1f} ms, or "
                f"{beside:5.1f} ms with a feeder that takes {feeder:5.1f} ms",
                flush=True,
            )
            spent = (search[pairs] + own, search[pairs] + beside, feeder)
            for rows, one in zip(measured.values(), spent, strict=True):
                rows.append((pairs, replicas, one))
    for name, rows in measured.items():
        pairs, replicas, spent = np.array(rows).T
        fit = np.linalg.lstsq(np.stack([np.ones_like(pairs), pairs, replicas], axis=1), spent, rcond=None)[0]
        print(f"{name}: {fit[0]:.1f} ms + {1000 * fit[1]:.1f} us a pair + {fit[2]:.2f} ms a replica")


if __name__ == "__main__":
    main()
