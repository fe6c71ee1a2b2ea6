"""A training on labels: the online loop's module, optimizer, steps and checkpoints, fed by labels instead of an LM.

`fit_labels` neither starts Ray nor asks an LM, so several may run at a time, each in a process of its own with a run
directory of its own. It resumes exactly: batches follow from the step, the rest from the checkpoint.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger

from replug.cluster.interruption import Interruption
from replug.config.rules import FIT
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.files import read_json, write_json
from replug.data.labels import LabelledTexts, Labels
from replug.data.progress import Progress
from replug.data.records import RetrievedBatch, ScoredBatch
from replug.data.sampling import QuerySampler
from replug.data.store import PreparedSet
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.ensemble_temperature import EnsembleTemperature
from replug.models.hardware import available_cores
from replug.train.callbacks import OwnSettings
from replug.train.checkpoints import KEPT_CHECKPOINTS, Checkpointer, CheckpointWriter
from replug.train.fitting import forget_after, loss_settings, lsr_module
from replug.train.labels.dev import DevLook, DevTexts, DevWatch, embedded
from replug.train.module import LSRModule
from replug.train.ranks import RankEnvironment
from replug.train.run_dir import MEND, RunDirectory
from replug.train.step_metrics import StepClock
from replug.train.trained_weights import save_retriever
from replug.train.trainer import lightning_trainer, require_all_steps, run_trainer

log = logging.getLogger(__name__)


BLOCK = 1024  # documents between two lines of progress
NO_INDEX = -1


@dataclass(frozen=True, slots=True)
class LabelTraining:
    """What a training on labels learns from: a `BatchSource` of labelled texts, as many as the online loop takes.

    `lm` is the identity of the LM that labelled. `dev` is None where the labels have no development texts.
    """

    lm: str
    texts: LabelledTexts
    sampler: QuerySampler
    dev: DevTexts | None

    @staticmethod
    def of(config: Config, labels: Labels, data: PreparedSet) -> "LabelTraining":
        texts, dev = labels.texts("queries"), None
        if labels.has_dev:
            given = config.ensemble.temperature
            temperature = float(given) if isinstance(given, int | float) else None
            dev_texts, loss = labels.texts("dev"), loss_settings(config)
            dev = DevTexts(dev_texts, data.require_dev(), data.corpus, loss, config.evaluate.k, temperature)
        return LabelTraining(
            labels.origin.lm, texts, QuerySampler(len(texts), config.train.batch_size, config.seed), dev
        )

    @property
    def rows(self) -> np.ndarray:
        """The corpus' rows of all candidates, each once, ascending."""
        return np.union1d(self.texts.doc_rows, self.dev.rows if self.dev else [])

    def take(self, step: int) -> ScoredBatch:
        """Return the batch of a step. Which texts it has follows from the step's number.

        The documents' similarities are those to the retriever as it was when the texts were labelled.
        """
        rows, texts = self.sampler.rows(step), self.texts
        found = RetrievedBatch(step, step, NO_INDEX, 0, rows, texts.doc_rows[rows], texts.similarities[rows])
        return ScoredBatch(found, texts.sum_logprobs[rows], texts.num_tokens[rows])


@dataclass(frozen=True, slots=True)
class Fitted:
    """A training on labels that has ended: after which step, and the first and the best look at development texts."""

    step: int
    first: DevLook | None
    best: DevLook | None

    @staticmethod
    def read(path: Path) -> "Fitted":
        row = read_json(path, MEND)
        looks = (DevLook(**row[name]) if row[name] else None for name in ("first", "best"))
        return Fitted(row["step"], *looks)

    def describe(self) -> str:
        """Say which weights the tuned retriever has."""
        if self.best is None:
            return f"step {self.step}, the last"
        return f"step {self.best.step}, the best of {self.step} on development texts"


def label_steps(config: Config, num_texts: int) -> Config:
    """Return the configuration with `train.max_steps` for its epochs.

    The last step's batch may begin another pass.
    """
    if config.train.epochs is None:
        return config
    steps = math.ceil(config.train.epochs * num_texts / config.train.batch_size)
    return replace(config, train=replace(config.train, max_steps=steps))


