"""Short forms of what tests ask of an LM."""

from collections.abc import Sequence

from replug.models.black_box_lm import BlackBoxLM, ContinuationScore, GrowingAnswer, Mixture
from replug.models.generation import Generated, GenerationOptions, Stop


def mixed(lm: BlackBoxLM, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions) -> Generated:
    """Return the answer to one mixture."""
    return lm.generate([Mixture(prompts, weights)], options)[0]


def bits(scores: Sequence[ContinuationScore]) -> list[bytes]:
    """Return log-probs to be compared bit by bit."""
    return [score.token_logprobs.tobytes() for score in scores]


def answer_bits(answer: Generated) -> tuple:
    """Return all of an answer, to be compared bit by bit."""
    entropies = None if answer.token_entropies is None else answer.token_entropies.tobytes()
    counts = answer.weights.tobytes(), answer.prompt_tokens, answer.answer_tokens
    return answer.text, answer.token_logprobs.tobytes(), entropies, *counts


def texts_of(lm: BlackBoxLM, prompts: Sequence[str], max_new_tokens: int, stop: Stop = None) -> list[str]:
    """Return the texts of greedy answers."""
    return [answer.text for answer in lm.generate(prompts, GenerationOptions(max_new_tokens, stop))]


def pieces(texts: Sequence[str], stop: Stop) -> list[str]:
    """The pieces of a streamed answer that grows by `texts`."""
    answer = GrowingAnswer(stop)
    found = [answer.grow(text) for text in texts] + [answer.end(texts[-1])]
    return [piece for piece in found if piece]
