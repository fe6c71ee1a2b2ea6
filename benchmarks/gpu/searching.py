"""Exact search against float64."""

import time

import numpy as np
import torch

from benchmarks.gpu.kit import Kit
from replug.index_workers.exact_search import BlockVectors, ExactShard


def exact_search(kit: Kit) -> None:
    """Hold exact search over a million vectors against float64, and time it."""
    rows, dim, k = (20_000, 64, 20) if kit.pretends else (1_000_000, 768, 20)
    generator = torch.Generator(kit.device).manual_seed(0)

    def unit_vectors(count: int) -> torch.Tensor:
        drawn = torch.randn(count, dim, device=kit.device, generator=generator) + 1
        return torch.nn.functional.normalize(drawn, dim=1)

    vectors, queries = unit_vectors(rows).half(), unit_vectors(32)
    vectors[:: rows // 1000] = vectors[0]  # a thousand equal ones, which half of the queries like best
    queries[16:] += vectors[0].float()
    blocks = [part.cpu().numpy() for part in vectors.split(65_536)]
    start = time.perf_counter()
    shard = ExactShard(BlockVectors(0, blocks, dim), kit.device)
    kit.wait()
    kit.say("loading to the device", rows * dim * 2 / (time.perf_counter() - start) / 1e9, "GB/s")
    found, similarities = shard.search(queries.cpu().numpy(), k)
    exact = torch.cat([queries.double() @ part.double().T for part in vectors.split(65_536)], 1)
    best, places = exact.topk(k, dim=1)
    kit.say("similarities from float64's, largest", float(np.abs(similarities - best.cpu().numpy()).max()), "", 2e-7)
    has_ties = (exact >= best[:, -1:] - 1e-12).sum(1).gt(k).tolist()
    apart = [set(a) != set(b) for a, b in zip(found.tolist(), places.cpu().tolist(), strict=True)]
    wrong = sum(one and not tied for one, tied in zip(apart, has_ties, strict=True))
    kit.say(f"queries with other rows than float64's, {sum(has_ties)} with ties left out", wrong, "", 0)
    del exact
    untied = queries[:16].cpu().numpy().repeat(2, axis=0)
    kit.say(f"32 queries over {rows} vectors", 1e3 * kit.seconds(lambda: shard.search(untied, k), 5, 1), "ms")
    if kit.pretends:
        return
    kit.begin_memory()
    held = torch.cuda.memory_allocated()
    shard.search(queries.cpu().numpy(), k)
    kit.say("memory of a search beside the vectors", (torch.cuda.max_memory_allocated() - held) / 1e9, "GB")
