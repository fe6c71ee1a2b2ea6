"""Sources of batches: the live retriever and LM, or labels that were scored once.

On several ranks rank 0 alone has a source. `fitting.BatchChannel` sends each scored batch to the others, so all ranks
train on the same documents of the same index version. Each rank takes its own share of the batch.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from replug.cluster.background import in_background, note_ray_thread
from replug.config.choices import Precision, TrainedSide
from replug.config.refresh_policy import refresh_policy
from replug.config.schema import Config
from replug.data.labels import Labels
from replug.data.records import NO_INDEX, RetrievedBatch, ScoredBatch
from replug.data.sampling import QuerySampler
from replug.data.store import PreparedSet, StoredCorpus
from replug.index_workers.build import build_version, publish_snapshot
from replug.index_workers.build_plan import IndexState
from replug.index_workers.service import Refreshed
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from replug.models.hardware import multiplies_bfloat16
from replug.train.development import Chooser, DevResult, SearchedDevTexts, Watch
from replug.train.pipeline import BatchPipeline
from replug.train.questions import TrainingQuestions
from replug.train.refresh import RefreshController
from replug.train.step_metrics import StepClock
from replug.train.trained_weights import FrozenDocuments
from replug.train.workers import Workers

log = logging.getLogger(__name__)


class BatchSource:
    """Gives rank 0 its batches, and lets a `chooser` measure the weights.

    A training calls `start` once, and for each step `advance` at the boundary before it, `take`, and `end`. By default
    a source adds nothing to a checkpoint, and needs no index version.
    """

    def __init__(self, chooser: Chooser | None = None) -> None:
        self._chooser = chooser

    def start(self, state: dict[str, Any] | None) -> None:
        """Prepare the first step, or resume from the state in a checkpoint."""
        if self._chooser is not None:
            self._chooser.start()

    def advance(self, step: int) -> None:
        """Prepare a step, at the boundary before it."""

    def take(self, step: int) -> ScoredBatch:
        """Return the whole batch of a step."""
        raise NotImplementedError

    def end(self, step: int) -> dict[str, float]:
        """Return the metrics of a step that has ended."""
        if self._chooser is not None:
            self._chooser.end(step)
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def versions_in_use(self) -> set[int]:
        """Return the index versions that a checkpoint needs."""
        return set()

    def prune(self, keep: set[int]) -> None:
        """Remove index versions from disk, except these."""

    def finish(self, step: int) -> None:
        """Complete the source after the last step, which may come before `train.max_steps`."""
        if self._chooser is not None:
            self._chooser.finish(step)


class LabelledBatches(BatchSource):
    """Batches of labelled texts, in the order of live batches, without an index or an LM."""

    def __init__(
        self,
        config: Config,
        labels: Labels,
        data: PreparedSet,
        frozen: FrozenDocuments | None = None,
        chooser: Chooser | None = None,
    ) -> None:
        super().__init__(chooser)
        self._scores = labels.scores("queries")
        self._sampler = QuerySampler(len(data.queries), config.train.batch_size, config.seed)
        if isinstance(data.corpus, StoredCorpus):
            data.corpus.rows_of(
                {doc for split in labels.counts for row in labels.rows(split) for doc in row["doc_ids"]}
            )
        if frozen is not None:
            measured = chooser.rows if chooser else np.array([], np.int64)
            frozen.remember(np.union1d(self._scores.retrieved.doc_rows, measured))

    def take(self, step: int) -> ScoredBatch:
        """Return the batch of a step; its texts follow from the step's number."""
        batch = self._scores.take(self._sampler.rows(step))
        return replace(batch, retrieved=replace(batch.retrieved, step=step, query_step=step))


class QuestionBatches(BatchSource):
    """Batches of questions, each with its document, without an index or an LM.

    The contrastive loss has the batch's other documents as negatives.
    """

    def __init__(self, config: Config, questions: TrainingQuestions, chooser: Chooser) -> None:
        super().__init__(chooser)
        self._questions = questions
        self._sampler = QuerySampler(len(questions), config.train.batch_size, config.seed)

    def take(self, step: int) -> ScoredBatch:
        """Return the batch of a step; its questions follow from the step's number."""
        rows = self._sampler.rows(step)
        doc_rows = self._questions.doc_rows[rows]
        batch = RetrievedBatch(step, step, NO_INDEX, 0, rows, doc_rows, np.zeros(doc_rows.shape, np.float32))
        return ScoredBatch(batch, np.zeros(doc_rows.shape), np.ones(len(rows)))


