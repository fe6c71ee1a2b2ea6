"""The Lightning module: the trainable encoder and one LSR step.

Both the query and its documents are encoded with gradient (DESIGN: only the retriever learns); the
LM's scores arrive as numbers. The batch that Lightning hands over is the step's number: the pipeline knows the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from data.records import RetrievedBatch, ScoredBatch
from data.store import CorpusStore, WindowStore
from models.encoder import Encoder
from train.loss import entropy, lm_scores, log_likelihood, lsr_loss
from train.pipeline import BatchPipeline


@dataclass(frozen=True, slots=True)
class LossSettings:
    gamma: float
    beta: float
    lm_score: str
    direction: str


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    kind: str  # adamw or adam
    lr: float
    weight_decay: float
    warmup_ratio: float
    max_steps: int


class LSRModule(pl.LightningModule):
    """Trains `encoder` on what `pipeline` delivers. `attach` gives it the pipeline, which needs its weights."""

    def __init__(
        self,
        encoder: Encoder,
        queries: WindowStore,
        corpus: CorpusStore,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        dropout: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self._queries, self._corpus = queries, corpus
        self._loss, self._optimizer = loss, optimizer
        self._dropout, self._seed = dropout, seed
        self.pipeline: BatchPipeline | None = None

    def attach(self, pipeline: BatchPipeline) -> None:
        self.pipeline = pipeline

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors [B, D] by the weights as they are, without gradient or dropout."""
        self.encoder.eval()
        return self.encoder.encode(texts).numpy()

    def training_step(self, step: int, batch_idx: int) -> Tensor:
        assert self.pipeline is not None, "attach a pipeline first"
        scored = self.pipeline.take(step)
        # Dropout's randomness follows from the step, so a resumed run draws the same.
        torch.manual_seed(hash((self._seed, step)) % 2**63)
        self.encoder.train(self._dropout)
        log_p = log_likelihood(self.similarities(scored.retrieved), self._loss.gamma)
        log_q = log_likelihood(self._lm_scores(scored), self._loss.beta)
        loss = lsr_loss(log_q, log_p, self._loss.direction)
        self.log_dict(_metrics(loss, log_q, log_p, scored), prog_bar=False, logger=True)
        return loss

    def similarities(self, batch: RetrievedBatch) -> Tensor:
        """s(d, x) [B, K] with gradient; a document that several queries found is encoded once."""
        contexts = [window.context for window in self._queries.windows(batch.query_rows)]
        unique, place = np.unique(batch.doc_rows, return_inverse=True)
        query_vectors = self.encoder.encode_with_gradient(self.encoder.token_ids(contexts))  # [B, D]
        doc_vectors = self.encoder.encode_with_gradient(self.encoder.document_ids(self._corpus, unique))  # [U, D]
        chosen = doc_vectors[torch.from_numpy(place.reshape(batch.doc_rows.shape)).to(doc_vectors.device)]
        return torch.einsum("bd,bkd->bk", query_vectors.float(), chosen.float())

    def configure_optimizers(self) -> Any:
        settings = self._optimizer
        kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[settings.kind]
        trained = [weight for weight in self.encoder.parameters() if weight.requires_grad]
        optimizer = kind(trained, lr=settings.lr, weight_decay=settings.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _lm_scores(self, scored: ScoredBatch) -> Tensor:
        sums = torch.from_numpy(scored.sum_logprobs).to(self.device, torch.float32)
        counts = torch.from_numpy(scored.num_tokens).to(self.device, torch.float32)
        return lm_scores(sums, counts, self._loss.lm_score)


def learning_rate_factor(step: int, settings: OptimizerSettings) -> float:
    """Share of the peak rate at a step counted from 0: linear warmup, then linear decay to zero after the last."""
    warmup = round(settings.warmup_ratio * settings.max_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return max(0.0, (settings.max_steps - step) / max(1, settings.max_steps - warmup))


def _metrics(loss: Tensor, log_q: Tensor, log_p: Tensor, scored: ScoredBatch) -> dict[str, float | Tensor]:
    batch = scored.retrieved
    means = scored.sum_logprobs / scored.num_tokens[:, None]
    return {
        "train/loss": loss.detach(),
        "lm/entropy": entropy(log_q).mean(),
        "lm/top1_mass": log_q.exp().amax(-1).mean(),
        "lm/mean_logprob": float(means.mean()),
        "lm/spread": float(means.std(axis=1).mean()),
        "retriever/entropy": entropy(log_p.detach()).mean(),
        "retriever/top1_mass": log_p.detach().exp().amax(-1).mean(),
        "retriever/agreement": _agreement(log_q, log_p.detach()),
        "index/version": float(batch.index_version),
        "index/age_steps": float(batch.step - batch.index_step),
        "pipeline/query_age_steps": float(batch.step - batch.query_step),
        "pipeline/wait_seconds": scored.wait_seconds,
    }


def _agreement(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Share of document pairs that LM and retriever order alike, averaged over queries (1 alike, 0 reversed)."""
    q, p = (scores[:, :, None] - scores[:, None, :] for scores in (log_q, log_p))
    compared = q != 0
    return ((q * p > 0) & compared).sum() / compared.sum().clamp(min=1)
