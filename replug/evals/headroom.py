"""How much better an ensemble could predict with the documents that it has: what an oracle reaches. Pure.

best_document   of the K documents the one with which the LM predicts the text best, alone
q_weighted      the mixture weighed by the LM's own scores, softmax(mean log-prob / beta): what training draws the
                retriever's weights towards (REPLUG, section 4.2), so tuning can hardly give more with these documents

Both know the text that they predict, and no retriever can. So some of what they gain is luck: of K documents that say
nothing of a text, the best still fits it better than the mean. `random` documents show how much.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from replug.config.methods import REPLUG, WITHOUT_RETRIEVER
from replug.evals.intervals import bits_of
from replug.models.ensemble import mix_token_logprobs

BETA = 0.1  # the paper's, where no training says another
BEST_DOCUMENT, Q_WEIGHTED = "best_document", "q_weighted"
ORACLES = {BEST_DOCUMENT: "bits_best_document", Q_WEIGHTED: "bits_q_weighted"}  # and their numbers in outcomes
LEAST_GAIN = 1e-4  # bits per byte: of less headroom a share would be noise


def oracle_bits(token_logprobs: np.ndarray, beta: float = BETA) -> dict[str, float]:
    """Return the bits of a text by both oracles, from log-probs [K, T] (nats) given each document."""
    scores = np.asarray(token_logprobs, dtype=np.float64).mean(axis=1)  # [K]
    return {
        ORACLES[BEST_DOCUMENT]: min(bits_of(given) for given in token_logprobs),
        ORACLES[Q_WEIGHTED]: bits_of(mix_token_logprobs(token_logprobs, scores, beta)),
    }


def headroom_lines(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Say what oracles would gain over each ensemble, and the part of REPLUG's that other retrievers reach.

    A method that reads one text has no headroom: its oracles are itself. A retriever is compared with `replug` mixing
    as many documents in the same way: `lsr@3/even` with `replug@3/even`.
    """
    rooms = {}
    for method, of in results.items():
        names = ("bpb", f"bpb_{Q_WEIGHTED}", f"bpb_{BEST_DOCUMENT}")
        if all(name in of for name in names):
            ensemble, q_weighted, best = (of[name]["value"] for name in names)
            if abs(ensemble - best) > LEAST_GAIN or abs(ensemble - q_weighted) > LEAST_GAIN:
                rooms[method] = ensemble, q_weighted, best
    lines = [
        f"Headroom of {method}: {ensemble:.4f} bits per byte; {q_weighted:.4f} weighed by the LM's own scores, "
        f"{best:.4f} by the best document alone."
        for method, (ensemble, q_weighted, best) in rooms.items()
    ]
    for method, (ensemble, _, _) in rooms.items():
        source = method.partition("@")[0].partition("/")[0]
        base = REPLUG + method.removeprefix(source)
        if source in (REPLUG, *WITHOUT_RETRIEVER) or base not in rooms:
            continue
        room = rooms[base][0] - rooms[base][1]
        if room > LEAST_GAIN:
            share = (rooms[base][0] - ensemble) / room
            lines.append(f"{method} gets {share:.0%} of what weights by the LM's own scores would gain over {base}.")
    return lines
