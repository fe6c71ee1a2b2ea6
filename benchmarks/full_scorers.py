"""How much of a step its scorers are at work: replicas whose time follows tokens, behind the real pipeline.

    python -m benchmarks.full_scorers --replicas 1 2 4 8

Replicas sleep in place of computing, so two cores are enough: 40 microseconds a token, padded to a pass's longest pair.
All else is real: BatchPipeline, cache, pool, Ray. Pairs are of unequal length. Encoding, searching and training sleep
too, and the trainer takes a tenth of what the replicas need for a step.

A step has the paper's 1,280 pairs, in 120 scoring batches. Tokens are fewer than the paper's and slower, so a batch
takes as long as on a GPU. With --queries 8 a step has an eighth of the work, and eight replicas share it as 64 would
share the paper's.

Busy is the time in which replicas compute, by their own clocks, of the time between two borders of steps: after the
pipeline has filled, and before it empties.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.machine import describe_machine
from replug.cluster.ray_cluster import own_ray
from replug.config.schema import RetrieveConfig, TrainConfig
from replug.data.records import Example, SearchResult
from replug.data.sampling import QuerySampler
from replug.index_workers.build_plan import IndexState
from replug.models.black_box_lm import ContinuationScore
from replug.models.lm_source import GivenSource
from replug.models.local.stand_in_lm import StandInLM
from replug.models.pair_tokens import PairIds
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import CachingLM
from replug.models.scorer_pool import ScorerPool
from replug.train.pipeline import BatchPipeline
from replug.train.step_metrics import StepClock

K = 20
TOKENS_PER_SECOND, MEAN_TOKENS = 25_000, 218  # of a replica; of a pair
UNIT_TOKENS = 64 * K * MEAN_TOKENS // 120
WORD = " abc"  # four bytes, as the units take a token to have
SEARCH_SECONDS = ENCODE_SECONDS = 0.02


class TimedLM(StandInLM):
    """Scores 0 for every word, after as long as one pass over a call would take."""

    def tokenize(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> tuple[list[PairIds]]:
        pairs = zip(prefixes, continuations, strict=True)
        return ([([0] * len(prefix.split()), [0] * len(after.split())) for prefix, after in pairs],)

    def launch(self, pairs: list[PairIds]) -> "Future[list[ContinuationScore]]":
        lengths = [len(before) + len(after) for before, after in pairs]
        padded = len(lengths) * max(lengths)
        self.counts.update(tokens=sum(lengths), padded_tokens=padded)
        time.sleep(padded / TOKENS_PER_SECOND)
        done: Future[list[ContinuationScore]] = Future()
        done.set_result([ContinuationScore(np.zeros(len(after), np.float32)) for _, after in pairs])
        return done


class Texts:
    """Queries and documents of unequal length, made when they are read."""

    def examples(self, rows: Sequence[int]) -> list[Example]:
        return [Example(str(row), _text(row, 1, 16), _text(row, 2, 16), "") for row in rows]

    def texts(self, rows: Sequence[int]) -> list[str]:
        return [_text(row, 3, 20) for row in rows]


def _text(row: int, kind: int, shortest: int) -> str:
    words = int(np.random.default_rng([kind, int(row)]).integers(shortest, 129))
    return f" {kind}{int(row):07}" + WORD * (words - 1)


class Data:
    queries: Any = Texts()
    corpus: Any = Texts()


def search(version: int, vectors: np.ndarray, k: int, exclude: Sequence[str | None] | None) -> SearchResult:
    """Other documents for every query, so that the cache holds none of them."""
    time.sleep(SEARCH_SECONDS)
    first = (vectors[:, :1] * k).astype(np.int64)
    found = first + np.arange(k)
    return SearchResult(found, np.zeros(found.shape, np.float32), version)


def encode(texts: Sequence[str]) -> np.ndarray:
    """One number, which names the query."""
    time.sleep(ENCODE_SECONDS)
    return np.array([[float(text.split()[0][1:])] for text in texts])


@dataclass(frozen=True, slots=True)
class Case:
    """A step of so many queries, trained on by the pipeline at a depth."""

    replicas: int
    queries: int
    depth: int

    @property
    def lm_seconds(self) -> float:
        """Of a step, were there no padding and no wait."""
        return self.queries * K * MEAN_TOKENS / TOKENS_PER_SECOND / self.replicas


def measure(pool: ScorerPool, case: Case, steps: int, file: Path) -> tuple[float, float]:
    """Busy share, and seconds a step. Leaves nothing under way."""
    pool._unit_tokens = UNIT_TOKENS
    lm = CachingLM(pool, file)
    with ThreadPoolExecutor(1) as executor:
        max_steps = steps + case.depth + 1
        sampler = QuerySampler(case.queries * max_steps, case.queries, 0)
        pipeline = BatchPipeline(
            sampler,
            Data,
            RetrieveConfig(k=K),
            TrainConfig(max_steps=max_steps, pipeline_depth=case.depth),
            encode=encode,
            search=search,
            executor=executor,
            score=partial(lm.submit_examples, PromptTemplate()),
            clock=StepClock(),
        )
        borders = train(pool, pipeline, steps, 0.1 * case.lm_seconds)
        share = pool.metrics()["busy_share"]
        for step in range(steps, steps + case.depth):
            pipeline.take(step)
    return share, (borders[-1] - borders[0]) / (steps - 1)


def train(pool: ScorerPool, pipeline: BatchPipeline, steps: int, seconds: float) -> list[float]:
    """When each step had been trained on. Batches are in flight behind the last. The pool is read at the first."""
    borders = []
    for step in range(steps):
        pipeline.advance(step, IndexState(0, 0))
        pipeline.take(step)
        time.sleep(seconds)
        borders.append(time.monotonic())
        if not step:
            pool.metrics()  # which gives shares since it was last read
    return borders


@own_ray(starts=True)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--queries", type=int, default=64, help="of a step, with 20 documents each")
    parser.add_argument("--depth", type=int, default=2, help="of the pipeline")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a measurement, about; three steps at least")
    arguments = parser.parse_args()
    print(describe_machine(1), flush=True)
    ray.init(num_cpus=max(arguments.replicas), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        for replicas in arguments.replicas:
            pool = ScorerPool(GivenSource(TimedLM()), replicas, threads=1)
            while pool.pool.num_up < replicas:
                time.sleep(0.1)
            case = Case(replicas, arguments.queries, arguments.depth)
            steps = 1 + max(3, round(arguments.seconds / case.lm_seconds))
            share, seconds = measure(pool, case, steps, Path(folder) / f"{replicas}.sqlite")
            print(f"{replicas} replicas: busy {share:.3f}, {seconds:.2f} s a step, mean of {steps - 1}", flush=True)
            pool.close()


if __name__ == "__main__":
    main()
