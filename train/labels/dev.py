"""How good a retriever is on labelled development texts, without an LM and without an index.

Its similarities order each text's candidates. The ensemble of the first k is mixed at every token (REPLUG, section 3.2)
from the stored log-probs, and is what the LM would say of these documents. Weights are softmax(s / T): unless a T is
given it is the best one, since softmax(s) of cosines that differ by hundredths is nearly uniform whatever was learned.

A search finds other documents than a text's candidates. How many is known without an LM: `scored_share`.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from replug.data.datamodule import Position
from replug.data.files import write_json, writing
from replug.data.labels import LabelledTexts
from replug.data.store import CorpusStore, ExampleStore
from replug.evals.intervals import bits_of
from replug.evals.temperature_fit import DocumentScores, ensemble_bits, fit_temperature
from replug.models.encoder import Encoder
from replug.train.loss import lm_scores, log_likelihood, text_losses
from replug.train.module import LossSettings, VectorsOf
from replug.train.run_dir import RunDirectory


@dataclass(frozen=True, slots=True)
class DevLook:
    """One look at the development texts: bits per byte of the ensemble at `temperature`, and the training loss's KL.

    `scored_share`: of the `k` nearest among the candidates of all development texts, the share that the LM has scored
    for the text. Where it falls, a search finds what `bpb` knows nothing of.
    """

    step: int
    bpb: float
    kl: float
    temperature: float
    scored_share: float


class DevTexts:
    """Labelled development texts, to be looked at again and again; `rows` are the corpus' of all candidates.

    The ensemble has at most `k` documents, at a `temperature` that is given, or the best for the texts.
    """

    def __init__(
        self,
        texts: LabelledTexts,
        store: ExampleStore,
        corpus: CorpusStore,
        loss: LossSettings,
        k: int,
        temperature: float | None = None,
    ) -> None:
        self._texts, self._corpus, self._loss = texts, corpus, loss
        examples = store.examples()
        self._contexts = [example.context for example in examples]
        self._bytes = sum(len(example.continuation.encode()) for example in examples)
        self.k, self._temperature = min(k, texts.doc_rows.shape[1]), temperature
        self.rows, places = np.unique(texts.doc_rows, return_inverse=True)
        self._places = places.reshape(texts.doc_rows.shape)
        scores = torch.from_numpy(document_scores(texts, loss.lm_score))
        self._log_q = log_likelihood(scores, loss.beta)

    @property
    def num_texts(self) -> int:
        return len(self._contexts)

    @property
    def bpb_alone(self) -> float:
        """Bits per byte of the LM without documents."""
        return sum(bits_of(tokens) for tokens in self._texts.token_logprobs_alone) / self._bytes

    def look(self, step: int, encoder: Encoder, vectors_of: VectorsOf | None = None) -> DevLook:
        """Look by the weights as they are, and documents' vectors where these do not come from the encoder."""
        encoder.eval()
        similarities = self.similarities(encoder, vectors_of)
        own = np.take_along_axis(similarities, self._places, axis=1)  # [N, K], of every text's candidates
        scores = [nearest(tokens, of, self.k) for tokens, of in zip(self._texts.token_logprobs, own, strict=True)]
        if self._temperature is not None:
            bits, temperature = ensemble_bits(scores, self._temperature), self._temperature
        else:
            fit = fit_temperature(scores)
            bits, temperature = fit.bits, fit.temperature
        log_p = log_likelihood(torch.from_numpy(own.astype(np.float64)), self._loss.gamma)
        kl = float(text_losses(self._log_q, log_p, self._loss.direction).mean())
        scored = scored_share(similarities, self._places, self.k)
        return DevLook(step, bits / self._bytes, kl, temperature, scored)

    def similarities(self, encoder: Encoder, vectors_of: VectorsOf | None = None) -> np.ndarray:
        """Return [N, D], of every text and the candidates of all."""
        queries = encoder.encode_query(self._contexts)
        documents = (vectors_of or partial(embedded, encoder, self._corpus))(self.rows)
        found: np.ndarray = (queries @ documents.T).numpy()
        return found


