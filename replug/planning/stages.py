"""List the stages of a run: what each does, and the most of each kind of work that it takes. Pure.

`replug plan` multiplies by the speed of a machine or of GPUs. The arithmetic of live steps is that of `pace`.
"""

import math
from dataclasses import dataclass, replace

from replug.config.choices import TrainedSide
from replug.config.paths import names_store
from replug.config.rules import FIT, OWN_LABELS, is_live
from replug.config.schema import Config
from replug.models.ensemble import can_fit
from replug.planning.accelerators import ACCELERATORS, Devices
from replug.planning.memory import trained_part
from replug.planning.model_sizes import ModelSize, lm_size
from replug.planning.pace import Job, Seconds, Split, estimate
from replug.planning.workload import IndexSize, Shape, shape_of, work_of

INDEX, LABELS, TRAINING, TUNED, HELDOUT = "index", "labels", "training", "tuned retriever's search", "held-out texts"
ANY_LM = 1e8  # parameters; the seconds of a pair are given
TAKING_TURNS = Split(1, 1, 1, ("score", "embed", "train"))
# Two cores or more: beside a trainer the LM scored 1,280 pairs in 202 s, and in 183 s by its speed alone.
SIDE_BY_SIDE = Split(1, 1, 1, ("embed", "train"))


@dataclass(frozen=True, slots=True)
class Counts:
    """The documents and texts of a prepared set."""

    documents: int
    queries: int
    dev: int
    heldout: int


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of a pair on all scorers together (None: not known), and of a document that one encoder reads.

    `document` is in the precision of the index, `trained` in that of the trainer, forward.
    """

    pair: float | None
    document: float
    trained: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run: what it does, and the most of each kind of work that it takes.

    The LM scores `pairs`, builders embed `documents`, and a training on labels takes `steps`. `seconds` are None where
    nothing tells them.
    """

    name: str
    work: str
    pairs: int = 0
    documents: int = 0
    steps: int = 0
    seconds: float | None = None


def on_processors(num_cores: int) -> Split:
    """Return how the roles share a machine without GPUs."""
    return SIDE_BY_SIDE if num_cores > 1 else TAKING_TURNS


def run_stages(config: Config, counts: Counts) -> list[Stage]:
    """Return the stages in order, without their seconds."""
    has_store = names_store(config.data.corpus)
    text = "ask the store of the documents" if has_store else f"embed {counts.documents:,} documents"
    index = Stage(INDEX, text, documents=0 if has_store else counts.documents)
    labels, measuring = _label_stages(config, counts), _measuring(config, counts)
    if is_live(config):
        shape = _shape(config, counts)
        pairs = shape.steps * shape.pairs + _development_pairs(shape)
        text = f"{config.train.max_steps:,} steps of {config.train.batch_size} texts"
        return [index, *labels[:-1], Stage(TRAINING, text, pairs), *measuring]
    if config.train.labels == OWN_LABELS:
        return [index, *labels, *measuring]
    return [*labels, *([index] if measuring else []), *measuring]


def timed_stages(
    config: Config, counts: Counts, retriever: ModelSize, speeds: Speeds, split: Split = TAKING_TURNS
) -> list[Stage]:
    """Return the stages with their seconds by these speeds."""
    job = _job(config, counts, retriever)
    pair, work, shape = math.nan if speeds.pair is None else speeds.pair, job.work, job.shape
    encoder = speeds.trained / work.document  # seconds of a FLOP
    seconds = Seconds(
        pair=pair,
        score=shape.pairs * pair,
        units=shape.pairs,
        build=shape.num_documents * speeds.document,
        train=work.train_step * encoder,
        encode=work.encode_batch * encoder,
        search=0.0,
    )
    devices = Devices(ACCELERATORS["A100"], split.score + split.embed + split.train, 1)
    wall = {name: 3600 * hours for name, hours in estimate(job, devices, split, seconds).stages.items()}

    def timed(stage: Stage) -> Stage:
        alone = {INDEX: wall["first_index"], TUNED: wall["last_index"] if stage.documents else 0.0}.get(stage.name, 0.0)
        pairs = stage.pairs
        if stage.name == TRAINING and is_live(config):
            alone, pairs = wall["training"], _development_pairs(shape)
        elif stage.name == TRAINING:
            alone = encoder * _labelled_flop(config, counts, job)
        total = alone + (pairs * pair if pairs else 0.0)
        return replace(stage, seconds=None if math.isnan(total) else total)

    return [timed(stage) for stage in run_stages(config, counts)]


