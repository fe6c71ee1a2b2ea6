"""The frozen LM as a pool of Ray actors: the same protocol as one LM, with work done elsewhere.

One submitted call is scored by one replica in one piece, so its numbers do not depend on load.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import ray
import torch

from models.actor_pool import ActorPool
from models.black_box_lm import BlackBoxLM, ContinuationScore
from models.hardware import DTYPES, available_cores, default_device
from models.stand_in_lm import StandInLM


@dataclass(frozen=True, slots=True)
class LMSpec:
    """All that a process needs to load the LM.

    `path` is a folder or hub name, or `stand_in`; `stand_in:0.05` sleeps so many seconds in every call.
    """

    path: str
    dtype: str = "float32"
    tokens_per_batch: int = 4096

    @property
    def is_stand_in(self) -> bool:
        return self.path.split(":")[0] == "stand_in"

    def load(self, device: torch.device | str | None = None) -> BlackBoxLM:
        if self.is_stand_in:
            return StandInLM(float(self.path.partition(":")[2] or 0))
        from models.hf_lm import HuggingFaceLM  # seconds to import, which the stand-in can do without

        return HuggingFaceLM(self.path, DTYPES[self.dtype], device or default_device(), self.tokens_per_batch)

    @property
    def identity(self) -> str:
        """As the loaded LM's, without loading it."""
        if self.is_stand_in:
            return StandInLM.identity
        from models.hf_lm import lm_identity

        return lm_identity(self.path, DTYPES[self.dtype])

    @property
    def max_tokens(self) -> int | None:
        """As the loaded LM's, without loading it."""
        if self.is_stand_in:
            return None
        from transformers import AutoConfig

        return getattr(AutoConfig.from_pretrained(self.path), "max_position_embeddings", None)


class Scorer:
    """One replica: a plain class, made an actor where the pool is built."""

    def __init__(self, spec: LMSpec, threads: int) -> None:
        torch.set_num_threads(threads)
        self._lm = spec.load()

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        return self._lm.score(prefixes, continuations)

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None) -> list[str]:
        return self._lm.generate(prompts, max_new_tokens, stop)


class ScorerPool:
    """An `AsyncLM` over `num_replicas` actors."""

    def __init__(
        self,
        spec: LMSpec,
        num_replicas: int = 1,
        threads: int | None = None,
        gpus: float = 0.0,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.identity = spec.identity
        self.max_tokens = spec.max_tokens
        threads = threads or max(1, available_cores() // num_replicas)
        actor = ray.remote(Scorer).options(num_cpus=1, num_gpus=gpus, runtime_env=thread_env(threads))
        self.pool = ActorPool(
            lambda number: actor.remote(spec, threads), num_replicas, "scorer", timeout_seconds=timeout_seconds
        )

    def submit(self, prefixes: Sequence[str], continuations: Sequence[str]) -> "Future[list[ContinuationScore]]":
        return self.pool.submit("score", list(prefixes), list(continuations))

    def score(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations).result()

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: str | None = None) -> list[str]:
        return self.pool.submit("generate", list(prompts), max_new_tokens, stop).result()

    def close(self) -> None:
        self.pool.close()


def thread_env(threads: int) -> dict:
    """Ray sets OMP_NUM_THREADS from num_cpus, which is a share and not a number of threads."""
    return {"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}}
