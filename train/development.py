"""Measure development texts or questions while training, and keep the best weights so far.

The retriever orders documents of each text. The ensemble of the first `evaluate.k` is mixed at every token (REPLUG,
section 3.2). Its weights are softmax(s / T): T is `ensemble.temperature` if that is a number, else it is fitted to the
texts, since softmax(s) of cosines that differ by hundredths is nearly uniform even after training.

A training on labels measures the stored candidates (`LabelledDevTexts`) without the LM. A live training searches each
index version and asks the LM (`SearchedDevTexts`). Questions replace both (`QuestionChooser`). `Watch` keeps the best
weights of any. Held-out texts choose nothing.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from replug.config.schema import Config
from replug.data.answers import has_answer
from replug.data.datamodule import Position
from replug.data.files import write_json, writing
from replug.data.labels import Labels
from replug.data.records import Example, ScoredBatch
from replug.data.store import CorpusStore, PreparedSet
from replug.evals.ensemble_temperatures import DocumentScores, ensemble_bits, fit_temperature
from replug.evals.intervals import FEWEST_CLUSTERS
from replug.evals.questions import OpenQuestion
from replug.index_workers.bm25 import search_bm25
from replug.index_workers.build_plan import IndexState
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.train.evaluation import search_examples
from replug.train.loss import lm_scores, log_likelihood, text_losses
from replug.train.pipeline import score_in_calls
from replug.train.questions import NEAREST, SEARCHED, texts_of
from replug.train.trained_weights import FrozenDocuments, embedded
from replug.train.workers import Workers

RESULT = "dev.json"  # in the folder of the best weights
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the way from the untuned weights
NUM_LOOKS = 3  # measurements of development questions while training, each at all `SHARES`
SURE = NormalDist().inv_cdf(1 - 0.05 / 2 / NUM_LOOKS)  # standard errors below a gain where its interval begins
# Nothing is left to gain from this mean reciprocal rank of development questions on, or up to this in-batch loss of
# the training questions in nats: at 0.03 training harmed (docs/experiments.md).
CEILING, LEAST_LOSS = 0.95, 0.05
SMALL = 2_000  # documents of a corpus that is measured whole

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DevResult:
    """A measurement of the weights of `step` on development texts or questions.

    Texts give bits per byte of the ensemble at `temperature`, with labelled candidates also `kl`, the training loss.
    Questions give the mean reciprocal rank of the first right document, the `share` of the way from the untuned weights
    that was measured, and the `least_gain` over these: the lower end of its interval.
    """

    step: int
    bpb: float | None = None
    temperature: float | None = None
    kl: float | None = None
    mrr: float | None = None
    share: float | None = None
    least_gain: float | None = None

    @property
    def measured_on(self) -> str:
        return "texts" if self.mrr is None else "questions"

    @property
    def merit(self) -> float:
        """Return the criterion that chooses the weights; higher is better."""
        if self.least_gain is not None:
            return self.least_gain
        assert self.bpb is not None
        return -self.bpb


class Watch(pl.Callback):
    """Keeps in `folder` the weights that did best on the development split; does nothing without a split.

    Training ends after `patience` results without progress, or if the untuned weights leave `nothing_to_gain`.
    A checkpoint holds the first result, the best and the last. The folder holds the result of its weights: after a
    kill they may be later than the checkpoint, and the resumed run measures them again.
    """

    def __init__(self, folder: Path, patience: int | None = None) -> None:
        self.folder, self._patience = folder, patience
        self.first: DevResult | None = None
        self.best: DevResult | None = None
        self.last: DevResult | None = None
        self.nothing_to_gain = False
        self._furthest, self._in_vain = -math.inf, 0  # the most progress, and the results since

    def chosen(self) -> DevResult | None:
        """Return the result of the weights in `folder`. None means that it has none."""
        path = self.folder / RESULT
        return DevResult(**json.loads(path.read_text())) if path.is_file() else None

    @property
    def is_over(self) -> bool:
        """Return whether patience has run out, or there is nothing to gain."""
        return self.nothing_to_gain or (self._patience is not None and self._in_vain >= self._patience)

    def has(self, step: int) -> bool:
        """Return whether the last result is for `step`, as after resuming from a checkpoint."""
        return self.last is not None and self.last.step == step

    def record(self, result: DevResult, save: Callable[[Path], object], progress: float | None = None) -> None:
        """Remember a result. `save` writes its weights into a folder if they are the best.

        Patience follows `progress`, by default the result's merit: a gain may grow before its interval shows it.
        """
        if self.has(result.step):
            return
        self.first, self.last = self.first or result, result
        progress = result.merit if progress is None else progress
        self._in_vain = 0 if progress > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, progress)
        if self.best is not None and result.merit <= self.best.merit:
            return
        new = self.folder.with_name(f"{self.folder.name}.partial")
        shutil.rmtree(new, ignore_errors=True)
        with writing(new):
            save(new)
            write_json(new / RESULT, asdict(result))
            shutil.rmtree(self.folder, ignore_errors=True)
            new.replace(self.folder)
        self.best = result

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop |= self.is_over

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        """Log the last result at every step: Lightning repeats a value that is logged only at some steps."""
        if batch.is_last and self.last is not None:
            trainer.should_stop |= self.is_over
            numbers = {name: value for name, value in asdict(self.last).items() if value is not None}
            pl_module.log_dict({f"dev/{name}": float(value) for name, value in numbers.items()})

    def state_dict(self) -> dict[str, Any]:
        measured = {"first": self.first, "best": self.best, "last": self.last}
        known = {name: asdict(result) for name, result in measured.items() if result is not None}
        return known | {"in_vain": self._in_vain, "furthest": self._furthest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = {name: DevResult(**state_dict[name]) for name in ("first", "best", "last") if name in state_dict}
        self.first, self.best, self.last = (known.get(name) for name in ("first", "best", "last"))
        self._in_vain, self._furthest = state_dict["in_vain"], state_dict["furthest"]


class Chooser:
    """Measures weights before the first step, each `every` steps and after the last one; a `Watch` keeps the best."""

    rows: np.ndarray  # corpus rows of the measured documents

    def __init__(self, watch: Watch, every: int, max_steps: int) -> None:
        self._watch, self._every, self._max_steps = watch, every, max_steps

    def start(self) -> None:
        """Measure the untuned weights, unless the run is resumed."""
        if self._watch.first is None:
            self.finish(0)

    def end(self, step: int) -> None:
        """Measure the weights after a step if that is due."""
        done = step + 1
        if done % self._every == 0 or done == self._max_steps:
            self.finish(done)

    def finish(self, step: int) -> None:
        """Measure the weights after `step` steps, unless they were measured."""
        raise NotImplementedError


def describe_weights(weights: Mapping[str, Any]) -> str:
    """Return a description of the tuned retriever's weights from their record in `fitted.json`."""
    if weights["best"] is None:
        return f"step {weights['step']}, the last"
    best = weights["best"]
    if best["mrr"] is not None and best["step"] == 0:
        return "step 0, the untuned weights, since no others show a gain on development questions"
    part = "" if best["share"] in (None, 1) else f" ({best['share']:.0%} of the way to it)"
    measured_on = "texts" if best["mrr"] is None else "questions"
    return f"step {best['step']}{part}, the best of {weights['steps']} on development {measured_on}"


