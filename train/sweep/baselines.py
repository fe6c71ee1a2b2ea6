"""What a sweep's trials are compared with on development texts: no document, the retriever as it was, and oracles.

All from the labels, without an LM and without an encoder: they hold the log-probs of every token and the similarities
of the retriever that found the candidates.
"""

from dataclasses import dataclass

from replug.data.labels import Labels
from replug.evals.headroom import ORACLES, Headroom, oracle_bits
from replug.evals.metrics import bits_of
from replug.evals.temperature_fit import fit_temperature
from replug.train.labels.dev import nearest


@dataclass(frozen=True, slots=True)
class Baselines:
    """Bits per byte of development texts: `alone` without documents, `start` of the retriever as it was."""

    alone: float
    start: Headroom
    temperature: float  # of `start`


def baselines_of(labels: Labels, k: int, beta: float) -> Baselines:
    """Of ensembles of the `k` candidates that the retriever as it was found nearest, at its own best temperature."""
    texts = labels.texts("dev")
    scores = [nearest(tokens, of, k) for tokens, of in zip(texts.token_logprobs, texts.similarities, strict=True)]
    num_bytes = sum(len(row["continuation"].encode()) for row in labels.rows("dev"))
    fit = fit_temperature(scores)
    oracles = [oracle_bits(text.token_logprobs, beta) for text in scores]
    totals = {name: sum(of[bits] for of in oracles) / num_bytes for name, bits in ORACLES.items()}
    alone = sum(bits_of(tokens) for tokens in texts.token_logprobs_alone) / num_bytes
    return Baselines(alone, Headroom(ensemble=fit.bits / num_bytes, **totals), fit.temperature)
