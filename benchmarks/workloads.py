"""Real texts of mixed length, cut by the LM's own tokens: what the scoring benchmarks are measured on.

Documents of 20-128 tokens, contexts of 16-128, continuations of 16-128, k documents for each query, as
in training. The texts are numpy's docstrings and the model definitions of transformers, which are on every machine
that replug is installed on.
"""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from replug.data.sources.built_in_texts import read_package_texts


@dataclass(frozen=True, slots=True)
class Pairs:
    """Prefixes (document, line break, context) and continuations, k in a row for each query."""

    prefixes: list[str]
    continuations: list[str]
    k: int

    def __len__(self) -> int:
        return len(self.prefixes)


def mixed_pairs(tokenizer: PreTrainedTokenizerBase, num_queries: int, k: int = 20, seed: int = 0) -> Pairs:
    """Queries with k documents each, the same for the same seed."""
    cut = Cutter(tokenizer, num_tokens=num_queries * (256 + k * 128), seed=seed)
    prefixes, continuations = [], []
    for _ in range(num_queries):
        context, continuation = cut.text(16, 128), cut.text(16, 128)
        prefixes += [f"{cut.text(20, 128)}\n{context}" for _ in range(k)]
        continuations += [continuation] * k
    return Pairs(prefixes, continuations, k)


class Cutter:
    """Cuts a long real text into pieces of a random number of tokens, one after the other."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._text, self._next = _real_text(num_tokens * 6), 0
        self._offsets = tokenizer(self._text, return_offsets_mapping=True, verbose=False)["offset_mapping"]

    def text(self, shortest: int, longest: int) -> str:
        end = self._next + int(self._rng.integers(shortest, longest + 1))
        piece = self._text[self._offsets[self._next][0] : self._offsets[end - 1][1]]
        self._next = end
        return piece


def _real_text(num_characters: int) -> str:
    parts, length = [], 0
    for source in read_package_texts("numpy_docstrings+transformers_code"):
        parts.append(source.text)
        length += len(parts[-1])
        if length >= num_characters:
            break
    return "\n".join(parts)