def label_module(config: Config, encoder: Encoder, data: PreparedSet, training: LabelTraining) -> LSRModule:
    """Return the online loop's module, on the labels' batches.

    Documents that stay as they are are embedded here, once. The same rows give the same vectors, so a resumed training
    has them too.
    """
    module = lsr_module(config, encoder, data)
    module.attach(training)
    if (documents := module.frozen_documents) is None:
        return module
    known = training.rows
    progress, blocks = Progress("embedding candidates", len(known)), []
    for start in range(0, len(known), BLOCK):
        block = known[start : start + BLOCK]
        blocks.append(embedded(documents, data.corpus, block))
        progress.advance(len(block))
    vectors = torch.cat(blocks)
    module.look_documents_up(lambda rows: vectors[torch.from_numpy(np.searchsorted(known, rows))])
    return module


def fit_labels(
    config: Config,
    run: RunDirectory,
    module: LSRModule,
    training: LabelTraining,
    loggers: list[Logger],
    interruption: Interruption,
) -> Fitted:
    """Train from the newest whole checkpoint on; the tuned retriever is in `run.retriever` then."""
    if run.fitted.is_file():
        return Fitted.read(run.fitted)
    newest, clock, train = run.newest_checkpoint(with_index=False), StepClock(), config.train
    watch, dev = None, training.dev
    if dev is not None:
        every = train.dev_every_steps or math.ceil(len(training.texts) / train.batch_size)

        def look(step: int) -> DevLook:
            return dev.look(step, module.encoder, module.vectors_of)

        watch = DevWatch(look, run, every, train.patience)
    with CheckpointWriter(run, KEPT_CHECKPOINTS, newest.step if newest else 0) as writer:
        callbacks = [  # in the order they act
            OwnSettings(interruption.install, available_cores()),
            LabelBoundary(train.max_steps, clock, interruption.check),
            *([watch] if watch is not None else []),
            Checkpointer(writer, set, lambda keep: None, config.checkpoint.every_steps, clock),
        ]
        trainer = lightning_trainer(config, run.path, callbacks, loggers, RankEnvironment(0, 1, "", 0))
        forget_after(run, newest)
        with interruption.deferred(lambda: f"step {writer.newest_step} is the newest that is saved"):
            run_trainer(trainer, config, module, newest.path if newest else None)
            if watch is None or not watch.is_over:
                require_all_steps(trainer, config)
            else:
                best = watch.best.step if watch.best else 0
                ended = f"step {trainer.global_step}: ended, since no look at the development texts was better than"
                log.info(f"{ended} step {best}'s")
            interruption.check()
    fitted = Fitted(trainer.global_step, watch.first if watch else None, watch.best if watch else None)
    _save_tuned(config, run, module, training, fitted)
    write_json(run.fitted, asdict(fitted))
    return fitted


def _save_tuned(config: Config, run: RunDirectory, module: LSRModule, training: LabelTraining, fitted: Fitted) -> None:
    """Save the best weights by development texts, the last ones where there are none; of a pair, both encoders."""
    if run.dev_best.is_dir():
        tuned = load_encoder(config.retriever, run.dev_best, config.index.dims)
    else:
        tuned = module.encoder.cpu().eval()
    dev = training.dev
    if config.ensemble.temperature == FIT and fitted.best is not None and dev is not None:
        tuned.temperature = EnsembleTemperature(fitted.best.temperature, training.lm, dev.k, dev.num_texts)
    save_retriever(run.retriever, tuned, config.retriever.train, module.frozen_documents, run.dev_best)


class LabelBoundary(pl.Callback):
    """Before a step: `check`, which raises what is to end the run. After it: its time, and a line of progress."""

    def __init__(self, max_steps: int, clock: StepClock, check: Callable[[], None]) -> None:
        self._max_steps, self._clock, self._check = max_steps, clock, check
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress = Progress("training on labels", self._max_steps, done=trainer.global_step)
        self._clock.start()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Position, batch_idx: int
    ) -> None:
        if batch.is_first:
            self._check()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        assert self._progress is not None
        seconds = self._clock.read()
        pl_module.log_dict({f"time/{name}_seconds": seconds[f"time/{name}_seconds"] for name in ("step", "checkpoint")})
        self._progress.advance(note=f"loss {trainer.callback_metrics['train/loss']:.4f}")
