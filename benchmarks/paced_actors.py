"""The actors of a run on paced fake GPUs, and its rank 0. Imports Ray, which reads its environment once."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.paced_devices import PacedDevice, stated_pace
from replug.cluster.device_use import devices_of, own_devices
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.builder import Builder, Embedded
from replug.models.encoder import Encoder
from replug.models.scorer_pool import Scorer, _Launched


def pace() -> None:
    """Make what this process composes a run of paced. Workers import the classes by name."""
    import replug.index_workers.service as service
    import replug.models.scorer_pool as scorer_pool

    service.Builder, scorer_pool.Scorer = PacedBuilder, PacedScorer  # type: ignore[misc]
    _pace_rank_0()


class _OnDevice:
    """An actor on one fake GPU."""

    @cached_property
    def paced(self) -> PacedDevice:
        [device] = own_devices()
        return PacedDevice(device, Path(stated_pace().folder))


class PacedScorer(_OnDevice, Scorer):
    """The stand-in LM scores for real and takes next to nothing: its time is what the device sleeps."""

    def _launch(self, scoring: Callable[[], Any]) -> _Launched:
        token = stated_pace().token

        def compute() -> _Launched:
            return super(PacedScorer, self)._launch(scoring)

        launched = self.paced.work("score", compute, lambda done: token * done.tokens)
        return replace(launched, ended=time.monotonic())


class PacedBuilder(_OnDevice, Builder):
    """Real embedding, file by file."""

    def embed_file(self, plan: BuildPlan, file: int) -> Embedded:
        _EMBEDDING.here = True
        try:
            return super().embed_file(plan, file)
        finally:
            _EMBEDDING.here = False

    def _load_encoder(self, plan: BuildPlan) -> Encoder:
        encoder, document = super()._load_encoder(plan), stated_pace().document
        embed = encoder.encode_tokens

        def paced(ids: Any, *given: Any, **named: Any) -> Any:
            if not getattr(_EMBEDDING, "here", False):
                return embed(ids, *given, **named)
            return self.paced.work("embed", lambda: embed(ids, *given, **named), lambda _: document * len(ids))

        encoder.__dict__["encode_tokens"] = paced
        return encoder


_EMBEDDING = threading.local()  # whether this thread embeds documents


def _pace_rank_0() -> None:
    """A step holds the device from when its scores are there until the weights have changed."""
    from replug.train.module import LSRModule
    from replug.train.pipeline import BatchPipeline

    stated, devices = stated_pace(), list[PacedDevice]()
    take, step, encode = BatchPipeline.take, LSRModule.optimizer_step, LSRModule.encode_queries

    def device() -> PacedDevice:
        if not devices:
            devices.append(PacedDevice(_device_of_rank_0(), Path(stated.folder)))
        return devices[0]

    def paced_take(self: Any, number: int) -> Any:
        scored = take(self, number)
        device().begin()
        return scored

    def paced_step(self: Any, *given: Any, **named: Any) -> None:
        step(self, *given, **named)
        device().end("train", stated.step)

    def paced_encode(self: Any, *given: Any, **named: Any) -> Any:
        return device().work("encode", lambda: encode(self, *given, **named), lambda _: stated.queries)

    BatchPipeline.take, LSRModule.optimizer_step = paced_take, paced_step  # type: ignore[method-assign]
    LSRModule.encode_queries = paced_encode  # type: ignore[method-assign]


def _device_of_rank_0() -> str:
    import ray

    from replug.cluster.gpu_shares import SHARED
    from replug.cluster.places import gpu_of_rank_0

    [device] = devices_of(ray.util.get_node_ip_address(), [gpu_of_rank_0(SHARED).ray_id])
    return device
