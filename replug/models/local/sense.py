"""Whether an LM makes sense of language: what the probe of a server asks, asked of local weights.

Weights with another model's tokenizer, or with layers that were never trained, give finite scores like any other. But
to them a sentence is no likelier than its words in another order, which it is by nats a token to any LM that read its
language. An LM that looks ahead, as an encoder does, scores a text by what stands after it.
"""

import random
from collections.abc import Sequence

import numpy as np

from replug.config.errors import UserError
from replug.models.black_box_lm import BlackBoxLM

ENGLISH = (
    "The keeper of the lighthouse painted seven wooden boats green before the storm came in from the sea.",
    "To bake bread you need flour and water and salt and a warm oven and a little patience.",
    "The committee met on Tuesday and agreed on a budget for the new school in the north of the city.",
)
OTHERS = (  # for LMs that read little or no English
    "El tren de la mañana llega a la estación a las ocho y sale otra vez a las nueve.",
    "Der Zug aus Hamburg kommt um acht Uhr an und fährt um neun Uhr wieder in den Norden ab.",
    "Le train du matin arrive à la gare à huit heures et repart vers le nord à neuf heures.",
    "Утренний поезд приходит на вокзал в восемь часов и снова уходит на север в девять часов.",
    "早上的火车八点钟到达车站，九点钟又开往北方的城市。",
    "朝の電車は八時に駅に着いて、九時にまた北の町へ出発します。",
    "for row in range(len(table)): for column in range(len(table[row])): total = total + table[row][column]",
)
# Nats a token that order is worth. LMs of 135M parameters gain 1.5 to 4.4; other models' tokenizers give -0.8 to 0.5.
LEAST_GAIN, LEAST_GAIN_OF_ONE = 0.5, 1.0
LEAST_OTHERS = 2
TOLERANCE_NATS = 0.15  # of a token's log-prob, which bfloat16 moves where a batch has other texts


def require_sense(lm: BlackBoxLM, path: str) -> None:
    """Raise UserError for an LM to which order means nothing, or which looks ahead. Asks it for a dozen short texts."""
    _require_no_look_ahead(lm, path)
    gains = order_gains(lm, ENGLISH)
    if np.mean(gains) >= LEAST_GAIN:
        return
    others = order_gains(lm, OTHERS)
    if sum(gain >= LEAST_GAIN_OF_ONE for gain in others) >= LEAST_OTHERS:
        return
    raise UserError(
        f"lm.path: {path} makes no sense of language: a sentence is only {np.mean(gains):.2f} nats a token likelier "
        f"than its words in another order, expected {LEAST_GAIN:g}; are the tokenizer and the weights of one model, "
        "and were the weights trained?"
    )


def order_gains(lm: BlackBoxLM, texts: Sequence[str]) -> list[float]:
    """Nats a token by which each text is likelier than its words in another order."""
    scores = lm.score([""] * 2 * len(texts), [*texts, *map(shuffled, texts)])
    means = [score.sum_logprob / score.num_tokens for score in scores]
    return [means[row] - means[row + len(texts)] for row in range(len(texts))]


def shuffled(text: str) -> str:
    """Its words in another order, the same each time; its characters where it is written without spaces."""
    words = text.split()
    parts, space = (words, " ") if len(words) > 3 else (list(text), "")
    return space.join(random.Random(0).sample(parts, len(parts)))


def _require_no_look_ahead(lm: BlackBoxLM, path: str) -> None:
    half = " ".join(ENGLISH[0].split()[:9])  # no longer a text than those above, for LMs that hold few tokens
    short, long = lm.score([""] * 2, [half, ENGLISH[0]])
    known = min(short.num_tokens, long.num_tokens)
    moved = np.abs(short.token_logprobs[:known] - long.token_logprobs[:known])
    if np.mean(moved) > TOLERANCE_NATS:
        raise UserError(f"lm.path: {path} scores a text by what stands after it; expected a causal LM, not an encoder")