class LiveBatches(BatchSource):
    """Batches retrieved from a refreshed index, and scored by the LM ahead of their steps.

    The first `train.label_steps` come from `labelled`. At that boundary the corpus is embedded with the current
    weights, and only later steps are measured on development texts, so that all results are comparable; a `chooser`
    replaces these measurements. A context manager: its thread ends with the block; after an error it ends when Ray
    kills the searchers.
    """

    def __init__(
        self,
        config: Config,
        data: PreparedSet,
        encoder: Encoder,
        workers: Workers,
        watch: Watch,
        clock: StepClock,
        check: Callable[[], None],
        frozen: FrozenDocuments | None = None,
        labelled: LabelledBatches | None = None,
        chooser: Chooser | None = None,
    ) -> None:
        """Build the pipeline and the refresh; `check` raises the error that ends the run."""
        super().__init__(chooser)
        self._config, self._data, self._encoder, self._workers, self._watch = config, data, encoder, workers, watch
        self._frozen, self._labelled = frozen, labelled
        self._label_steps = (config.train.label_steps or 0) if labelled else 0
        measures_texts = data.dev is not None and chooser is None
        self._dev = SearchedDevTexts(config, data, workers, check) if measures_texts else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="retrieve", initializer=note_ray_thread)
        self._pipeline = BatchPipeline(
            QuerySampler(len(data.queries), config.train.batch_size, config.seed),
            data,
            config.retrieve,
            config.train,
            encode=self._encode,
            search=workers.index.search,
            executor=self._executor,
            score=partial(workers.lm.submit_examples, workers.template),
            clock=clock,
            check=check,
        )
        self._refresh = RefreshController(
            workers.index,
            refresh_policy(config.refresh, config.train.max_steps, config.retriever.train is not TrainedSide.query),
            partial(publish_snapshot, config, encoder, data, workers.index.store),
            self._measure_index,
            clock,
            self._pipeline.settle,
            check,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._executor.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def start(self, state: dict[str, Any] | None) -> None:
        """Serve version 0, or the version of a checkpoint. Takes minutes, while other ranks wait for a batch."""
        if state is None:
            self._refresh.start()
        else:
            self._refresh.restore(state["refresh"])
            self._pipeline.restore([batch_from_state(batch) for batch in state["batches"]])
        super().start(state)
        self._record()

    def advance(self, step: int) -> None:
        """Swap or start a refresh, then fill the pipeline. Steps on labels need neither."""
        if step < self._label_steps:
            return
        if self._frozen is not None:
            self._frozen.forget()  # only labelled candidates are remembered
        elif step == self._label_steps > 0:
            self._refresh.renew(step)
            self._adopted(step)
        if self._refresh.at_boundary(step):
            self._adopted(step)
        self._pipeline.advance(step, self._refresh.live)

    def take(self, step: int) -> ScoredBatch:
        """Return the scored batch of a step, waiting for the LM if it is late."""
        if self._labelled is not None and step < self._label_steps:
            return self._labelled.take(step)
        return self._pipeline.take(step)

    def end(self, step: int) -> dict[str, float]:
        """Return metrics of the live index, of its refreshes and of the LM.

        Logged at every step: Lightning would repeat a value that is logged now and then.
        """
        super().end(step)
        refresh, last = self._refresh, self._refresh.last
        lm = {"truncated": float(self._workers.template.num_truncated), **self._workers.lm.metrics()}
        return {
            "index/live_version": float(refresh.live.version),
            "index/live_step": float(refresh.live.step),
            "index/swapped": float(step > 0 and refresh.adopted_step == step),
            "index/refresh_under_way": float(refresh.is_under_way),
            "index/recall": last.recall,
            "index/overlap": last.overlap,
            "index/swap_build_seconds": last.build_seconds,
            "index/swap_wait_seconds": refresh.swap_wait_seconds,
            "index/swap_ms": refresh.swap_ms,
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

    def finish(self, step: int) -> None:
        """Wait until no version is being built; measure the weights after the last step in a separate index."""
        self._refresh.finish()
        super().finish(step)
        config, version = self._config, 0
        if self._dev is None or self._watch.has(step):
            return
        index = self._workers.index
        if config.retriever.train is not TrainedSide.query:
            version = version_after(index.store, step)
            build_version(config, self._encoder, self._data, index, IndexState(version, step))
        self._watch.record(self._dev.measure(self._encoder, version, step), self._encoder.save)

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return vectors [B, D] by the current weights, without gradient or dropout."""
        self._encoder.eval()
        return self._encoder.encode_query(texts, autocast=uses_bf16(self._config.train.precision)).numpy()

    def _measure_index(self, index: IndexState, ready: "Future[Refreshed]") -> "Future[DevResult | None]":
        def measure() -> DevResult | None:
            ready.result()
            return self._dev.measure_index(index) if self._dev is not None else None

        return in_background(measure, "development")

    def _adopted(self, step: int) -> None:
        self._record()
        live, last, result = self._refresh.live, self._refresh.last, self._refresh.dev
        log.info(
            f"step {step}: swapped to index v{live.version} (weights of step {live.step}); recall "
            f"{last.recall:.3f}, {last.overlap:.0%} of the retrieved documents stay"
            + ("" if result is None else f"; development texts {result.bpb:.4f} bits per byte")
        )

    def _record(self) -> None:
        result, store = self._refresh.dev, self._workers.index.store
        if result is not None:
            self._watch.record(result, partial(shutil.copytree, store.encoder_folder(self._refresh.live.version)))


def batch_to_state(batch: RetrievedBatch) -> dict[str, Any]:
    """Return a record as tensors and numbers, which a checkpoint loads without unpickling objects."""
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else int(value)
        for name, value in asdict(batch).items()
    }


def batch_from_state(state: dict[str, Any]) -> RetrievedBatch:
    values: dict[str, Any] = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return RetrievedBatch(**values)


def uses_bf16(precision: Precision) -> bool:
    """Return whether products are in bfloat16 on this hardware."""
    return precision is Precision.bf16_mixed or (precision is Precision.auto and multiplies_bfloat16())


def version_after(store: VersionStore, step: int) -> int:
    """Return the number of the index version for the weights after a step: the last one if it is theirs, or the next.

    It is never 0, which is the version of the retriever before training.
    """
    last = max(store.versions(), default=0)
    return last if last and store.can_be_built(last) and store.pending_plan(last).step == step else last + 1
