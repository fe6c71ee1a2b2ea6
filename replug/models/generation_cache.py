"""Answers of LMs to mixtures of prompts, in the same file as their scores."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from replug.models.answer_table import AnswerTable, as_array, as_bytes
from replug.models.generation import Generated, GenerationOptions
from replug.models.score_cache import Key, hashed

SURROGATES = "surrogatepass"  # a server may end an answer in the midst of a character


def generation_key(identity: str, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions) -> Key:
    """16 bytes that name what is asked of a model: all that its answer follows from. An opening changes no answer."""
    shares = np.asarray(weights, dtype="<f8").tobytes().hex()
    return hashed(identity, repr(replace(options, opening="")), shares, *prompts, size=16)


class GenerationCache(AnswerTable[Generated]):
    """The table `generations`."""

    table = "generations"
    columns = ("text", "logprobs", "entropies", "num_prompts", "prompt_tokens", "answer_tokens")

    def _values(self, answer: Generated) -> tuple:
        entropies = None if answer.token_entropies is None else as_bytes(answer.token_entropies)
        counts = answer.num_prompts, answer.prompt_tokens, answer.answer_tokens
        return answer.text.encode(errors=SURROGATES), as_bytes(answer.token_logprobs), entropies, *counts

    def _from_values(self, text: bytes, logprobs: bytes, entropies: bytes | None, *counts: int) -> Generated:  # type: ignore[override]
        unsure = None if entropies is None else as_array(entropies)
        return Generated(text.decode(errors=SURROGATES), as_array(logprobs), unsure, *counts)

    def _is_sound(self, answer: Generated) -> bool:
        numbers = [answer.token_logprobs] + ([] if answer.token_entropies is None else [answer.token_entropies])
        return all(bool(np.isfinite(some).all()) for some in numbers)