def _ensemble_result(config: Config, step: int, scores: Sequence[DocumentScores], num_bytes: int) -> DevResult:
    given = config.ensemble.temperature
    if isinstance(given, int | float):
        return DevResult(step, ensemble_bits(scores, float(given)) / num_bytes, float(given))
    temperature, stays = fit_temperature(scores)
    if stays and step == 0:
        log.warning(f"the ensemble temperature stays 1 ({len(scores)} development texts): {stays}")
    return DevResult(step, ensemble_bits(scores, temperature) / num_bytes, temperature)


class SearchedDevTexts:
    """Development texts with documents retrieved from an index version and scored by the LM."""

    def __init__(self, config: Config, data: PreparedSet, workers: Workers, check: Callable[[], None]) -> None:
        self._config, self._data, self._workers, self._check = config, data, workers, check
        self._examples = data.require_dev().examples()
        self._bytes = sum(len(example.continuation.encode()) for example in self._examples)

    def measure(self, encoder: Encoder, version: int, step: int) -> DevResult:
        """Measure an encoder with the weights of `step` on the documents that it retrieves from an index version."""
        encoder.eval()
        config, examples = self._config, self._examples
        workers, corpus, scores = self._workers, self._data.corpus, []
        k = min(len(corpus), config.evaluate.k)
        found = search_examples(config, self._data, workers.index, encoder, version, examples, k)
        k = found.doc_rows.shape[1]

        def load(rows: range) -> tuple[list[Example], list[list[str]]]:
            return examples[rows.start : rows.stop], [corpus.texts(found.doc_rows[row]) for row in rows]

        calls = score_in_calls(workers.lm.submit, workers.template, len(examples), load, 1, self._check)
        for rows, of_rows in calls:  # one call at a time, beside the batches of the training
            for place, row in enumerate(rows):
                own = [score.token_logprobs for score in of_rows[place * k : (place + 1) * k]]
                scores.append(DocumentScores(np.stack(own), found.similarities[row]))
        return _ensemble_result(config, step, scores, self._bytes)

    def measure_index(self, index: IndexState) -> DevResult:
        """Measure an index version by its own weights."""
        folder = self._workers.index.store.encoder_folder(index.version)
        encoder = load_encoder(self._config.retriever, folder, self._config.index.dims)
        return self.measure(encoder, index.version, index.step)