def document_scores(texts: LabelledTexts, lm_score: str) -> np.ndarray:
    """Return z [N, K] float64."""
    scores: np.ndarray = lm_scores(torch.tensor(texts.sum_logprobs), torch.tensor(texts.num_tokens), lm_score).numpy()
    return scores


def embedded(documents: Encoder, corpus: CorpusStore, rows: np.ndarray) -> Tensor:
    """Return vectors [N, D] of the corpus' rows, without gradient."""
    return documents.encode_tokens(documents.document_ids(corpus, rows), prompt=documents.prompts.document)


def scored_share(similarities: np.ndarray, places: np.ndarray, k: int) -> float:
    """Of the `k` nearest of D documents, by similarities [N, D], the share that are among a text's `places` [N, K]."""
    first = np.argpartition(-similarities, k - 1, axis=1)[:, :k]
    return float(np.mean([np.isin(found, own).mean() for found, own in zip(first, places, strict=True)]))


def nearest(token_logprobs: np.ndarray, similarities: np.ndarray, k: int) -> DocumentScores:
    """Of a text's candidates, log-probs [K, T] and similarities [K], the first `k` by similarity."""
    first = np.argsort(-similarities, kind="stable")[:k]
    return DocumentScores(token_logprobs[first], similarities[first])


class DevWatch(pl.Callback):
    """Looks at the development texts before the first step and every so many; may stop the training.

    The best weights lie in `RUN_DIR/dev_best`, and their look in dev_best.json, written last. An interrupted run does
    the same steps again and keeps the same weights again. The state in a checkpoint is the best look, the last one, and
    how many came to nothing since.
    """

    def __init__(
        self, look: Callable[[int], DevLook], run: RunDirectory, every_steps: int, patience: int | None
    ) -> None:
        self._look_at, self._run, self._every = look, run, every_steps
        self._patience = patience
        self.first: DevLook | None = None
        self.best: DevLook | None = None
        self._last: DevLook | None = None
        self._in_vain = 0

    @property
    def is_over(self) -> bool:
        """Whether training ends here."""
        return self._patience is not None and self._in_vain >= self._patience

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run that was resumed has looked already."""
        if self.best is None:
            self._look(trainer, pl_module)
        trainer.should_stop = self.is_over

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Position, batch_idx: int
    ) -> None:
        if not batch.is_last:
            return
        step = trainer.global_step
        if step % self._every == 0 or step == trainer.max_steps:
            self._look(trainer, pl_module)
            trainer.should_stop = self.is_over
        assert self._last is not None
        # At every step: Lightning would repeat a value that is logged now and then.
        pl_module.log_dict({f"dev/{name}": float(value) for name, value in asdict(self._last).items()})

    def state_dict(self) -> dict[str, Any]:
        looks = {"first": self.first, "best": self.best, "last": self._last}
        return {name: asdict(look) for name, look in looks.items() if look is not None} | {"in_vain": self._in_vain}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first, self.best, self._last = (DevLook(**state_dict[name]) for name in ("first", "best", "last"))
        self._in_vain = state_dict["in_vain"]

    def _look(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        look = self._last = self._look_at(trainer.global_step)
        self.first = self.first or look
        if self.best is None or look.bpb < self.best.bpb:
            self.best, self._in_vain = look, 0
            self._keep(module, look)
        else:
            self._in_vain += 1

    def _keep(self, module: pl.LightningModule, look: DevLook) -> None:
        """Save the module's encoder in place of what was kept before."""
        partial = self._run.dev_best.with_name("dev_best.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with writing(partial):
            module.encoder.save(partial)  # type: ignore[union-attr, operator] # the encoder of the module
            shutil.rmtree(self._run.dev_best, ignore_errors=True)
            partial.replace(self._run.dev_best)
        write_json(self._run.dev_best_mark, asdict(look))
