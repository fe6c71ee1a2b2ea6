"""An LM of this process as an `AsyncLM`: what is submitted is done before `submit` returns. No Ray, no threads."""

from collections.abc import Sequence
from concurrent.futures import Future

from replug.cluster.background import InlineExecutor
from replug.models.black_box_lm import ContinuationScore, LocalLM
from replug.models.generation import Generated, GenerationOptions, Sampled, SamplingOptions, Stop
from replug.models.pass_size import LMShape, tokens_per_unit
from replug.models.units import units_of_similar_length


class InProcessLM:
    """An `AsyncLM` round `lm`, with the units that a pool of it on processors would have."""

    def __init__(self, lm: LocalLM, unit_tokens: int | None = None) -> None:
        self._lm = lm
        self.identity, self.max_tokens = lm.identity, lm.max_tokens
        self._unit_tokens = unit_tokens or tokens_per_unit(LMShape(), on_gpu=False)
        self._executor = InlineExecutor()

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        return units_of_similar_length(prefixes, continuations, self._unit_tokens)

    def submit(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> "Future[list[ContinuationScore]]":
        return self._executor.submit(self._lm.score, prefixes, continuations, opening=opening)

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> list[ContinuationScore]:
        return self._lm.score(prefixes, continuations, opening=opening)

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: Stop = None) -> list[str]:
        return self._lm.generate(prompts, max_new_tokens, stop)

    def submit_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        return self._executor.submit(self._lm.generate_ensemble, prompts, weights, options)

    def generate_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        return self._lm.generate_ensemble(prompts, weights, options)

    def submit_samples(self, prompts: Sequence[str], options: SamplingOptions) -> "Future[list[list[Sampled]]]":
        return self._executor.submit(self._lm.sample, prompts, options)

    def sample(self, prompts: Sequence[str], options: SamplingOptions) -> list[list[Sampled]]:
        return self._lm.sample(prompts, options)

    def metrics(self) -> dict[str, float]:
        """The share of its passes that is no padding."""
        counts = self._lm.counts
        return {"batch_fill": counts.tokens / counts.padded_tokens if counts.padded_tokens else 1.0}

    def close(self) -> None:
        """Nothing is under way."""
