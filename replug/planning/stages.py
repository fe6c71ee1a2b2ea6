"""List the stages of a run: what each does, the pairs that the LM scores in it, and its seconds. Pure.

`replug plan` multiplies by the speed of a machine or of GPUs, a run by what it measured when it began. The arithmetic
of live steps is that of `pace`.
"""

import math
from dataclasses import dataclass, replace

from replug.config.choices import TrainedSide
from replug.config.paths import names_store
from replug.config.rules import FIT, OWN_LABELS, is_live
from replug.config.schema import Config
from replug.planning.accelerators import ACCELERATORS, Devices
from replug.planning.memory import trained_part
from replug.planning.model_sizes import ModelSize, lm_size
from replug.planning.pace import Job, Seconds, Split, estimate
from replug.planning.workload import IndexSize, shape_of, work_of

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
    """A stage of a run. The LM scores `pairs` at most; `seconds` are None where they follow from an unknown LM."""

    name: str
    work: str
    pairs: int
    seconds: float | None


def on_processors(num_cores: int) -> Split:
    """Return how the roles share a machine without GPUs."""
    return SIDE_BY_SIDE if num_cores > 1 else TAKING_TURNS


def run_stages(
    config: Config, counts: Counts, retriever: ModelSize, speeds: Speeds, split: Split = TAKING_TURNS
) -> list[Stage]:
    """Return the stages in order."""
    job = _job(config, counts, retriever)
    pair, work, shape = math.nan if speeds.pair is None else speeds.pair, job.work, job.shape
    encoder = speeds.trained / work.document  # seconds of a FLOP

    def stage(name: str, text: str, seconds: float, pairs: int = 0) -> Stage:
        seconds += pairs * pair if pairs else 0.0
        return Stage(name, text, pairs, None if math.isnan(seconds) else seconds)

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
    text = (
        "ask the store of the documents" if names_store(config.data.corpus) else f"embed {counts.documents:,} documents"
    )
    index = stage(INDEX, text, wall["first_index"])
    labels = [stage(*parts) for parts in _label_stages(config, counts, job, encoder)] if config.train.labels else []
    measuring = [stage(*parts) for parts in _measuring(config, counts, job, wall["last_index"])]
    if is_live(config):
        development = shape.num_dev * shape.heldout_k * (shape.refresh.num_starts + 2)
        text, live = f"{config.train.max_steps:,} steps of {config.train.batch_size} texts", shape.steps * shape.pairs
        training = stage(TRAINING, text, wall["training"], development)
        return [index, *labels[:-1], replace(training, pairs=live + development), *measuring]
    if config.train.labels == OWN_LABELS:
        return [index, *labels, *measuring]
    return [*labels, *([index] if measuring else []), *measuring]


def _label_stages(config: Config, counts: Counts, job: Job, encoder: float) -> list[tuple[str, str, float, int]]:
    """Return name, work, the encoder's seconds and pairs of the run's own labels, and of the training on labels.

    A document that two searches find is scored once. With each development text the LM also scores it alone.
    """
    label, train, texts = config.label, config.train, counts.queries + counts.dev
    num_candidates = label.dense + label.bm25 + label.random
    steps = math.ceil(train.epochs * counts.queries / train.batch_size) if train.epochs else train.max_steps
    if _trains_documents(config):
        once, shape = 0.0, replace(job.shape, k=num_candidates)
    else:  # candidates are embedded once, and a step encodes queries alone
        once = min(texts * num_candidates, counts.documents) * job.work.document
        shape = replace(job.shape, k=0)
    step = work_of(shape, job.retriever, job.lm, flop_factor=job.trained.flop_factor).train_step
    passes = f"{train.epochs:g} epochs" if train.epochs else f"{train.max_steps:,} steps"
    training = (TRAINING, f"{passes} of {counts.queries:,} texts", encoder * (once + steps * step), 0)
    if train.labels != OWN_LABELS:
        return [training]
    work = f"the LM scores {num_candidates} candidates of each text"
    return [(LABELS, work, 0.0, texts * num_candidates + counts.dev), training]


def _measuring(config: Config, counts: Counts, job: Job, last_index: float) -> list[tuple[str, str, float, int]]:
    """Return the stages after training: each held-out text alone, and with the documents found before and after."""
    if not config.evaluate.heldout:
        return []
    k, trains_documents = job.shape.heldout_k, _trains_documents(config)
    fitting = 0
    if config.ensemble.temperature == FIT:  # once before and once after; labels hold the nearest documents already
        known = min(k, config.label.dense) if config.train.labels == OWN_LABELS else 0
        fitting = counts.dev * (2 * k - known)
    work = "embed the documents anew" if trains_documents else "find documents for the held-out texts"
    return [
        (TUNED, work, last_index if trains_documents else 0.0, fitting),
        (HELDOUT, "compare with and without tuning", 0.0, job.shape.heldout * (1 + 2 * k)),
    ]


def _trains_documents(config: Config) -> bool:
    return config.retriever.train is not TrainedSide.query


def _job(config: Config, counts: Counts, retriever: ModelSize) -> Job:
    """Return the job with the numbers of texts that the prepared set has. Searches and the LM's size cost nothing."""
    most = config.evaluate.max_examples
    shape = replace(
        shape_of(config, counts.documents),
        num_queries=counts.queries,
        num_dev=counts.dev,
        heldout=counts.heldout if most is None else min(most, counts.heldout),
    )
    trained, lm = trained_part(config, retriever), lm_size("", ANY_LM)
    work = work_of(shape, retriever, lm, flop_factor=trained.flop_factor)
    return Job(config, shape, retriever, trained, lm, IndexSize(0.0, 1.0, is_exact=True), work)
