"""The first lines of a run: what it tunes to what, and its numbered stages with the work of each."""

import logging
from dataclasses import replace

from replug.config.choices import Examples, TrainedSide
from replug.config.rules import OWN_LABELS
from replug.config.schema import Config
from replug.data.progress import Stages
from replug.data.store import PreparedSet
from replug.index_workers.version_store import VersionStore
from replug.planning.stages import HELDOUT, INDEX, LABELS, QUESTIONS_MADE, TRAINING, Counts, Stage, run_stages
from replug.train.questions import questions_folder
from replug.train.run_dir import RunDirectory

log = logging.getLogger(__name__)

# Measured in the quickstart: a held-out text alone takes the time of half a pair, and six in ten of the documents that
# the tuned retriever finds for it are new. The others have been scored.
ALONE, NEW = 0.5, 0.6
SIDES = {TrainedSide.query: "queries", TrainedSide.documents: "documents", TrainedSide.both: "queries and documents"}


class RunStages(Stages):
    """The stages of the run that `config` describes, in `run`."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        super().__init__()
        self._config, self._run = config, run

    def say(self, data: PreparedSet) -> None:
        """Say what is tuned to what, and the stages, unless it was said."""
        if self.are_planned:
            return
        config, dev = self._config, len(data.dev) if data.dev is not None else 0
        stages = run_stages(config, Counts(len(data.corpus), len(data.queries), dev, len(data.heldout)))
        stages = self._left(stages, config.train.max_steps)
        self.plan([(stage.name, self._usual_work(stage)) for stage in stages])
        lm = config.lm.path or f"{config.lm.model} at {config.lm.url}"
        tuned, pairs = (
            f"tuning {SIDES[config.retriever.train]} of {config.retriever.path}",
            sum(of.pairs for of in stages),
        )
        if config.train.examples is Examples.questions:
            what = f"{tuned} on questions about {len(data.corpus):,} documents"
        else:
            what = (
                f"{tuned} to {lm}, which stays as it is, on {len(data.queries):,} training, {dev:,} development and "
                f"{len(data.heldout):,} held-out texts with {len(data.corpus):,} documents"
            )
        log.info(f"{what}\n{len(stages)} stages, at most {pairs:,} LM calls:")
        for number, stage in enumerate(stages, 1):
            calls = f" · at most {stage.pairs:,} LM calls" if stage.pairs else ""
            log.info(f"  {number} {stage.name}: {stage.work}{calls}")

    def _usual_work(self, stage: Stage) -> dict[str, int]:
        """Return the units of work that the time left is computed from; held-out texts usually take fewer pairs."""
        k, pairs = self._config.evaluate.k, float(stage.pairs)
        if stage.name == HELDOUT:
            pairs *= (ALONE + k * (1 + NEW)) / (1 + 2 * k)
        return {"pairs": round(pairs), "documents": stage.documents, "steps": stage.steps}

    def _left(self, stages: list[Stage], max_steps: int) -> list[Stage]:
        """Return the stages without those that are done, and without the steps of the training that are done."""
        last = next(place for place, stage in enumerate(stages) if stage.name == TRAINING)
        training, marks = stages[last], self._run.checkpoint_marks()
        left = 0.0 if self._run.fitted.is_file() else 1 - marks[-1].step / max_steps if marks else 1.0
        training = replace(training, pairs=round(left * training.pairs), steps=round(left * training.steps))
        done = {
            INDEX: VersionStore(self._run.index).is_published(0),
            LABELS: self._run.begun_with() is not None,  # a run begins with its own labels
            QUESTIONS_MADE: questions_folder(self._run.questions).is_finished,
        }
        done[INDEX] |= self._config.train.labels == OWN_LABELS and done[LABELS]
        return [*(stage for stage in stages[:last] if not done[stage.name]), training, *stages[last + 1 :]]
