"""The Lightning module: the trainable encoder and one LSR step.

Queries, and documents unless `frozen` gives them, are encoded with gradient; the LM scores arrive as numbers. Lightning
passes a position: the step's number and a part of its batch. The source of batches knows the rest.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from replug.config.errors import NotFiniteError
from replug.config.schema import Config, TrainConfig
from replug.data.datamodule import Position
from replug.data.records import NO_INDEX, Example, RetrievedBatch, ScoredBatch
from replug.data.store import CorpusStore
from replug.evals.loop import Item
from replug.models.encoder import Encoder, first_numbers
from replug.models.hardware import to_device
from replug.train.loss import contrastive_losses, entropy, lm_scores, log_likelihood, text_losses
from replug.train.trained_weights import FrozenDocuments, bring_back_untrained, leave_out_untrained


class Batches(Protocol):
    """Gives a rank its scored batches."""

    def take(self, step: int) -> ScoredBatch:
        """Return the whole batch of a step."""
        ...


class Queries(Protocol):
    """Gives training examples by row: the queries of the searches, and ids for errors."""

    def examples(self, rows: np.ndarray) -> Sequence[Example] | Sequence[Item]:
        """Return examples in the requested order."""
        ...


class LSRModule(pl.LightningModule):
    """Trains an encoder from `prepare_encoder` on scored `batches`.

    `frozen` gives vectors of documents that do not learn. If the retriever is a pair, `encoder` holds both encoders.
    """

    def __init__(
        self,
        config: Config,
        encoder: Encoder,
        batches: Batches,
        queries: Queries,
        corpus: CorpusStore,
        frozen: FrozenDocuments | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.batches, self.frozen = encoder, batches, frozen
        self._queries, self._corpus = queries, corpus
        self._loss, self._train = config.loss, config.train
        self._dims = config.index.dims or encoder.dims  # the searched prefix of a vector (None: all of it)
        self.batch: ScoredBatch | None = None  # of the step that is under way
        self._is_last = False  # whether the newest of its micro-batches is the last
        self._metrics: list[dict[str, Tensor]] = []  # of its micro-batches so far
        self._losses: list[Tensor] = []  # of their texts

    def on_train_start(self) -> None:
        if self.frozen is not None:
            self.frozen.encoder.to(self.device)

    def training_step(self, position: Position, batch_idx: int) -> Tensor:
        """Return the mean loss over this rank's part of the batch; DDP and Lightning average over ranks and parts.

        The backbone may run under autocast. Similarities and loss are computed in float32. Nothing here waits for the
        device, which would then idle until the backward pass is launched.
        """
        if position.is_first:
            self.batch, self._metrics, self._losses = self.batches.take(position.step), [], []
        assert self.batch is not None
        ranks = self._num_ranks
        rank = self.global_rank if ranks > 1 else 0
        scored = share_of(self.batch, rank, ranks, position)
        self.encoder.eval()  # without dropout
        similarities, others = self.similarities(scored.retrieved)
        with torch.autocast(self.device.type, enabled=False):
            sums, counts = self._on_device(scored.sum_logprobs), self._on_device(scored.num_tokens)
            log_q = log_likelihood(lm_scores(sums, counts, self._loss.lm_score.value), self._loss.beta)
            losses, contrastive = self._terms(similarities, others, log_q)  # [B]
            loss, log_p = losses.mean(), log_likelihood(similarities, self._loss.gamma)
            self._losses.append(losses.detach())
            self._metrics.append(_metrics(loss, log_q, log_p))
            if contrastive is not None:
                self._metrics[-1]["train/contrastive"] = contrastive.detach().mean()
        assert log_p.dtype == log_q.dtype == loss.dtype == torch.float32
        self._is_last = position.is_last
        return loss

    def on_after_backward(self) -> None:
        """Fetch metrics from the device, now that the backward pass is launched."""
        if not self._is_last:
            return
        assert self.batch is not None
        metrics = self._mean_metrics()
        # All ranks have the same means, so all stop here at a loss that is not finite, before using the gradient.
        if not math.isfinite(metrics["train/loss"]):
            losses = torch.cat(self._losses)
            if self._num_ranks > 1:
                losses = self.trainer.strategy.all_gather(losses).flatten()  # in the batch's order
            require_finite_losses(losses.cpu().numpy(), self.batch.retrieved, self._queries, self._corpus)
        self.log_dict({**metrics, **_batch_metrics(self.batch)})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        leave_out_untrained(self.encoder, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        bring_back_untrained(self.encoder, checkpoint)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Require a finite gradient. All ranks share it, so all stop here, with unchanged weights.

        Log its norm, and the learning rate.
        """
        assert self.batch is not None
        batch = self.batch.retrieved
        gradients = [weight.grad for weight in self.encoder.parameters() if weight.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        self.log_dict({"train/grad_norm": norm, "train/lr": optimizer.param_groups[0]["lr"]})
        if not math.isfinite(norm):
            texts = ", ".join(example.id for example in self._queries.examples(batch.query_rows))
            raise NotFiniteError(f"step {batch.step}: the gradient is not finite; its texts are {texts}; {CAUSES}")

    @property
    def _num_ranks(self) -> int:
        return self.trainer.world_size if self._trainer is not None else 1

    def _mean_metrics(self) -> dict[str, Tensor]:
        """Return means over the parts of the step and over the ranks, which have the same number of texts."""
        means = torch.stack([torch.stack([*part.values()]) for part in self._metrics]).mean(0)
        if self._num_ranks > 1:
            means = self.trainer.strategy.reduce(means, reduce_op="mean")
        return dict(zip(self._metrics[0], means.cpu(), strict=True))  # in one fetch from the device

    def similarities(self, batch: RetrievedBatch) -> tuple[Tensor, Tensor | None]:
        """Return s(d, x) [B, K], and with `contrastive` s of all U documents [B, U], with the query's own at -infinity.

        They are float32 with gradient, of the searched dimensions.
        """
        queries = [example.query for example in self._queries.examples(batch.query_rows)]
        unique, place = np.unique(batch.doc_rows, return_inverse=True)
        query_vectors = self.encoder.encode_with_gradient(self.encoder.token_ids(queries, "query"), task="query")
        if self.frozen is not None:
            doc_vectors = self.frozen(unique)
        else:
            doc_vectors = self.encoder.encode_with_gradient(self.encoder.document_ids(self._corpus, unique))
        places = to_device(torch.from_numpy(place.reshape(batch.doc_rows.shape)), doc_vectors.device)
        q, d = (first_numbers(of, self._dims, self.encoder.similarity) for of in (query_vectors, doc_vectors))
        others = None
        if self._loss.contrastive:
            with torch.autocast(self.device.type, enabled=False):
                others = (q.float() @ d.float().T).scatter(1, places, -torch.inf)
        return inner_products(q, d[places]), others

    def _terms(self, similarities: Tensor, others: Tensor | None, log_q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return each text's loss and its contrastive term [B], or None if that is off."""
        settings = self._loss
        kl = text_losses(log_q, log_likelihood(similarities, settings.gamma), settings.direction.value)
        if others is None:
            return kl, None
        contrastive = contrastive_losses(similarities / settings.gamma, log_q, others / settings.gamma)
        return kl + settings.contrastive * contrastive, contrastive

    def _on_device(self, numbers: np.ndarray) -> Tensor:
        """Return numbers as float32 on the device."""
        return to_device(torch.from_numpy(numbers).float(), self.device)

    def configure_optimizers(self) -> Any:
        settings = self._train
        trained = [weight for weight in self.encoder.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.0)
        schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def share_of(batch: ScoredBatch, rank: int, ranks: int, position: Position) -> ScoredBatch:
    """Return one rank's micro-batch of this part. All micro-batches have the same size."""
    size = len(batch.num_tokens) // (ranks * position.parts)
    begin = (rank * position.parts + position.part) * size
    return batch.take(slice(begin, begin + size))


def inner_products(queries: Tensor, documents: Tensor) -> Tensor:
    """Return [B, K] of vectors [B, D] and [B, K, D], in float32: autocast would compute them in bfloat16."""
    with torch.autocast(queries.device.type, enabled=False):
        return torch.einsum("bd,bkd->bk", queries.float(), documents.float())


def learning_rate_factor(step: int, settings: TrainConfig) -> float:
    """Return the share of the peak rate at a step from 0: linear warmup, then linear decay to zero after the last."""
    warmup = round(WARMUP_RATIO * settings.max_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return max(0.0, (settings.max_steps - step) / max(1, settings.max_steps - warmup))


def _metrics(loss: Tensor, log_q: Tensor, log_p: Tensor) -> dict[str, Tensor]:
    log_p = log_p.detach()
    if log_p.shape[1] == 1:  # questions: one document has no order
        return {"train/loss": loss.detach()}
    return {
        "train/loss": loss.detach(),
        "lm/entropy": entropy(log_q).mean(),
        "retriever/entropy": entropy(log_p).mean(),
        "retriever/rank_correlation": rank_correlation(log_q, log_p),
    }


def _batch_metrics(scored: ScoredBatch) -> dict[str, float]:
    """Return LM metrics of the whole batch, and index metrics unless the batch comes from labels."""
    batch, means = scored.retrieved, scored.sum_logprobs / scored.num_tokens[:, None]
    if means.shape[1] == 1:
        return {}
    metrics = {"lm/mean_logprob": float(means.mean())}
    if batch.index_version != NO_INDEX:
        metrics |= {
            "index/version": float(batch.index_version),
            "index/age_steps": float(batch.step - batch.index_step),
            "pipeline/query_age_steps": float(batch.step - batch.query_step),
        }
    return metrics


def rank_correlation(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return Kendall's tau between the two orders of documents [B, K], over all pairs of a query's documents.

    1: LM and retriever have the same order. -1: one is the reverse of the other. Pairs that the LM ties do not count.
    """
    q, p = (scores[:, :, None] - scores[:, None, :] for scores in (log_q, log_p))
    compared = q != 0
    return (q.sign() * p.sign()).sum() / compared.sum().clamp(min=1)


WARMUP_RATIO = 0.1  # of the steps (paper)
CAUSES = "expected a finite number: is train.lr too high, or are loss.gamma and loss.beta too low?"


def require_finite_losses(losses: np.ndarray, batch: RetrievedBatch, queries: Queries, corpus: CorpusStore) -> None:
    """Raise NotFiniteError if losses [B] are not finite, with their texts and the documents of the first."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        texts = [example.id for example in queries.examples(batch.query_rows[bad])]
        documents = [document.id for document in corpus.documents(batch.doc_rows[bad[0]])]
        raise NotFiniteError(
            f"step {batch.step}: the loss of {len(bad)} of {len(losses)} texts is not finite ({losses[bad[0]]}): "
            f"{', '.join(texts)}; documents of the first: {', '.join(documents)}; {CAUSES}"
        )


def require_finite_weights(parameters: Iterable[Tensor], step: int) -> None:
    """Raise NotFiniteError for weights that are not finite, before they are written.

    Their largest magnitude says it: one transfer from the device for all of them.
    """
    largest = torch.nn.utils.get_total_norm([weight.detach() for weight in parameters], norm_type=math.inf)
    if not torch.isfinite(largest):
        raise NotFiniteError(f"the weights after {step} steps are not finite, and are not saved; {CAUSES}")