class LabelledDevTexts(Chooser):
    """Chooses weights by labelled development texts, without calls to the LM."""

    def __init__(
        self,
        config: Config,
        labels: Labels,
        data: PreparedSet,
        encoder: Encoder,
        frozen: FrozenDocuments | None,
        watch: Watch,
    ) -> None:
        """Take the encoder in training. `frozen` gives the vectors of documents that do not learn."""
        super().__init__(watch, math.ceil(len(data.queries) / config.train.batch_size), config.train.max_steps)
        self._config, self._corpus, self._encoder, self._frozen = config, data.corpus, encoder, frozen
        examples = data.require_dev().examples()
        self._queries = [example.query for example in examples]
        self._bytes = sum(len(example.continuation.encode()) for example in examples)
        scores, self._token_logprobs = labels.scores("dev"), labels.token_logprobs()
        doc_rows = scores.retrieved.doc_rows
        self._k = min(config.evaluate.k, doc_rows.shape[1])
        self.rows, places = np.unique(doc_rows, return_inverse=True)
        self._places = places.reshape(doc_rows.shape)
        z = torch.from_numpy(document_scores(scores, config.loss.lm_score.value))
        self._log_q = log_likelihood(z, config.loss.beta)

    def finish(self, step: int) -> None:
        """Measure the weights after `step` steps, unless they were measured."""
        if not self._watch.has(step):
            self._watch.record(self.measure(step), self._encoder.save)

    def measure(self, step: int) -> DevResult:
        """Measure the current weights by the similarities of every text to the candidates of all."""
        self._encoder.eval()
        queries = self._encoder.encode_query(self._queries)
        documents = self._frozen(self.rows).cpu() if self._frozen else embedded(self._encoder, self._corpus, self.rows)
        similarities = (queries @ documents.T).numpy()
        own = np.take_along_axis(similarities, self._places, axis=1)  # [N, K], of every text's candidates
        scores = [nearest(tokens, row, self._k) for tokens, row in zip(self._token_logprobs, own, strict=True)]
        result, loss = _ensemble_result(self._config, step, scores, self._bytes), self._config.loss
        log_p = log_likelihood(torch.from_numpy(own.astype(np.float64)), loss.gamma)
        kl = float(text_losses(self._log_q, log_p, loss.direction.value).mean())
        return DevResult(step, result.bpb, result.temperature, kl)


def document_scores(scores: ScoredBatch, lm_score: str) -> np.ndarray:
    """Return z [N, K] float64."""
    z: np.ndarray = lm_scores(torch.tensor(scores.sum_logprobs), torch.tensor(scores.num_tokens), lm_score).numpy()
    return z


def nearest(token_logprobs: np.ndarray, similarities: np.ndarray, k: int) -> DocumentScores:
    """Keep the first `k` by similarity [K] of a text's candidates with log-probs [K, T]."""
    first = np.argsort(-similarities, kind="stable")[:k]
    return DocumentScores(token_logprobs[first], similarities[first])


# Questions -----------------------------------------------------------------------------------------------------------


