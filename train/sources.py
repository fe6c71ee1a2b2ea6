"""Sources of batches: the live retriever and LM, labels that were scored once, or labels first and live batches then.

All sources have the same steps: `start` once, and for each step `advance` at the boundary before it, `take`, and `end`.
On several ranks rank 0 alone has a source. `BatchChannel` sends each scored batch to the others, so all ranks train on
the same documents of the same index version, whatever their number. Each rank takes its own share of the batch.
"""

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from replug.cluster.background import in_background, note_ray_thread
from replug.config.choices import Precision, TrainedSide
from replug.config.refresh_policy import refresh_policy
from replug.config.schema import Config
from replug.data.labels import Labels
from replug.data.progress import Progress
from replug.data.records import RetrievedBatch, ScoredBatch
from replug.data.sampling import QuerySampler
from replug.data.store import PreparedSet, StoredCorpus
from replug.index_workers.build import build_version, publish_snapshot
from replug.index_workers.build_plan import IndexState
from replug.index_workers.service import Refreshed
from replug.index_workers.version_store import VersionStore
from replug.models.hardware import multiplies_bfloat16
from replug.train.development import DevResult, LabelledDevTexts, SearchedDevTexts, Watch, embedded
from replug.train.module import Batches, LSRModule
from replug.train.pipeline import BatchPipeline
from replug.train.refresh import RefreshController
from replug.train.step_metrics import StepClock
from replug.train.workers import Workers

log = logging.getLogger(__name__)

DOCUMENTS_PER_BLOCK = 1024  # between two lines of progress

# Other ranks wait for a batch as long as rank 0 waits for the LM or for a refresh, and these have time limits of their
# own. A rank that died is noticed by its connection, one that hangs by its heartbeat.
BATCH_PATIENCE = timedelta(days=30)


class BatchSource(Batches, Protocol):
    """Gives rank 0 its batches. `versions_in_use` are index versions that a checkpoint needs."""

    def start(self, state: dict[str, Any] | None) -> None:
        """Prepare the first step, or go on from the state in a checkpoint."""
        ...

    def advance(self, step: int) -> None:
        """Do what is due at the boundary before a step."""
        ...

    def end(self, step: int) -> dict[str, float]:
        """Return the metrics of a step that has ended."""
        ...

    def state(self) -> dict[str, Any]: ...

    def versions_in_use(self) -> set[int]: ...

    def prune(self, keep: set[int]) -> None:
        """Remove index versions from disk, except these."""
        ...


class LiveBatches:
    """Batches that the retriever finds in an index that is refreshed, and that the LM scores ahead of their steps."""

    def __init__(self, refresh: RefreshController, pipeline: BatchPipeline, workers: Workers, watch: Watch) -> None:
        self._refresh, self._pipeline, self._workers, self._watch = refresh, pipeline, workers, watch
        self.take = pipeline.take

    def start(self, state: dict[str, Any] | None) -> None:
        """Serve version 0 of a new run, or what a checkpoint says. Minutes, in which other ranks wait for a batch."""
        if state is None:
            self._refresh.start()
        else:
            self._refresh.restore(state["refresh"])
            self._pipeline.restore([batch_from_state(batch) for batch in state["batches"]])
        self._record()

    def advance(self, step: int) -> None:
        """Swap or start a refresh, then fill the pipeline."""
        if self._refresh.at_boundary(step):
            self._say_swapped(step)
            self._record()
        self._pipeline.advance(step, self._refresh.live)

    def renew(self, step: int) -> None:
        """Serve an index of the weights as they are."""
        self._refresh.renew(step)
        self._say_swapped(step)
        self._record()

    def end(self, step: int) -> dict[str, float]:
        """Return what serves now, how it was made and what it is like, and the refreshes that failed.

        Logged at every step: Lightning would repeat a value that is logged now and then.
        """
        refresh, last = self._refresh, self._refresh.last
        lm = {**self._workers.lm.metrics(), "truncated": float(self._workers.template.num_truncated)}
        return {
            "index/live_version": float(refresh.live.version),
            "index/live_step": float(refresh.live.step),
            "index/swapped": float(step > 0 and refresh.adopted_step == step),
            "index/refresh_under_way": float(refresh.is_under_way),
            **{f"index/{name}": value for name, value in asdict(last.measures).items()},
            "index/swap_build_seconds": last.build_seconds,
            "index/swap_documents_per_second": last.documents_per_second,
            "index/swap_wait_seconds": refresh.swap_wait_seconds,
            "index/swap_ms": refresh.swap_ms,
            "index/refreshes_skipped": float(refresh.num_skipped),
            "index/refreshes_failed": float(refresh.num_failed),
            **{f"scoring/{name}": value for name, value in lm.items()},
        }

    def state(self) -> dict[str, Any]:
        """Return the live index version, the refresh under way, and the batches in flight."""
        batches = [batch_to_state(batch) for batch in self._pipeline.state()]
        return {"refresh": self._refresh.state(), "batches": batches}

    def versions_in_use(self) -> set[int]:
        return self._refresh.versions_in_use()

    def prune(self, keep: set[int]) -> None:
        self._workers.index.prune(keep)

    def finish(self) -> None:
        """Wait until no version is being built."""
        self._refresh.finish()

    def _record(self) -> None:
        result, store = self._refresh.dev, self._workers.index.store
        if result is not None:
            self._watch.record(result, partial(shutil.copytree, store.encoder_folder(self._refresh.live.version)))

    def _say_swapped(self, step: int) -> None:
        live, measures, result = self._refresh.live, self._refresh.last.measures, self._refresh.dev
        log.info(
            f"step {step}: swapped to index v{live.version} (weights of step {live.step}); recall "
            f"{measures.recall:.3f}, {measures.overlap:.0%} of the documents found stay, vectors moved by "
            f"{measures.drift:.4f}" + ("" if result is None else f"; development texts {result.bpb:.4f} bits per byte")
        )


