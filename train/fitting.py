"""One fit: from a configuration to what Lightning's trainer is made of, on rank 0 and on the others.

Rank 0 has the pipeline, the refreshes and the files. The others have the module and the data, and receive batches.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pytorch_lightning.loggers.logger import Logger

from replug.cluster.background import InlineExecutor, in_background, note_ray_thread
from replug.cluster.gpu_shares import trains_on_gpu
from replug.cluster.gpus import num_gpus
from replug.cluster.interruption import Interruption, ignore_signals
from replug.cluster.layout import num_ranks
from replug.config.choices import LMScore, Rerank, TrainedSide
from replug.config.errors import UserError
from replug.config.refresh_policy import refresh_policy
from replug.config.schema import Config
from replug.data.sampling import QuerySampler
from replug.data.store import PreparedSet
from replug.index_workers.build import document_search, publish_snapshot
from replug.index_workers.build_plan import IndexState
from replug.index_workers.service import Refreshed
from replug.models.build import load_encoder, located
from replug.models.encoder import Encoder
from replug.models.hardware import available_cores
from replug.train.batch_broadcast import BatchChannel
from replug.train.callbacks import OwnSettings, StepBoundary, StepProgress, TemperatureCheck
from replug.train.checkpoints import KEPT_CHECKPOINTS, Checkpointer, CheckpointWriter
from replug.train.evaluation import heldout_bpb
from replug.train.module import LossSettings, LSRModule, OptimizerSettings
from replug.train.pipeline import BatchPipeline, RetrievalStage
from replug.train.ranks import RankEnvironment, other_ranks
from replug.train.refresh import RefreshController
from replug.train.run_dir import CheckpointMark, RunDirectory
from replug.train.step_metrics import DeviceShares, StepClock
from replug.train.trained_weights import choose_trained_weights, freeze_sides
from replug.train.trainer import (
    lightning_trainer,
    quieten_lightning,
    require_all_steps,
    run_trainer,
    uses_bf16,
)
from replug.train.workers import Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankJob:
    """All that another rank needs; paths are absolute, since it may run on another machine."""

    config: Config
    run: Path
    prepared: Path
    checkpoint: Path | None


def fit(
    config: Config,
    run: RunDirectory,
    data: PreparedSet,
    workers: Workers,
    module: LSRModule,
    loggers: list[Logger],
    interruption: Interruption,
) -> int:
    """Train from the newest whole checkpoint on; returns the number of the index version that comes after.

    Raises Interrupted where a signal asked for it, RunError where the run cannot go on; both have saved the step.
    """
    newest, every, clock = run.newest_checkpoint(), config.checkpoint.every_steps, StepClock()
    job = RankJob(
        replace(config, retriever=located(config.retriever)),
        run.path.absolute(),
        data.folder.absolute(),
        newest.path.absolute() if newest else None,
    )
    gpus = min(1.0, float(config.resources.train)) if trains_on_gpu(config, num_gpus() > 0) else 0.0
    with (
        other_ranks(partial(fit_as_other_rank, job), num_ranks(config), gpus, available_cores()) as others,
        _one_thread("retrieve") as background,
        CheckpointWriter(run, KEPT_CHECKPOINTS, newest.step if newest else 0) as writer,
    ):

        def check() -> None:
            interruption.check()
            others.check()

        def lm_metrics() -> dict[str, float]:
            return {**workers.lm.metrics(), "truncated": float(workers.template.num_truncated)}

        pipeline = batch_pipeline(config, module, data, workers, background, clock, check)
        refresh = refresh_controller(config, module, data, workers, clock, pipeline.settle, check)

        def offer_best(index: IndexState, heldout_bpb: float | None) -> None:
            run.offer_best(workers.index.store.encoder_folder(index.version), heldout_bpb, index.step)

        callbacks = [  # in the order they act
            OwnSettings(interruption.install, available_cores()),
            StepBoundary(refresh, pipeline, offer_best, clock, lm_metrics, check),
            DeviceShares(run.device_use, config.train.max_steps, others.devices),
            TemperatureCheck(pipeline, loss_settings(config)),
            StepProgress(config.train.max_steps),
            Checkpointer(writer, refresh.versions_in_use, workers.index.prune, every, clock),
        ]
        module.attach(pipeline)
        if others.num_others:
            channel = BatchChannel(pipeline)
            callbacks.append(channel)
            module.attach(channel)
        trainer = lightning_trainer(config, run.path, callbacks, loggers, others.environment)
        forget_after(run, newest)
        with interruption.deferred(lambda: f"{others.silence}step {writer.newest_step} is the newest that is saved"):
            run_trainer(trainer, config, module, newest.path if newest else None)
            require_all_steps(trainer, config)
            interruption.check()  # a signal that came during the last step; its checkpoint is there
        return refresh.next_version()


@contextmanager
def _one_thread(name: str) -> Iterator[Executor]:
    """After an error its work ends with the searchers, when these are killed, and is waited for at the end of Ray."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=note_ray_thread)
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def fit_as_other_rank(job: RankJob, environment: RankEnvironment) -> None:
    """What the actors of `ranks` run: the same fit, fed by rank 0. Where rank 0 ends early, the actor is killed."""
    quieten_lightning()
    torch.set_num_threads(available_cores())
    encoder = load_encoder(job.config.retriever, dims=job.config.index.dims)
    module = lsr_module(job.config, encoder, PreparedSet(job.prepared))
    channel = BatchChannel()
    module.attach(channel)
    callbacks = [OwnSettings(ignore_signals, available_cores()), channel]
    run_trainer(lightning_trainer(job.config, job.run, callbacks, [], environment), job.config, module, job.checkpoint)


