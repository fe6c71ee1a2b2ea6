"""How much better an ensemble could predict with the documents that it has: what an oracle reaches. Pure.

best_document   of the K documents the one with which the LM predicts the text best, alone
q_weighted      the mixture weighed by the LM's own scores, softmax(mean log-prob / beta): what training draws the
                retriever's weights towards (REPLUG, section 4.2), so tuning can hardly give more with these documents

Both know the text that they predict, and no retriever can. So some of what they gain is luck: of K documents that say
nothing of a text, the best still fits it better than the mean. `random` documents show how much.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from replug.evals.intervals import bits_of
from replug.models.ensemble import mix_token_logprobs

BETA = 0.1  # the paper's, where no training says another
BEST_DOCUMENT, Q_WEIGHTED = "best_document", "q_weighted"
ORACLES = {BEST_DOCUMENT: "bits_best_document", Q_WEIGHTED: "bits_q_weighted"}  # and their numbers in outcomes
NO_NAMES: Mapping[str, str] = MappingProxyType({})
LEAST_GAIN = 1e-4  # bits per byte: of less headroom a share would be noise


def oracle_bits(token_logprobs: np.ndarray, beta: float = BETA) -> dict[str, float]:
    """Bits of a text by both oracles, from log-probs [K, T] (nats) given each document."""
    scores = np.asarray(token_logprobs, dtype=np.float64).mean(axis=1)  # [K]
    return {
        ORACLES[BEST_DOCUMENT]: min(bits_of(given) for given in token_logprobs),
        ORACLES[Q_WEIGHTED]: bits_of(mix_token_logprobs(token_logprobs, scores, beta)),
    }


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bits per byte of one ensemble, and by both oracles on its documents."""

    ensemble: float
    q_weighted: float
    best_document: float

    def share(self, reached: float) -> float | None:
        """Which part of (ensemble − q_weighted) another ensemble of `reached` bits per byte gets.

        None where there is next to none to get.
        """
        room = self.ensemble - self.q_weighted
        return (self.ensemble - reached) / room if room > LEAST_GAIN else None


def headroom_lines(
    ensembles: Mapping[str, Headroom],
    sizes: Mapping[str, int],
    bases: Mapping[str, str],
    names: Mapping[str, str] = NO_NAMES,
) -> list[str]:
    """For a reader, of ensembles by method: what oracles would gain, and which part of it other retrievers get.

    `sizes` are the methods' numbers of documents, `bases` the method of which each gets a share, with as many, and
    `names` what readers call them.
    """
    lines = []
    for method, of in ensembles.items():
        lines.append(
            f"headroom of {names.get(method, method)}, {sizes[method]} documents: {of.ensemble:.4f} bits per byte; "
            f"{of.q_weighted:.4f} weighed by the LM's own scores, {of.best_document:.4f} by the best document alone"
        )
    for method, base in bases.items():
        share = ensembles[base].share(ensembles[method].ensemble)
        if share is not None:
            lines.append(
                f"{names.get(method, method)} gets {share:.0%} of what weights by the LM's own scores would gain over "
                f"{names.get(base, base)}"
            )
    return lines
