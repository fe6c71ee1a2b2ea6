"""A run without GPUs: its actors as the configuration has them, on one set of cores that they share."""

import math
from collections.abc import Mapping
from dataclasses import replace

from replug.cluster.layout import Layout, index_actors, lay_out, num_ranks, scorers
from replug.cluster.packing import Node
from replug.config.schema import Config
from replug.planning.estimate import Job, Rates, Split
from replug.planning.simulate import DeviceAllocation, Place


def on_cores(config: Config) -> Layout:
    """On a machine without GPUs."""
    return lay_out(config, [Node("this machine", math.inf, 0, is_driver=True)])


def configured_split(config: Config) -> Split:
    """Actors by role: replicas, builders, and the trainer."""
    recompute = config.train.gradient_checkpointing
    replicas, _ = scorers(config.lm)
    return Split(replicas, index_actors(config.index).num_builders, num_ranks(config), recompute=recompute)


def threads_by_role(config: Config, cores: int) -> dict[str, int]:
    """Threads of one actor of each role, as the actors set them."""
    return {
        "score": config.lm.threads_per_replica or max(1, cores // scorers(config.lm)[0]),
        "embed": config.index.threads_per_worker or cores,
        "train": config.train.threads or max(1, cores // configured_split(config).train),
        "search": config.index.threads_per_worker or cores,
    }


def configured_allocation(job: Job, cores: int, machines: int = 1) -> DeviceAllocation:
    """All roles on the same cores, each actor wanting its threads of one machine's.

    An LM that sleeps or is elsewhere wants none.
    """
    config, threads = job.config, threads_by_role(job.config, cores)
    wanted = {role: float(min(cores, number)) for role, number in threads.items()}
    split = configured_split(config)
    wanted["embed"] *= split.embed
    wanted["train"] *= split.train
    if config.lm.path is None or job.seconds_per_call:
        wanted["score"] = 0.0
    return DeviceAllocation(
        split.score, {"cpu": float(machines * cores)}, {role: Place("cpu", n) for role, n in wanted.items()}
    )


def of_actors(core: Rates, threads: Mapping[str, float]) -> Rates:
    """Rates of one actor of each role, from those of one core; threads are taken to add up."""
    return replace(
        core,
        score=core.score * threads["score"],
        embed=core.embed * threads["embed"],
        train=core.train * threads["train"],
        encode=core.encode * threads["train"],
        search=core.search * threads["search"],
        search_bandwidth=core.search_bandwidth * threads["search"],
    )