def forget_after(run: RunDirectory, newest: CheckpointMark | None) -> None:
    """Forget what is about to be done again."""
    run.forget_after(newest.step if newest else 0)
    run.truncate_metrics(newest.step if newest else 0)
    if newest:
        log.info(f"resuming at step {newest.step}")


def loss_settings(config: Config) -> LossSettings:
    """Return the loss's settings. Its prefixes are those asked for, the most first; else those that are searched by."""
    loss = config.loss
    searched = (config.index.dims,) if config.index.dims is not None else ()
    return LossSettings(
        loss.gamma,
        loss.beta,
        loss.lm_score.value,
        loss.direction.value,
        loss.contrastive,
        loss.in_batch,
        tuple(sorted(config.retriever.dims, reverse=True)) or searched,
    )


def lsr_module(config: Config, encoder: Encoder, data: PreparedSet) -> LSRModule:
    """`encoder` is trained, of a pair the side that is asked for.

    Where one encoder has both sides and documents stay as they are, a copy of it as it is encodes them.
    """
    if config.loss.in_batch and (ranks := num_ranks(config) if config.resources.train != "auto" else 1) > 1:
        raise UserError(f"loss.in_batch: {ranks} ranks each have other documents in their batch; expected one")
    documents = freeze_sides(config.retriever.train, encoder)
    if config.loss.lm_score is LMScore.probability:
        log.warning("loss.lm_score=probability underflows beyond a few tokens and makes Q uniform; try mean_logprob")
    train = config.train
    memory = (train.gradient_checkpointing, False, False, train.chunk_tokens)
    encoder.prepare_training(config.retriever.dropout, *memory)
    choose_trained_weights(config, encoder)
    optimizer = OptimizerSettings(train.lr, train.weight_decay, train.warmup_ratio, train.max_steps)
    return LSRModule(encoder, data.queries, data.corpus, loss_settings(config), optimizer, config.seed, documents)


def batch_pipeline(
    config: Config,
    module: LSRModule,
    data: PreparedSet,
    workers: Workers,
    background: Executor,
    clock: StepClock,
    check: Callable[[], None],
) -> BatchPipeline:
    is_live = config.index.rerank is Rerank.live
    retrieval = RetrievalStage(
        partial(module.encode_queries, autocast=uses_bf16(config.train.precision)),
        document_search(config, module.encoder, data, workers.index),
        executor=InlineExecutor() if is_live else background,  # live: its weights are those of the boundary
        k=config.retrieve.k,
        exclude_own_source=config.retrieve.exclude_own_source,
    )
    sampler = QuerySampler(len(data.queries), config.train.batch_size, config.seed)
    return BatchPipeline(
        sampler,
        data,
        retrieval,
        score=workers.lm.submit_sums,
        template=workers.template,
        depth=config.train.pipeline_depth,
        max_steps=config.train.max_steps,
        clock=clock,
        check=check,
    )


def refresh_controller(
    config: Config,
    module: LSRModule,
    data: PreparedSet,
    workers: Workers,
    clock: StepClock,
    settle: Callable[[], None],
    check: Callable[[], None],
) -> RefreshController:
    policy = refresh_policy(config.refresh, config.train.max_steps, config.retriever.train is not TrainedSide.query)
    publish = partial(publish_snapshot, config, module.encoder, data, workers.index.store)
    # Where documents stay as they are, the one version is of the weights before the first step.
    is_fixed = config.retriever.train is TrainedSide.query
    count = 0 if is_fixed else min(config.evaluate.refresh_examples, len(data.heldout))

    def measure(version: int, ready: "Future[Refreshed]") -> "Future[float | None]":
        def bpb() -> float | None:
            ready.result()
            return heldout_bpb(config, data, workers, version, count) if count else None

        return in_background(bpb, "held-out")

    return RefreshController(workers.index, policy, publish, measure, clock, settle, check)
