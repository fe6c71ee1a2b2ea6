"""What is no finite number ends the run at its step, with the ids it came from, before a checkpoint is replaced.

The newest checkpoint is then of a step before. Every rank looks at numbers that all ranks have, so that all of them
end at the same step, and none waits for another.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from replug.config.errors import NotFiniteError
from replug.data.records import RetrievedBatch
from replug.data.store import CorpusStore, WindowStore

CAUSES = "expected a finite number: is train.lr too high, or are loss.gamma and loss.beta too low?"


def require_finite_losses(losses: np.ndarray, batch: RetrievedBatch, queries: WindowStore, corpus: CorpusStore) -> None:
    """Of the texts of a batch [B]; the message names those that are not, and the documents of the first."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        texts = [window.id for window in queries.windows(batch.query_rows[bad])]
        documents = [document.id for document in corpus.documents(batch.doc_rows[bad[0]])]
        raise NotFiniteError(
            f"step {batch.step}: the loss of {len(bad)} of {len(losses)} texts is not finite ({losses[bad[0]]}): "
            f"{', '.join(texts)}; documents of the first: {', '.join(documents)}; {CAUSES}"
        )


def require_finite_gradient(parameters: Iterable[Tensor], batch: RetrievedBatch, queries: WindowStore) -> None:
    """Before an optimizer takes it into the weights."""
    if not _are_finite([weight.grad for weight in parameters if weight.grad is not None]):
        texts = ", ".join(window.id for window in queries.windows(batch.query_rows))
        raise NotFiniteError(f"step {batch.step}: the gradient is not finite; its texts are {texts}; {CAUSES}")


def require_finite_weights(parameters: Iterable[Tensor], step: int) -> None:
    """Before they are written."""
    if not _are_finite([weight.detach() for weight in parameters]):
        raise NotFiniteError(f"the weights after {step} steps are not finite, and are not saved; {CAUSES}")


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    """By the largest magnitude, in which what is no number stays: one look at the device for all of them."""
    return bool(torch.isfinite(torch.nn.utils.get_total_norm(tensors, norm_type=math.inf)))
