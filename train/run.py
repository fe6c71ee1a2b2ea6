"""The composition root of `replug train`: one call for each stage, from the configuration to the report.

Each stage leaves its result in the run directory. A rerun skips finished stages and resumes the interrupted one. A
training on labels asks the LM only for the held-out texts at the end, and not at all with `evaluate.heldout=false`.
"""

import logging
import math
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import Logger

from replug.cluster.interruption import Interruption
from replug.config.choices import Examples, Teacher
from replug.config.load import flatten
from replug.config.rules import BY_LM, FIT, OWN_LABELS, chooses_by_dev, is_live, require_logprobs
from replug.config.schema import Config
from replug.data.files import read_json, write_json, writing
from replug.data.folder import sole_writer
from replug.data.labels import Labels
from replug.data.progress import Stages
from replug.evals.evidence import RetrievedDocuments
from replug.evals.questions import OpenQuestion
from replug.evals.retrieval import RECALL_DEPTH
from replug.evals.tables import print_blocks
from replug.index_workers.build import build_version
from replug.index_workers.build_plan import IndexState
from replug.index_workers.service import IndexService
from replug.models.build import lm_source, load_encoder
from replug.models.encoder import Encoder
from replug.models.ensemble import can_fit
from replug.models.ensemble_temperature import PAPER, EnsembleTemperature, write_temperature
from replug.models.hardware import check_gpus
from replug.models.preparing import data_folder, prepared_set
from replug.planning.stages import HELDOUT, INDEX, QUESTIONS_MADE, TRAINING, TUNED
from replug.train.development import Chooser, DevQuestions, LabelledDevTexts, QuestionChooser, describe_weights
from replug.train.evaluation import (
    ANSWERS,
    LANGUAGE_MODELLING,
    PICTURE,
    QUESTIONS,
    evaluate_answers,
    evaluate_heldout,
    first_documents,
    judge_by_questions,
    measured_encoder,
    search_examples,
    search_heldout,
    searched_version,
)
from replug.train.fitting import Fit, own_globals, started_ranks
from replug.train.labels import label, label_origin
from replug.train.model_card import write_model_card
from replug.train.outset import check_data, check_texts, plan_stages, require_trainable
from replug.train.questions import (
    Questions,
    TrainingQuestions,
    make_questions,
    questions_folder,
    rate_for,
    training_questions,
    write_questions,
)
from replug.train.report import run_blocks, verdict_of, write_report
from replug.train.run_dir import LM, MEND, SET, RunDirectory, manifest_sha256
from replug.train.sources import LabelledBatches, LiveBatches, QuestionBatches, version_after
from replug.train.step_metrics import log_hyperparameters, loggers_of, publish_results, require_loggers
from replug.train.trained_weights import save_retriever
from replug.train.workers import Workers, start_index, start_workers

log = logging.getLogger(__name__)


def train(config: Config, loggers: Sequence[Logger] = ()) -> dict:
    """Run or resume a training run; returns the content of `results.json`. `loggers` are a user's own."""
    run = RunDirectory(Path(config.run_dir).expanduser())
    if not run.is_finished:
        require_loggers(config)  # before the labels, which take the longest
    with own_globals():
        run.require_config(config)  # before the lock, which is a file in the folder
        stages = Stages()
        labels = _labels(config, run, stages)
        if labels is not None and config.train.epochs is not None:
            steps = math.ceil(config.train.epochs * labels.counts["queries"] / config.train.batch_size)
            config = replace(config, train=replace(config.train, max_steps=steps))
        with sole_writer(run.path):
            if run.is_finished:
                _require_same_files(config, run)
                log.info(f"{run.path} holds a finished run; give another run_dir to train again")
            else:
                check_gpus()
                interruption = Interruption()
                with interruption.installed():
                    _Run(config, run, labels, stages, interruption, loggers).train()
        return write_report(run)


def _labels(config: Config, run: RunDirectory, stages: Stages) -> Labels | None:
    """Return the configured labels, or the run's own, made before it begins; None for a live run."""
    if config.train.labels != OWN_LABELS:
        return Labels(Path(config.train.labels).expanduser()) if config.train.labels else None
    if run.begun_with() is not None:
        return Labels(run.labels)  # new labels could differ
    with sole_writer(run.path):
        data = prepared_set(config, run.data)
        require_trainable(config, data, measured_encoder(config))
        plan_stages(stages, config, run, data)
        return label(config, run.labels, run.index, stages)


