"""Measure development texts while training: bits per byte of the retriever's ensemble, and the best weights so far.

The retriever orders documents of each text. The ensemble of the first `evaluate.k` is mixed at every token (REPLUG,
section 3.2). Its weights are softmax(s / T): T is `ensemble.temperature` if that is a number, else it is fitted to the
texts, since softmax(s) of cosines that differ by hundredths is nearly uniform even after training.

A training on labels measures the stored candidates (`LabelledDevTexts`) without the LM. A live training searches each
index version and asks the LM (`SearchedDevTexts`). `Watch` keeps the best weights of either. Held-out texts choose
nothing.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.files import write_json, writing
from replug.data.labels import Labels
from replug.data.records import Example, ScoredBatch
from replug.data.store import PreparedSet
from replug.evals.ensemble_temperatures import DocumentScores, ensemble_bits, fit_temperature
from replug.evals.intervals import bits_of
from replug.index_workers.build_plan import IndexState
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.train.evaluation import search_examples
from replug.train.loss import lm_scores, log_likelihood, text_losses
from replug.train.pipeline import score_in_calls
from replug.train.trained_weights import FrozenDocuments, embedded
from replug.train.workers import Workers

RESULT = "dev.json"  # in the folder of the best weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DevResult:
    """A measurement of the weights of `step` on development texts or questions.

    Texts give bits per byte of the ensemble at `temperature`. Labelled candidates give two more numbers. `kl` is the
    training loss. `scored_share` is the share of the `k` nearest candidates of all development texts that the LM has
    scored for the text. Where it falls, a search finds documents that `bpb` does not measure. Questions give the mean
    reciprocal rank of the first right document, the `share` of the way from the untuned weights that was measured, and
    the `least_gain` over these: the lower end of its interval.
    """

    step: int
    bpb: float | None = None
    temperature: float | None = None
    kl: float | None = None
    scored_share: float | None = None
    mrr: float | None = None
    success_at_1: float | None = None
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


class TextChooser(Chooser):
    """Chooses weights by labelled development texts, without calls to the LM."""

    def __init__(
        self,
        config: Config,
        dev: "LabelledDevTexts",
        encoder: Encoder,
        frozen: FrozenDocuments | None,
        watch: Watch,
        every: int,
    ) -> None:
        super().__init__(watch, every, config.train.max_steps)
        self._dev, self._encoder, self._frozen, self.rows = dev, encoder, frozen, dev.rows

    def finish(self, step: int) -> None:
        """Measure the weights after `step` steps, unless they were measured."""
        if not self._watch.has(step):
            self._watch.record(self._dev.measure(step, self._encoder, self._frozen), self._encoder.save)


def describe_weights(weights: Mapping[str, Any]) -> str:
    """Return a description of the tuned retriever's weights from their record in `fitted.json`."""
    if weights["best"] is None:
        return f"step {weights['step']}, the last"
    best = DevResult(**weights["best"])
    if best.measured_on == "questions" and best.step == 0:
        return "step 0, the untuned weights, since no others show a gain on development questions"
    part = "" if best.share in (None, 1) else f" ({best.share:.0%} of the way to it)"
    return f"step {best.step}{part}, the best of {weights['steps']} on development {best.measured_on}"


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


class LabelledDevTexts:
    """Labelled development texts; `rows` are the corpus rows of all candidates."""

    def __init__(self, config: Config, labels: Labels, data: PreparedSet) -> None:
        self._config, self._corpus = config, data.corpus
        examples = data.require_dev().examples()
        self._queries = [example.query for example in examples]
        self._bytes = sum(len(example.continuation.encode()) for example in examples)
        scores, (self._token_logprobs, alone) = labels.scores("dev"), labels.token_logprobs()
        self.bpb_alone = sum(bits_of(tokens) for tokens in alone) / self._bytes  # of the LM without documents
        doc_rows = scores.retrieved.doc_rows
        self._k = min(config.evaluate.k, doc_rows.shape[1])
        self.rows, places = np.unique(doc_rows, return_inverse=True)
        self._places = places.reshape(doc_rows.shape)
        z = torch.from_numpy(document_scores(scores, config.loss.lm_score.value))
        self._log_q = log_likelihood(z, config.loss.beta)

    def measure(self, step: int, encoder: Encoder, frozen: FrozenDocuments | None = None) -> DevResult:
        """Measure the current weights. `frozen` gives the vectors of documents that do not learn."""
        encoder.eval()
        similarities = self.similarities(encoder, frozen)
        own = np.take_along_axis(similarities, self._places, axis=1)  # [N, K], of every text's candidates
        scores = [nearest(tokens, row, self._k) for tokens, row in zip(self._token_logprobs, own, strict=True)]
        result, loss = _ensemble_result(self._config, step, scores, self._bytes), self._config.loss
        log_p = log_likelihood(torch.from_numpy(own.astype(np.float64)), loss.gamma)
        kl = float(text_losses(self._log_q, log_p, loss.direction.value).mean())
        return DevResult(step, result.bpb, result.temperature, kl, scored_share(similarities, self._places, self._k))

    def similarities(self, encoder: Encoder, frozen: FrozenDocuments | None = None) -> np.ndarray:
        """Return similarities [N, D] of every text to the candidates of all."""
        queries = encoder.encode_query(self._queries)
        documents = frozen(self.rows).cpu() if frozen else embedded(encoder, self._corpus, self.rows)
        products: np.ndarray = (queries @ documents.T).numpy()
        return products


def document_scores(scores: ScoredBatch, lm_score: str) -> np.ndarray:
    """Return z [N, K] float64."""
    z: np.ndarray = lm_scores(torch.tensor(scores.sum_logprobs), torch.tensor(scores.num_tokens), lm_score).numpy()
    return z


def scored_share(similarities: np.ndarray, places: np.ndarray, k: int) -> float:
    """Return the share of the `k` nearest of D documents, by similarities [N, D], that are among a text's `places`."""
    first = np.argpartition(-similarities, k - 1, axis=1)[:, :k]
    return float(np.mean([np.isin(found, own).mean() for found, own in zip(first, places, strict=True)]))


def nearest(token_logprobs: np.ndarray, similarities: np.ndarray, k: int) -> DocumentScores:
    """Keep the first `k` by similarity [K] of a text's candidates with log-probs [K, T]."""
    first = np.argsort(-similarities, kind="stable")[:k]
    return DocumentScores(token_logprobs[first], similarities[first])
