"""The first lines of a run: what it will do in numbered stages, and how long all of it takes on this machine.

The LM that the run opened anyway and the encoder are timed for a second each at most, in calls of twice as many texts
each time. `planning.stages` makes the times of them. What the LM says is not kept: no score of the run depends on it.
"""

import copy
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from replug.cluster.gpu_shares import trains_on_gpu
from replug.cluster.gpus import num_gpus, torch_device
from replug.cluster.interruption import wait_for
from replug.cluster.layout import index_actors, num_ranks
from replug.config.choices import TrainedSide
from replug.config.rules import OWN_LABELS
from replug.config.schema import Config
from replug.data.progress import Stages, format_duration
from replug.data.store import PreparedSet
from replug.index_workers.version_store import VersionStore
from replug.models.caching_lm import CachingLM
from replug.models.encoder import Encoder
from replug.models.hardware import DTYPES, available_cores, dtype_name
from replug.models.http.request_budget import BudgetSpent
from replug.models.prompt import PromptTemplate
from replug.planning.model_sizes import ModelSize, transformer
from replug.planning.pace import Split
from replug.planning.stages import TAKING_TURNS, TRAINING, Counts, Speeds, Stage, on_processors, run_stages
from replug.train.development import embedded
from replug.train.pipeline import prompts_of
from replug.train.run_dir import RunDirectory
from replug.train.sources import uses_bf16

log = logging.getLogger(__name__)

SECONDS = 1.0  # of a probe
FIRST_PAIRS, FIRST_DOCUMENTS = 4, 32  # of its first call: about as long on a processor
FASTER = 0.9  # a unit of a call takes at most this part of what it took in the call before, or calls are large enough
SIDES = {TrainedSide.query: "queries", TrainedSide.documents: "documents", TrainedSide.both: "queries and documents"}


class RunStages(Stages):
    """The stages of the run that `config` describes, in `run`."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        super().__init__()
        self._config, self._run = config, run

    def say(
        self,
        laid_out: Config,
        data: PreparedSet,
        encoder: Encoder,
        lm: CachingLM | None = None,
        template: PromptTemplate | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Say what is tuned to what, the stages and how long they take, unless it was said.

        `laid_out` has the actors that Ray runs. Without an LM the stages that need one have no time. `check` is called
        while waiting for the LM, to raise what ends the run.
        """
        if self.are_planned:
            return
        on_gpu, several = num_gpus() > 0, num_gpus() > 1
        measured, pair = "", None
        split = TAKING_TURNS if on_gpu else on_processors(available_cores())
        if lm is not None and template is not None:  # first: its scorers may still be loading
            with suppress(BudgetSpent):  # what is cached may be all that the run needs
                pair, calls = _seconds_of_pair(data, lm, template, check)
                measured = f"the LM scores {_rate(pair)} pairs of document and text a second ({calls} calls), "
            if several:
                split = Split(1, index_actors(laid_out.index).num_builders, num_ranks(laid_out))
        document, trained, calls = _seconds_of_document(laid_out, data, encoder, on_gpu)
        measured += f"the encoder reads {_rate(document)} documents ({calls} calls)"
        num_embedded = 1 if data.corpus.url else len(data.corpus)  # a store embeds none
        counts = Counts(num_embedded, len(data.queries), _num_dev(data), len(data.heldout))
        found = run_stages(self._config, counts, _size(laid_out, encoder), Speeds(pair, document, trained), split)
        planned = self._left(found, laid_out.train.max_steps)
        self.plan([(stage.name, stage.seconds) for stage in planned])
        known = sum(stage.seconds or 0.0 for stage in planned)
        more = ", and what the LM takes" if any(stage.seconds is None for stage in planned) else ""
        log.info(f"{self._aim(data)}\n{len(planned)} stages, about {format_duration(known)} in all{more}; {measured}:")
        for number, stage in enumerate(planned, 1):
            takes = "not known yet" if stage.seconds is None else format_duration(stage.seconds)
            log.info(f"  {number} {stage.name}: {stage.work} · {takes}")

    def _aim(self, data: PreparedSet) -> str:
        config = self._config
        lm = config.lm.path or f"{config.lm.model} at {config.lm.url}"
        return (
            f"tuning {SIDES[config.retriever.train]} of {config.retriever.path} to {lm}, which stays as it is, on "
            f"{len(data.queries):,} training, {_num_dev(data):,} development and {len(data.heldout):,} held-out texts "
            f"with {len(data.corpus):,} documents"
        )

    def _left(self, found: list[Stage], max_steps: int) -> list[Stage]:
        """Return what is left of the stages: those that are done are left out, and steps of the training."""
        last = next(place for place, stage in enumerate(found) if stage.name == TRAINING)
        seconds, marks = found[last].seconds, self._run.checkpoint_marks()
        if self._run.fitted.is_file():
            seconds = 0.0
        elif marks and seconds is not None:
            seconds *= 1 - marks[-1].step / max_steps
        before = found[self._num_done(found[:last]) : last]
        return [*before, replace(found[last], seconds=seconds), *found[last + 1 :]]

    def _num_done(self, stages: list[Stage]) -> int:
        """Count the stages before the training that are done: the index, and labels."""
        if self._config.train.labels == OWN_LABELS and self._run.begun_with() is not None:
            return len(stages)
        return min(len(stages), int(VersionStore(self._run.index).is_published(0)))