def _require_same_files(config: Config, run: RunDirectory) -> None:
    """Raise UserError if the LM or the prepared set of the finished run has other content under the same name."""
    if config.lm.path is not None:  # a server may be gone by now
        run.require({LM: lm_source(config.lm, run.budget_file, run.scores).identity})
    if (data_folder(config, run.data) / "manifest.json").is_file():  # the set may have been removed to save space
        run.require({SET: manifest_sha256(prepared_set(config, run.data).folder)})


class _Run:
    """One unfinished run: its parts, checked before anything heavy starts, and its stages."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        labels: Labels | None,
        stages: Stages,
        interruption: Interruption,
        loggers: Sequence[Logger],
    ) -> None:
        self._config, self._run, self._labels, self._stages = config, run, labels, stages
        self._interruption = interruption
        # Hash local weights to check that the labels came from them; contact a server only if needed.
        needs_lm = is_live(config) or config.evaluate.heldout or config.lm.path is not None
        self._lm = lm_source(config.lm, run.budget_file, run.scores) if needs_lm else None
        self._lm_identity = self._lm.identity if self._lm else labels.origin.lm if labels else ""
        self._encoder, self._data = measured_encoder(config), prepared_set(config, run.data)
        check_data(config, self._data, self._lm) if self._lm else check_texts(config, self._data)
        require_trainable(config, self._data, self._encoder)
        if labels is not None:
            labels.require(label_origin(config, self._data, self._lm_identity, self._encoder))
        # Claim last: correcting a refused key must not look like changing a started run.
        run.claim(config, self._lm_identity, self._data.folder, labels.folder if labels else None)
        self._loggers = [*loggers_of(config, run), *loggers]
        for logger in self._loggers:
            log_hyperparameters(logger, flatten(config))
        self._questions: Questions | None = None
        self._training: TrainingQuestions | None = None
        self._loss = math.inf  # of untuned weights on training questions

    def train(self) -> None:
        """Run every stage and finish the run. Stages whose results exist are skipped."""
        config = self._config
        plan_stages(self._stages, config, self._run, self._data)
        results: dict[str, Any] = {}
        if config.data.questions:
            with self._stages.stage(QUESTIONS_MADE):
                questions = self._make_questions()
                self._questions = questions if questions.heldout else None
        if is_live(config):
            with self._workers("train", "index") as (laid_out, workers):
                with self._stages.stage(INDEX):  # version 0, which the first steps search
                    self._search_untuned(laid_out, workers.index, workers)
                with self._stages.stage(TRAINING):
                    weights = self._tune(laid_out, workers)
                results = self._measure(laid_out, workers.index, weights["step"], workers)
        else:
            with self._stages.stage(TRAINING):
                weights = self._tune(config, None)
            if config.evaluate.heldout:
                with self._workers("index") as (laid_out, workers):
                    results = self._measure(laid_out, workers.index, weights["step"], workers)
            elif self._questions is not None:
                with start_index(config, ("index",), self._data, self._run.index, self._interruption) as started:
                    results = self._measure(*started, weights["step"])
        results["weights"] = weights
        results["verdict"] = verdict_of(results)
        write_model_card(self._run.retriever, config, describe_weights(weights), self._run.provenance(), results)
        self._run.finish(results)
        publish_results(self._loggers, self._run, results)

    def _make_questions(self) -> Questions:
        """Make the run's questions, first the training questions, since an encoder may have nothing to gain."""
        config, run, data = self._config, self._run, self._data
        is_made = questions_folder(run.questions).is_finished
        training: list[OpenQuestion] = []
        if config.train.examples is Examples.questions:
            training = Questions(run.questions).train if is_made else training_questions(config, data)
            self._training = TrainingQuestions(training, data.corpus)
            if not run.fitted.is_file():
                self._loss = self._training.in_batch_loss(self._encoder, config)
        if config.data.questions != BY_LM or is_made:
            return make_questions(config, data, run.questions, training, self._lm_identity)
        with self._workers("index") as (_, workers):
            has_logprobs, check = config.lm.score is Teacher.logprob, self._interruption.check
            write = partial(write_questions, workers.lm, config.seed, has_logprobs, check)
            return make_questions(config, data, run.questions, training, self._lm_identity, write)

    def _workers(self, *roles: str) -> AbstractContextManager[tuple[Config, Workers]]:
        assert self._lm is not None
        run = self._run
        return start_workers(self._config, roles, self._lm, self._data, run.index, run.scores, self._interruption)

    def _tune(self, config: Config, workers: Workers | None) -> dict[str, Any]:
        """Train, and export the weights that did best on the development texts, or the last ones if there are none.

        Returns the record of the weights in `results.json`. Without `workers` all steps are on labels.
        """
        run, data = self._run, self._data
        if run.fitted.is_file():
            return read_json(run.fitted, MEND)
        if self._training is not None:
            config = rate_for(config, self._loss)
        arguments = (config, run, data, self._encoder, self._interruption, self._loggers)
        fit = Fit(*arguments, queries=self._training)
        by_questions = self._question_chooser(fit)
        if self._training is not None:
            assert by_questions is not None
            fit.run(QuestionBatches(config, self._training, by_questions), self._interruption.check)
        elif workers is None:
            assert self._labels is not None
            chooser: Chooser | None = by_questions
            if chooser is None and self._labels.counts.get("dev"):
                chooser = LabelledDevTexts(config, self._labels, data, fit.encoder, fit.frozen, fit.watch)
            fit.run(LabelledBatches(config, self._labels, data, fit.frozen, chooser), self._interruption.check)
        else:
            with started_ranks(config, run, data, fit.newest) as others:

                def check() -> None:
                    self._interruption.check()
                    others.check()

                labelled = LabelledBatches(config, self._labels, data, fit.frozen) if self._labels else None
                parts = (fit.encoder, workers, fit.watch, fit.clock, check, fit.frozen, labelled, by_questions)
                with LiveBatches(config, data, *parts) as live:
                    fit.run(live, check, others)
        weights = self._export(config, fit)
        write_json(run.fitted, weights)
        return weights

    def _question_chooser(self, fit: Fit) -> QuestionChooser | None:
        if self._questions is None or not self._questions.dev:
            return None
        if self._data.dev is not None and self._config.ensemble.temperature != FIT:
            log.info("questions choose the weights, so development texts are not read (data.dev, data.num_dev)")
        dev = DevQuestions(self._questions.dev, self._data.corpus, self._config.seed)
        return QuestionChooser(self._config, dev, fit.encoder, fit.frozen, fit.watch, self._loss)

    def _export(self, config: Config, fit: Fit) -> dict[str, Any]:
        """Save the tuned retriever, both encoders of a pair; returns the record of its weights."""
        run, best, first = self._run, fit.watch.chosen(), fit.watch.first
        if best is None:
            tuned = fit.encoder.cpu().eval()
        else:
            tuned = load_encoder(config.retriever, run.best_weights, config.index.dims)
            if config.ensemble.temperature == FIT and best.temperature is not None:
                num = len(self._data.require_dev())
                fitted = EnsembleTemperature(best.temperature, self._lm_identity, config.evaluate.k, num)
                tuned.temperature = fitted if can_fit(num) else PAPER
        documents = fit.frozen.encoder if fit.frozen and not fit.encoder.is_pair else None
        with writing(run.retriever):
            save_retriever(run.retriever, tuned, config.retriever, documents, run.best_weights)
        measured = {"first": asdict(first) if first else None, "best": asdict(best) if best else None}
        return {"step": best.step if best else fit.steps, "steps": fit.steps, **measured}

    def _measure(
        self, config: Config, index: IndexService, step: int, workers: Workers | None = None
    ) -> dict[str, Any]:
        """Compare the untuned retriever with the tuned one, which has the weights of `step`.

        Held-out questions need no LM. With the LM of `workers`, held-out texts and answers are measured too.
        """
        run, data = self._run, self._data
        results: dict[str, Any] = {}
        with self._stages.stage(INDEX):
            self._search_untuned(config, index, workers)
        with self._stages.stage(TUNED):
            self._search_tuned(config, index, step, workers)
        texts: dict[str, RetrievedDocuments] = {}
        examples: list[dict[str, Any]] = []
        if workers is not None:
            texts = _retrieved(run.untuned_retrieval, run.tuned_retrieval)
            with self._stages.stage(HELDOUT):
                results |= evaluate_heldout(config, data, workers, texts, run.evaluation)
            picture = run.evaluation / LANGUAGE_MODELLING / PICTURE
            shutil.copyfile(picture, run.document_weights)  # `evaluate` writes another
            examples = first_documents(data, texts, [text.as_row() for text in data.heldout.examples()])
        if self._questions is not None:
            questions = self._questions.heldout
            found = _retrieved(run.questions_before, run.questions_after)
            asked = [{"context": of.example.query, "continuation": f"\n{', '.join(of.answers)}"} for of in questions]
            examples = [*first_documents(data, found, asked), *examples]
            results[QUESTIONS] = judge_by_questions(config, data, questions, found, run.evaluation / QUESTIONS)
            if workers is not None and any(question.answers for question in questions):
                found = {name: replace(of, temperature=texts[name].temperature) for name, of in found.items()}
                results[ANSWERS] = evaluate_answers(config, data, workers, questions, found, run.evaluation / ANSWERS)
        write_json(run.examples, examples)
        return results

    def _search_untuned(self, config: Config, index: IndexService, workers: Workers | None) -> None:
        """Search held-out texts and questions with the untuned retriever, in index version 0."""
        run, encoder = self._run, measured_encoder(config)
        if workers is not None and not run.untuned_retrieval.exists():
            untuned = search_heldout(config, self._data, workers, encoder, IndexState(0, 0), "replug")
            untuned.save(run.untuned_retrieval)
        if self._questions is not None and not run.questions_before.exists():
            build_version(config, encoder, self._data, index, IndexState(0, 0))
            self._search_questions(config, index, encoder, 0).save(run.questions_before)

    def _search_tuned(self, config: Config, index: IndexService, step: int, workers: Workers | None) -> None:
        """Search them with the tuned retriever, in a separate index. Weights of step 0 are untuned."""
        run, version = self._run, version_after(index.store, step) if step else 0
        tuned = load_encoder(config.retriever, run.retriever, config.index.dims)
        if workers is not None and not run.tuned_retrieval.exists():
            if step:
                retrieved = search_heldout(config, self._data, workers, tuned, IndexState(version, step))
            else:
                retrieved = RetrievedDocuments.load(run.untuned_retrieval)
                tuned.temperature = retrieved.temperature if config.ensemble.temperature is not None else None
            if tuned.temperature is not None:  # fitted again, to documents of the whole corpus
                write_temperature(run.retriever, tuned.temperature)
            retrieved.save(run.tuned_retrieval)
        searched = searched_version(config, version)
        if self._questions is not None and not run.questions_after.exists():
            if step == 0:
                shutil.copyfile(run.questions_before, run.questions_after)
            else:
                if searched:
                    build_version(config, tuned, self._data, index, IndexState(searched, step))
                self._search_questions(config, index, tuned, searched).save(run.questions_after)
        index.store.remove_all_but({searched})  # no checkpoint needs the others any more

    def _search_questions(
        self, config: Config, index: IndexService, encoder: Encoder, version: int
    ) -> RetrievedDocuments:
        assert self._questions is not None
        asked = [question.example for question in self._questions.heldout]
        k = min(len(self._data.corpus), RECALL_DEPTH)
        return search_examples(config, self._data, index, encoder, version, asked, k, are_questions=True)


