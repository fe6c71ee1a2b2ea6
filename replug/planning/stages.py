"""List the stages of a run with their seconds, at speeds that were measured on the machine at hand. Pure.

The arithmetic is that of `pace`; measured seconds of a pair and of a document stand in for the rates of a type of GPU.
"""

import math
from dataclasses import asdict, dataclass, replace

from replug.config.choices import TrainedSide
from replug.config.rules import FIT, OWN_LABELS, is_live
from replug.config.schema import Config
from replug.planning.accelerators import ACCELERATORS, Devices
from replug.planning.labelled import lm_calls
from replug.planning.memory import trained_part
from replug.planning.model_sizes import ModelSize, lm_size
from replug.planning.pace import Job, Seconds, Split, estimate
from replug.planning.workload import IndexSize, shape_of, work_of

INDEX, LABELS, TRAINING, TUNED, HELDOUT = "index", "labels", "training", "tuned retriever's search", "held-out texts"
ANY_LM = 1e8  # parameters; its seconds are measured


@dataclass(frozen=True, slots=True)
class Counts:
    """The documents and texts of a prepared set."""

    documents: int
    queries: int
    dev: int
    heldout: int


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of a pair on all scorers together (None: not known), and of a document that one encoder embeds."""

    pair: float | None
    document: float


def stage_seconds(
    config: Config, counts: Counts, retriever: ModelSize, speeds: Speeds, split: Split | None
) -> list[tuple[str, float | None]]:
    """Return the stages in order, each with its seconds; None where these follow from an LM of unknown speed.

    Without a `split` all roles take turns on one machine.
    """
    job = _job(config, counts, retriever)
    pair, work, shape = math.nan if speeds.pair is None else speeds.pair, job.work, job.shape
    encoder = speeds.document / work.document  # seconds of a FLOP
    seconds = Seconds(
        pair=pair,
        score=shape.pairs * pair,
        units=shape.pairs,
        build=shape.num_documents * speeds.document,
        train=work.train_step * encoder,
        encode=work.encode_batch * encoder,
        search=0.0,
    )
    together = Split(1, 1, 1, ("score", "embed", "train"))
    devices = Devices(ACCELERATORS["A100"], 1 if split is None else split.score + split.embed + split.train, 1)
    found = estimate(job, devices, split or together, seconds)
    wall = {stage: 3600 * hours for stage, hours in found.stages.items()}
    fitting = counts.dev * shape.heldout_k * pair if config.ensemble.temperature == FIT else 0.0
    last = wall["last_index"] if _trains_documents(config) else 0.0
    index = (INDEX, wall["first_index"])
    measuring = [(TUNED, last + fitting), (HELDOUT, fitting + wall["measuring"])] if config.evaluate.heldout else []
    labels = _label_stages(config, counts, job, encoder, pair) if config.train.labels else []
    if is_live(config):
        development = counts.dev * shape.heldout_k * (shape.refresh.num_starts + 2) * pair
        stages = [index, *labels[:-1], (TRAINING, wall["training"] + development), *measuring]
    elif config.train.labels == OWN_LABELS:
        stages = [index, *labels, *measuring]
    else:
        stages = [*labels, *([index] if measuring else []), *measuring]
    return [(name, None if math.isnan(value) else value) for name, value in stages]


def _label_stages(config: Config, counts: Counts, job: Job, encoder: float, pair: float) -> list[tuple[str, float]]:
    """Return the stages of labels and of trainings on them, the last one a training."""
    label, train, texts = config.label, config.train, counts.queries + counts.dev
    candidates = label.dense + label.bm25 + label.random
    steps = math.ceil(train.epochs * counts.queries / train.batch_size) if train.epochs else train.max_steps
    if _trains_documents(config):
        once, shape = 0.0, replace(job.shape, k=candidates)
    else:  # candidates are embedded once, and a step encodes queries alone
        once = min(texts * candidates, counts.documents) * job.work.document
        shape = replace(job.shape, k=0)
    step = work_of(shape, job.retriever, job.lm, flop_factor=job.trained.flop_factor).train_step
    training = (TRAINING, encoder * (once + steps * step))
    if train.labels != OWN_LABELS:
        return [training]
    calls = lm_calls(config, asdict(counts))
    rounds = [name for name in ("labels", "labels_of_tuned") if name in calls]
    return [stage for name in rounds for stage in ((LABELS, calls[name] * pair), training)]


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