def _rate(seconds: float) -> str:
    """Return how many a second, with a digit behind the point where there are few."""
    return f"{1 / seconds:,.{0 if seconds < 0.1 else 1}f}"


def _num_dev(data: PreparedSet) -> int:
    return len(data.dev) if data.dev is not None else 0


def _size(config: Config, encoder: Encoder) -> ModelSize:
    """Return the size of an encoder of as many layers. Its speed is measured, so widths matter little."""
    layers = getattr(encoder.backbones[0].config, "num_hidden_layers", 12)
    layers = max(layers, config.retriever.frozen_layers + 1)
    return transformer(layers, encoder.width, 4 * encoder.width, 1, vocabulary=1)


def _seconds_of_document(config: Config, data: PreparedSet, encoder: Encoder, on_gpu: bool) -> tuple[float, float, int]:
    """Return the seconds of a document in the precisions of a builder and of the trainer, and the number of calls."""
    rows = data.corpus.sample(np.random.default_rng(0))
    device = torch_device(trains_on_gpu(config, on_gpu))

    def read(by: Encoder, count: int) -> None:
        embedded(by, data.corpus, np.resize(rows, count))

    builder = copy.deepcopy(encoder).to(device, DTYPES[dtype_name(config.index.dtype.value)])
    document, calls = _timed(partial(read, builder), FIRST_DOCUMENTS)
    del builder
    encoder.to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=uses_bf16(config.train.precision)):
        trained, more = _timed(partial(read, encoder), FIRST_DOCUMENTS)
    encoder.cpu()
    return document, trained, calls + more


def _seconds_of_pair(
    data: PreparedSet, lm: CachingLM, template: PromptTemplate, check: Callable[[], None]
) -> tuple[float, int]:
    """Return the seconds of a training text behind a document drawn at random, over all scorers, and the calls."""
    rng = np.random.default_rng(0)
    texts, documents = rng.permutation(len(data.queries)), data.corpus.sample(rng)

    def score(count: int) -> None:
        examples = data.queries.examples(np.resize(texts, count))
        before = [[text] for text in data.corpus.texts(np.resize(documents, count))]
        wait_for(lm.uncached.submit(*prompts_of(template, examples, before)), check)

    return _timed(score, FIRST_PAIRS)


def _timed(work: Callable[[int], object], count: int) -> tuple[float, int]:
    """Return the seconds of a unit of work in the fastest call, and the number of timed calls.

    The first has `count` units, and each has twice as many as the last, until that makes them no faster or the time is
    over.
    """
    work(count)  # with what is done once, such as loading
    calls, spent, best = 0, 0.0, math.inf
    while True:
        start = time.perf_counter()
        work(count)
        seconds = time.perf_counter() - start
        calls, spent, before = calls + 1, spent + seconds, best
        best = min(best, seconds / count)
        if spent >= SECONDS or (calls > 2 and best > FASTER * before):
            return best, calls
        count *= 2