def _retrieved(before: Path, after: Path) -> dict[str, RetrievedDocuments]:
    return {"replug": RetrievedDocuments.load(before), "lsr": RetrievedDocuments.load(after)}


def evaluate(config: Config) -> dict:
    """Measure held-out texts with the configured retriever and the run's tuned one, if any."""
    check_gpus()
    require_logprobs(config.lm)
    run = RunDirectory(Path(config.run_dir).expanduser())
    with own_globals(), sole_writer(run.path):
        return _evaluate(config, run)


def _evaluate(config: Config, run: RunDirectory) -> dict:
    lm = lm_source(config.lm, run.budget_file, run.scores)
    data = prepared_set(config, run.data)
    if chooses_by_dev(config):
        data.require_dev()
    check_data(config, data, lm)
    log.info(f"measuring {len(data.heldout):,} held-out texts of {data.folder}")
    paths = {"replug": None, **({"lsr": run.retriever} if run.retriever.is_dir() else {})}
    own = run.evaluation / "index"
    with start_workers(config, ("index",), lm, data, own, run.scores) as (laid_out, workers):
        retrieved = {
            name: search_heldout(laid_out, data, workers, measured_encoder(config, path), IndexState(number, 0), name)
            for number, (name, path) in enumerate(paths.items())  # version 0 is the untuned retriever's
        }
        results: dict[str, Any] = {**evaluate_heldout(laid_out, data, workers, retrieved, run.evaluation)}
    if run.fitted.is_file():
        results["weights"] = read_json(run.fitted, MEND)
    results["verdict"] = verdict_of(results)
    write_json(run.evaluation / "results.json", results)
    print_blocks(run_blocks(results))
    print(f"results: {run.evaluation / 'results.json'}")
    return results
