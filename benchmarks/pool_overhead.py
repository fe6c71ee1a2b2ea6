"""What the Ray pool costs: N replicas of a stand-in LM with a fixed latency against one such LM called directly.

    python -m benchmarks.pool_overhead

One replica's rate is that of the LM itself in this process. Idle gaps are what a replica's own clock shows
between the end of a call and the begin of the next, while calls were waiting.
"""

import argparse
import itertools
import time

import ray

from benchmarks.machine import describe_machine
from replug.cluster.ray_cluster import own_ray
from replug.models.local.stand_in_lm import StandInSource
from replug.models.scorer_pool import ScorerPool, TimedScores


def calls_per_second_alone(latency: float, calls: int) -> float:
    lm = StandInSource(latency).load()
    start = time.perf_counter()
    for i in range(calls):
        lm.score([f"a {i} b"], [f" {i}"])
    return calls / (time.perf_counter() - start)


def calls_per_second(pool: ScorerPool, calls: int) -> tuple[float, list[TimedScores]]:
    answers: list[TimedScores] = []
    pool._note = lambda answer: answers.append(answer) or answer.scores  # type: ignore
    start = time.perf_counter()
    futures = [pool.submit([f"a {i} b"], [f" {i}"]) for i in range(calls)]
    for future in futures:
        future.result(300)
    return calls / (time.perf_counter() - start), answers


def gaps_ms(answers: list[TimedScores], replicas: int) -> list[float]:
    """Idle milliseconds between calls of a replica; its last calls, when nothing waits any more, are left out."""
    gaps = []
    for replica in range(replicas):
        own = sorted((a for a in answers if a.replica == replica), key=lambda a: a.began)
        gaps += [1000 * (b.began - a.began - a.seconds) for a, b in itertools.pairwise(own[:-1])]
    return sorted(gaps)


@own_ray(starts=True)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.1, help="seconds of a call")
    parser.add_argument("--calls", type=int, default=150, help="for each replica")
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    print(describe_machine(1))
    ray.init(num_cpus=max(arguments.replicas), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    alone = calls_per_second_alone(arguments.latency, arguments.calls)
    print(f"one LM called directly: {alone:.2f} calls/s of {1000 * arguments.latency:.0f} ms")
    for replicas in arguments.replicas:
        pool = ScorerPool(StandInSource(arguments.latency), replicas, threads=1)
        while pool.pool.num_up < replicas:
            time.sleep(0.1)
        rate, answers = calls_per_second(pool, arguments.calls * replicas)
        gaps = gaps_ms(answers, replicas)
        shown = (
            f"median {gaps[len(gaps) // 2]:.2f} ms, largest {gaps[-1]:.2f} ms, {sum(g > 5 for g in gaps)} above 5 ms"
        )
        print(
            f"{replicas} replicas: {rate:7.2f} calls/s, {rate / (replicas * alone):.3f} of {replicas} times one; "
            f"idle gaps {shown}",
            flush=True,
        )
        pool.close()


if __name__ == "__main__":
    main()