class DevQuestions:
    """Development questions among a few thousand documents: their own, and BM25's results for them."""

    def __init__(self, questions: Sequence[OpenQuestion], corpus: CorpusStore, seed: int) -> None:
        self._corpus, self._queries = corpus, [question.example.query for question in questions]
        gold = corpus.rows_of({document for question in questions for document in question.example.gold})
        own = np.array([*gold.values()], np.int64)
        among = np.union1d(corpus.sample(np.random.default_rng([seed, 5]))[:SEARCHED], own)
        nearest, _ = search_bm25(lambda: texts_of(corpus, among), self._queries, min(NEAREST, len(among)))
        self.rows = among if len(among) <= SMALL else np.union1d(among[np.unique(nearest)], own)
        texts = corpus.texts(self.rows)
        self._is_right = np.zeros((len(questions), len(self.rows)), bool)
        for place, question in enumerate(questions):
            if question.example.gold:
                self._is_right[place] = np.isin(self.rows, [gold.get(doc, -1) for doc in question.example.gold])
            else:
                self._is_right[place] = [has_answer(text, question.answers) for text in texts]

    def __len__(self) -> int:
        return len(self._queries)

    def reciprocal_ranks(self, encoder: Encoder, frozen: FrozenDocuments | None = None) -> np.ndarray:
        """Return 1 / the rank of the first right document [N], 0 for a question without one."""
        encoder.eval()
        documents = frozen(self.rows).cpu() if frozen else embedded(encoder, self._corpus, self.rows)
        similarities = (encoder.encode_query(self._queries) @ documents.T).numpy()
        best = np.where(self._is_right, similarities, -np.inf).max(1, keepdims=True)
        ranks = 1 + ((similarities >= best) & ~self._is_right).sum(1)  # others of the same similarity come before
        return np.where(self._is_right.any(1), 1 / ranks, 0.0)


class QuestionChooser(Chooser):
    """Chooses by development questions among the weights of each measurement and interpolations with untuned weights.

    The untuned weights stay unless others have a shown gain in mean reciprocal rank. The highest lower end of the
    gain's 95% interval wins, after Bonferroni's correction for the measurements.
    """

    def __init__(
        self,
        config: Config,
        dev: DevQuestions,
        encoder: Encoder,
        frozen: FrozenDocuments | None,
        watch: Watch,
        loss: float = math.inf,
    ) -> None:
        """Take the untuned encoder, and its in-batch `loss` on training questions."""
        max_steps = config.train.max_steps
        super().__init__(watch, max(1, math.ceil(max_steps / NUM_LOOKS)), max_steps)
        self._dev, self._encoder, self._frozen, self._loss = dev, encoder, frozen, loss
        self.rows, self._before = dev.rows, np.zeros(len(dev))  # reciprocal ranks by the untuned weights
        self._untuned = self._trained()

    def start(self) -> None:
        """Measure the untuned weights, and end the training before its first step if there is nothing to gain."""
        with self.interpolated(0.0):
            self._before = self._dev.reciprocal_ranks(self._encoder, self._frozen)
            untuned = self._result(0, 1.0, self._before)
            if self._watch.first is None:
                self._watch.record(untuned, self._encoder.save, untuned.mrr)
        mrr = untuned.mrr or 0.0
        if mrr >= CEILING or self._loss <= LEAST_LOSS:
            log.info(
                f"nothing to gain: the untuned retriever has a mean reciprocal rank of {mrr:.3f} on {len(self._dev)} "
                f"development questions and a loss of {self._loss:.3f} nats on training questions; it stays unchanged"
            )
            self._watch.nothing_to_gain = True

    def finish(self, step: int) -> None:
        """Measure the weights after `step` steps, unless they were measured."""
        if self._watch.has(step):
            return
        results = []
        for share in SHARES:
            with self.interpolated(share):
                now = self._dev.reciprocal_ranks(self._encoder, self._frozen)
            results.append(self._result(step, share, now))
        best = max(results, key=lambda result: result.least_gain or 0.0)
        with self.interpolated(best.share or 0.0):
            self._watch.record(best, self._encoder.save, max(result.mrr or 0.0 for result in results))

    def _trained(self) -> dict[str, torch.Tensor]:
        """Return a copy of the trained weights."""
        return {
            name: weight.detach().clone() for name, weight in self._encoder.named_parameters() if weight.requires_grad
        }

    @contextmanager
    def interpolated(self, share: float) -> Iterator[None]:
        """Give the encoder (1 - share) * untuned + share * tuned weights in the block (Wortsman et al. 2022)."""
        tuned, weights = self._trained(), dict(self._encoder.named_parameters())
        try:
            with torch.no_grad():
                for name, weight in tuned.items():
                    weights[name].copy_(torch.lerp(self._untuned[name].to(weight.device), weight, share))
            yield
        finally:
            with torch.no_grad():
                for name, weight in tuned.items():
                    weights[name].copy_(weight)

    def _result(self, step: int, share: float, now: np.ndarray) -> DevResult:
        gains = now - self._before
        least = 0.0  # too few questions show no gain
        if len(gains) >= FEWEST_CLUSTERS:
            least = float(gains.mean() - SURE * gains.std() / math.sqrt(len(gains) - 1))
        return DevResult(step, mrr=float(now.mean()), share=share, least_gain=least)
