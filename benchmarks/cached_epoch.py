"""What an epoch costs whose scores are all in the cache, against scoring them with SmolLM2.

    python -m benchmarks.cached_epoch

Through the pool and the cache that training uses; both epochs ask for the same pairs, and get the same numbers.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import ray

from benchmarks.machine import describe_machine
from benchmarks.workloads import Pairs, mixed_pairs
from replug.cluster.ray_cluster import own_ray
from replug.models.caching_lm import CachingLM
from replug.models.local.local_source import HuggingFaceSource
from replug.models.model_files import load_tokenizer
from replug.models.packaged import resolve_lm_path
from replug.models.scorer_pool import ScorerPool


def epoch(lm: CachingLM, texts: Pairs, queries_per_step: int = 4) -> tuple[float, np.ndarray]:
    size = queries_per_step * texts.k
    start = time.perf_counter()
    scores = []
    for first in range(0, len(texts), size):
        rows = slice(first, first + size)
        scores.append(lm.submit_sums(texts.prefixes[rows], texts.continuations[rows]).result(600))
    return time.perf_counter() - start, np.concatenate(scores)


@own_ray(starts=True)
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=16)
    arguments = parser.parse_args()
    print(describe_machine(2))
    path = resolve_lm_path("package:smollm2")
    texts = mixed_pairs(load_tokenizer(path), arguments.queries)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    pool = ScorerPool(HuggingFaceSource(path, "bfloat16"), 1)
    pool.score(["warm"], [" up"])
    with tempfile.TemporaryDirectory() as folder:
        lm = CachingLM(pool, Path(folder) / "scores.sqlite")
        scored, scores = epoch(lm, texts)
        cached, again = epoch(lm, texts)
        assert (scores == again).all()
        print(f"{len(texts)} pairs: scored {scored:.1f} s, cached {1000 * cached:.1f} ms, {cached / scored:.4%} of it")
        lm.close()
    pool.close()


if __name__ == "__main__":
    main()
