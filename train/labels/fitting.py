"""A training on labels: the online loop's module, optimizer, steps and checkpoints, fed by labels instead of an LM.

`fit_labels` neither starts Ray nor asks an LM, so several may run at a time, each in a process of its own with a run
directory of its own. It resumes exactly: batches follow from the step, the rest from the checkpoint.
"""

import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger

from replug.cluster.interruption import Interruption
from replug.config.rules import FIT
from replug.config.schema import Config
from replug.data.files import read_json, write_json
from replug.data.labels import LabelledTexts, Labels
from replug.data.sampler import QuerySampler
from replug.data.store import PreparedSet
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.ensemble_temperature import EnsembleTemperature
from replug.train.callbacks import Checkpointer, OwnSettings
from replug.train.checkpoints import CheckpointWriter
from replug.train.fitting import forget_after, loss_settings, lsr_module
from replug.train.labels.batches import LabelledBatches
from replug.train.labels.callbacks import DevWatch, LabelBoundary, LookRules
from replug.train.labels.dev import DevLook, DevTexts, Mixed
from replug.train.labels.dev_best import DevBest
from replug.train.labels.document_vectors import candidate_vectors
from replug.train.module import LSRModule
from replug.train.ranks import RankEnvironment
from replug.train.retriever_files import save_retriever
from replug.train.run_dir import MEND, RunDirectory
from replug.train.step_clock import StepClock
from replug.train.trainer import lightning_trainer, require_all_steps, run_trainer, trainer_threads

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LabelTraining:
    """What a training on labels is made of. `dev` is None where the labels have no development texts.

    `lm` is the identity of the LM that labelled.
    """

    lm: str
    texts: LabelledTexts
    batches: LabelledBatches
    dev: DevTexts | None

    @property
    def rows(self) -> np.ndarray:
        """The corpus' rows of all candidates, each once, ascending."""
        return np.union1d(self.texts.doc_rows, self.dev.rows if self.dev else [])

    @staticmethod
    def of(config: Config, labels: Labels, data: PreparedSet) -> "LabelTraining":
        texts = labels.texts("queries")
        sampler = QuerySampler(len(texts), config.train.batch_size, config.seed)
        return LabelTraining(labels.origin.lm, texts, LabelledBatches(texts, sampler), _dev(config, labels, data))


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
        """Which weights the tuned retriever has."""
        if self.best is None:
            return f"step {self.step}, the last"
        return f"step {self.best.step}, the best of {self.step} on development texts"


class NoIndex:
    """A training on labels uses no index."""

    def versions_in_use(self) -> set[int]:
        return set()


def label_steps(config: Config, num_texts: int) -> Config:
    """The configuration with `train.max_steps` for its epochs; the last step's batch may begin another pass."""
    if config.train.epochs is None:
        return config
    steps = math.ceil(config.train.epochs * num_texts / config.train.batch_size)
    return replace(config, train=replace(config.train, max_steps=steps))


def _dev(config: Config, labels: Labels, data: PreparedSet) -> DevTexts | None:
    if not labels.has_dev:
        return None
    given = config.ensemble.temperature
    mixed = Mixed(config.evaluate.k, float(given) if isinstance(given, int | float) else None)
    return DevTexts(labels.texts("dev"), data.require_dev(), data.corpus, loss_settings(config), mixed)


def label_module(config: Config, encoder: Encoder, data: PreparedSet, training: LabelTraining) -> LSRModule:
    """The online loop's, on the labels' batches. Documents that stay as they are are embedded here, once."""
    module = lsr_module(config, encoder, data)
    module.attach(training.batches)
    if module.frozen_documents is not None:
        module.look_documents_up(candidate_vectors(module.frozen_documents, data.corpus, training.rows).of)
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
    newest = run.newest_checkpoint(with_index=False)
    with CheckpointWriter(run, config.checkpoint.keep_last, newest.step if newest else 0) as writer:
        watch = _watch(config, run, module, training)
        callbacks = _callbacks(config, writer, watch, interruption)
        trainer = lightning_trainer(config, run.path, callbacks, loggers, RankEnvironment(0, 1, "", 0))
        forget_after(run, newest)
        with interruption.deferred(lambda: f"step {writer.newest_step} is the newest that is saved"):
            run_trainer(trainer, config, module, newest.path if newest else None)
            _require_end(trainer, config, watch)
            interruption.check()
    fitted = Fitted(trainer.global_step, watch.first if watch else None, watch.best if watch else None)
    _save_tuned(config, run, module, _fitted_temperature(config, training, fitted))
    write_json(run.fitted, asdict(fitted))
    return fitted


def _fitted_temperature(config: Config, training: LabelTraining, fitted: Fitted) -> EnsembleTemperature | None:
    """Of the best look; None where none is asked for."""
    if config.ensemble.temperature != FIT or fitted.best is None or training.dev is None:
        return None
    return EnsembleTemperature(fitted.best.temperature, training.lm, training.dev.k, training.dev.num_texts)


def _save_tuned(config: Config, run: RunDirectory, module: LSRModule, temperature: EnsembleTemperature | None) -> None:
    """The best weights by development texts, the last ones where there are none; of a pair, both encoders."""
    if run.dev_best.is_dir():
        tuned = load_encoder(config.retriever, run.dev_best, config.index.dims)
    else:
        tuned = module.encoder.cpu().eval()
    tuned.temperature = temperature or tuned.temperature
    save_retriever(run.retriever, tuned, config.retriever.train, module.frozen_documents, run.dev_best)


def _watch(config: Config, run: RunDirectory, module: LSRModule, training: LabelTraining) -> DevWatch | None:
    if training.dev is None:
        return None
    train, dev = config.train, training.dev
    every = train.dev_every_steps or math.ceil(len(training.texts) / train.batch_size)
    rules = LookRules(every, train.dev_measure.value, train.patience)
    return DevWatch(lambda step: dev.look(step, module.encoder, module.vectors_of), DevBest(run).keep, rules)


def _callbacks(
    config: Config, writer: CheckpointWriter, watch: DevWatch | None, interruption: Interruption
) -> list[pl.Callback]:
    """In the order they act."""
    clock = StepClock()
    return [
        OwnSettings(interruption.install, trainer_threads(config)),
        LabelBoundary(config.train.max_steps, clock, interruption.check),
        *([watch] if watch is not None else []),
        Checkpointer(writer, NoIndex(), lambda keep: None, config.checkpoint.every_steps, clock),
    ]


def _require_end(trainer: pl.Trainer, config: Config, watch: DevWatch | None) -> None:
    """Raise RunError where Lightning took the training for done before its end."""
    if watch is None or not watch.is_over:
        require_all_steps(trainer, config)
        return
    best = watch.best.step if watch.best else 0
    log.info(f"step {trainer.global_step}: ended, since no look at the development texts was better than step {best}'s")