def batch_to_state(batch: RetrievedBatch) -> dict[str, Any]:
    """Return a record as tensors and numbers, which a checkpoint loads without unpickling objects."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else int(value)
        for name, value in asdict(batch).items()
    }


def batch_from_state(state: dict[str, Any]) -> RetrievedBatch:
    values: dict[str, Any] = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return RetrievedBatch(**values)


class LabelledBatches:
    """Batches of labelled texts, with the order of texts that live batches have. Neither an index nor an LM is used.

    Development texts are measured before the first step and every `train.dev_every_steps`; not without a `watch`.
    """

    def __init__(
        self, config: Config, labels: Labels, data: PreparedSet, module: LSRModule, watch: Watch | None = None
    ):
        self._scores, self._module, self._watch = labels.scores("queries"), module, watch
        self._sampler = QuerySampler(len(data.queries), config.train.batch_size, config.seed)
        self._max_steps = config.train.max_steps
        self._every = config.train.dev_every_steps or math.ceil(len(data.queries) / config.train.batch_size)
        self.dev = LabelledDevTexts(config, labels, data) if watch is not None and labels.counts.get("dev") else None
        self.vectors_of = module.vectors_of  # those of live batches, too
        if isinstance(data.corpus, StoredCorpus):
            data.corpus.rows_of(
                {doc for split in labels.counts for row in labels.rows(split) for doc in row["doc_ids"]}
            )
        elif (documents := module.frozen_documents) is not None:
            rows = np.union1d(self._scores.retrieved.doc_rows, self.dev.rows if self.dev else [])
            module.vectors_of = vectors_once(partial(embedded, documents, data.corpus), rows)

    def start(self, state: dict[str, Any] | None) -> None:
        """Measure the development texts, unless the run is resumed."""
        if self._watch is not None and self._watch.first is None:
            self._measure(0)

    def advance(self, step: int) -> None:
        """Do nothing."""

    def take(self, step: int) -> ScoredBatch:
        """Return the batch of a step. Which texts it has follows from the step's number."""
        batch = self._scores.take(self._sampler.rows(step))
        return replace(batch, retrieved=replace(batch.retrieved, step=step, query_step=step))

    def end(self, step: int) -> dict[str, float]:
        """Measure the development texts if that is due."""
        done = step + 1
        if done % self._every == 0 or done == self._max_steps:
            self._measure(done)
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def versions_in_use(self) -> set[int]:
        return set()

    def prune(self, keep: set[int]) -> None:
        """Do nothing: there are no index versions."""

    def _measure(self, step: int) -> None:
        if self.dev is not None and self._watch is not None:
            result = self.dev.measure(step, self._module.encoder, self._module.vectors_of)
            self._watch.record(result, self._module.encoder.save)


def vectors_once(embed: Callable[[np.ndarray], torch.Tensor], rows: np.ndarray) -> Callable[[np.ndarray], torch.Tensor]:
    """Embed documents once, and return what gives the vectors [U, D] of some of these `rows` (ascending).

    The same rows give the same vectors, so a resumed training has them too.
    """
    progress, blocks = Progress("embedding candidates", len(rows)), []
    for start in range(0, len(rows), DOCUMENTS_PER_BLOCK):
        block = rows[start : start + DOCUMENTS_PER_BLOCK]
        blocks.append(embed(block))
        progress.advance(len(block))
    vectors = torch.cat(blocks)
    return lambda wanted: vectors[torch.from_numpy(np.searchsorted(rows, wanted))]