def _development_pairs(shape: Shape) -> int:
    return shape.num_dev * shape.heldout_k * (shape.refresh.num_starts + 2)


def _num_candidates(config: Config) -> int:
    return config.label.dense + config.label.bm25 + config.label.random


def _label_steps(config: Config, counts: Counts) -> int:
    train = config.train
    return math.ceil(train.epochs * counts.queries / train.batch_size) if train.epochs else train.max_steps


def _label_stages(config: Config, counts: Counts) -> list[Stage]:
    """Return the stages of the run's own labels and of the training on labels.

    A document that two searches find is scored once. With each development text the LM also scores it alone.
    """
    train, texts = config.train, counts.queries + counts.dev
    if not train.labels:
        return []
    passes = f"{train.epochs:g} epochs" if train.epochs else f"{train.max_steps:,} steps"
    training = Stage(TRAINING, f"{passes} of {counts.queries:,} texts", steps=_label_steps(config, counts))
    if train.labels != OWN_LABELS:
        return [training]
    num_candidates = _num_candidates(config)
    work = f"the LM scores {num_candidates} candidates of each text"
    return [Stage(LABELS, work, texts * num_candidates + counts.dev), training]


def _labelled_flop(config: Config, counts: Counts, job: Job) -> float:
    """Return the FLOP of a training on labels."""
    num_candidates = _num_candidates(config)
    if _trains_documents(config):
        once, shape = 0.0, replace(job.shape, k=num_candidates)
    else:  # candidates are embedded once, and a step encodes queries alone
        once = min((counts.queries + counts.dev) * num_candidates, counts.documents) * job.work.document
        shape = replace(job.shape, k=0)
    step = work_of(shape, job.retriever, job.lm, flop_factor=job.trained.flop_factor).train_step
    return once + _label_steps(config, counts) * step


def _measuring(config: Config, counts: Counts) -> list[Stage]:
    """Return the stages after training: each held-out text alone, and with the documents found before and after."""
    if not config.evaluate.heldout:
        return []
    k, trains_documents = config.evaluate.k, _trains_documents(config)
    fitting = 0
    if config.ensemble.temperature == FIT and can_fit(counts.dev):
        # Once before and once after; labels hold the nearest documents already.
        known = min(k, config.label.dense) if config.train.labels == OWN_LABELS else 0
        fitting = counts.dev * (2 * k - known)
    work = "embed the documents anew" if trains_documents else "find documents for the held-out texts"
    pairs = _shape(config, counts).heldout * (1 + 2 * k)
    return [
        Stage(TUNED, work, fitting, counts.documents if trains_documents else 0),
        Stage(HELDOUT, "compare with and without tuning", pairs),
    ]


def _trains_documents(config: Config) -> bool:
    return config.retriever.train is not TrainedSide.query


def _shape(config: Config, counts: Counts) -> Shape:
    """Return the shape of the run with the numbers of texts that the prepared set has."""
    most = config.evaluate.max_examples
    return replace(
        shape_of(config, counts.documents),
        num_queries=counts.queries,
        num_dev=counts.dev,
        heldout=counts.heldout if most is None else min(most, counts.heldout),
    )


def _job(config: Config, counts: Counts, retriever: ModelSize) -> Job:
    """Return the job. Searches and the LM's size cost nothing."""
    shape, trained, lm = _shape(config, counts), trained_part(config, retriever), lm_size("", ANY_LM)
    work = work_of(shape, retriever, lm, flop_factor=trained.flop_factor)
    return Job(config, shape, retriever, trained, lm, IndexSize(0.0, 1.0, is_exact=True), work)
