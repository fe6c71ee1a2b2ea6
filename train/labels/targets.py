"""z of each labelled document. Pure. Arrays: N texts, K documents of each. Log-probs are in nats."""

import numpy as np
import torch

from replug.data.labels import LabelledTexts
from replug.train.loss import lm_scores


def document_scores(texts: LabelledTexts, lm_score: str) -> np.ndarray:
    """Return z [N, K] float64."""
    scores: np.ndarray = lm_scores(torch.tensor(texts.sum_logprobs), torch.tensor(texts.num_tokens), lm_score).numpy()
    return scores
