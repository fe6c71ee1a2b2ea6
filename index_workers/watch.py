"""What a refresh did to the index, in numbers. Pure.

Recall: how much of the exact top-k the served kind finds. Overlap: how much of the top-k stayed when the version
changed under the same queries. Drift: how far the documents' vectors turned.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Measures:
    """All between 0 and 1 but `drift`, 1 - cosine, which reaches 2. A first version has nothing to be compared with."""

    recall: float = 1.0
    overlap: float = 1.0
    drift: float = 0.0


def top_k_overlap(rows: np.ndarray, others: np.ndarray) -> float:
    """Mean share of each query's documents [B, K] that the other answer [B, K] has too."""
    shares = [len(np.intersect1d(a, b)) / len(a) for a, b in zip(rows, others, strict=True)]
    return float(np.mean(shares))


def mean_drift(vectors: np.ndarray, others: np.ndarray) -> float:
    """1 - mean cosine between the two vectors [N, D] of each document."""
    a, b = vectors.astype(np.float64), others.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(1 - np.mean((a * b).sum(axis=1) / np.maximum(norms, 1e-12)))


def sample_rows(num_documents: int, at_most: int = 4096) -> np.ndarray:
    """Rows of the documents whose drift is measured: evenly spread, the same at every refresh."""
    return np.unique(np.linspace(0, num_documents - 1, min(num_documents, at_most)).round().astype(np.int64))