class LabelsThenLive:
    """Gives `num_label_steps` batches of labels, then live ones, from an index of the weights at that boundary.

    Only live batches are measured on development texts, so that all results can be compared.
    """

    def __init__(self, labelled: LabelledBatches, live: LiveBatches, num_label_steps: int, module: LSRModule) -> None:
        self._labelled, self._live, self._num_label_steps, self._module = labelled, live, num_label_steps, module
        self.start, self.state, self.end = live.start, live.state, live.end
        self.versions_in_use, self.prune = live.versions_in_use, live.prune

    def advance(self, step: int) -> None:
        """Do what the live source does, from the step on that it begins with."""
        if step < self._num_label_steps:
            return
        self._module.vectors_of = self._labelled.vectors_of  # not those of the labelled candidates alone
        if step == self._num_label_steps and self._module.frozen_documents is None:
            self._live.renew(step)
        self._live.advance(step)

    def take(self, step: int) -> ScoredBatch:
        return (self._labelled if step < self._num_label_steps else self._live).take(step)


@contextmanager
def live_batches(
    config: Config,
    data: PreparedSet,
    module: LSRModule,
    workers: Workers,
    watch: Watch,
    clock: StepClock,
    check: Callable[[], None],
) -> Iterator[LiveBatches]:
    """Make the live source. Its thread ends with the block, after an error with the searchers that Ray kills."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="retrieve", initializer=note_ray_thread)
    pipeline = BatchPipeline(
        QuerySampler(len(data.queries), config.train.batch_size, config.seed),
        data,
        encode=partial(module.encode_queries, autocast=uses_bf16(config.train.precision)),
        search=workers.index.search,
        executor=executor,
        k=config.retrieve.k,
        exclude_own_source=config.retrieve.exclude_own_source,
        score=workers.lm.submit_sums,
        template=workers.template,
        depth=config.train.pipeline_depth,
        max_steps=config.train.max_steps,
        clock=clock,
        check=check,
    )
    refresh = refresh_controller(config, module, data, workers, clock, pipeline.settle, check)
    try:
        yield LiveBatches(refresh, pipeline, workers, watch)
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def uses_bf16(precision: Precision) -> bool:
    """Return whether products are in bfloat16 on this hardware."""
    return precision is Precision.bf16_mixed or (precision is Precision.auto and multiplies_bfloat16())


def refresh_controller(
    config: Config,
    module: LSRModule,
    data: PreparedSet,
    workers: Workers,
    clock: StepClock,
    settle: Callable[[], None],
    check: Callable[[], None],
) -> RefreshController:
    dev = SearchedDevTexts(config, data, workers, check) if data.dev is not None else None

    def measure_index(index: IndexState, ready: "Future[Refreshed]") -> "Future[DevResult | None]":
        def result() -> DevResult | None:
            ready.result()
            return dev.measure_index(index) if dev is not None else None

        return in_background(result, "development")

    policy = refresh_policy(config.refresh, config.train.max_steps, config.retriever.train is not TrainedSide.query)
    publish = partial(publish_snapshot, config, module.encoder, data, workers.index.store)
    return RefreshController(workers.index, policy, publish, measure_index, clock, settle, check)


def measure_last(config: Config, data: PreparedSet, module: LSRModule, workers: Workers, watch: Watch) -> None:
    """Look at the development texts with the weights after the last step, in an index of their own."""
    step, version = config.train.max_steps, 0
    if data.dev is None or (watch.last is not None and watch.last.step == step):
        return
    if config.retriever.train is not TrainedSide.query:
        version = version_after(workers.index.store, step)
        build_version(config, module.encoder, data, workers.index, IndexState(version, step))
    dev = SearchedDevTexts(config, data, workers, lambda: None)
    watch.record(dev.measure(module.encoder, version, step), module.encoder.save)


def version_after(store: VersionStore, step: int) -> int:
    """Return the number of the index version for the weights after a step: the last one if it is theirs, or the next.

    It is never 0, which is the version of the retriever before training.
    """
    last = max(store.versions(), default=0)
    return last if last and store.can_be_built(last) and store.pending_plan(last).step == step else last + 1


class BatchChannel(pl.Callback):
    """Carries what `source` gives on rank 0 to all ranks; the others have no source.

    Over gloo: a broadcast that waits must not keep a GPU busy. Opened where the ranks have just met: rank 0 may then
    take hours to its first batch.
    """

    def __init__(self, source: Batches | None = None) -> None:
        self._source, self._group = source, None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the group, which all ranks do at once."""
        self._group = dist.new_group(backend="gloo", timeout=BATCH_PATIENCE)

    def take(self, step: int) -> ScoredBatch:
        messages = [self._source.take(step) if self._source is not None else None]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        assert messages[0] is not None
        return messages[0]
