"""The two services that live beside the trainer: the LM behind its cache, and the index."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.cluster.interruption import Interruption
from replug.cluster.layout import scorers
from replug.cluster.ray_cluster import ray_cluster, require_seen_by_all
from replug.config.schema import Config, LMConfig
from replug.data.folder import sole_writer
from replug.data.records import Example
from replug.data.store import PreparedSet
from replug.index_workers.build import watched_texts
from replug.index_workers.service import IndexService
from replug.models.build import encoder_location, located, opened_lm, prompt_template
from replug.models.encoder_files import document_encoder
from replug.models.feeder import FedLM
from replug.models.hardware import multiplies_bfloat16
from replug.models.lm_source import LMSource, LocalSource
from replug.models.packaged import resolve_lm_path
from replug.models.prompt import PromptTemplate, prompts_of
from replug.models.score_cache import CachingLM
from replug.planning.memory import run_sizes

MOST_FED_HERE = 4  # replicas; more, as on a node of eight GPUs, have a feeder


@dataclass(frozen=True, slots=True)
class Workers:
    """Holds the two services that live beside the trainer, and how texts are put to the LM."""

    lm: CachingLM | FedLM
    index: IndexService
    template: PromptTemplate

    def submit_examples(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> "Future[np.ndarray]":
        """Return a future of sums of log-probs (nats) and numbers of tokens, float64 [B * K, 2], of a step."""
        if isinstance(self.lm, FedLM):
            return self.lm.submit_examples(examples, texts)
        return self.lm.submit_sums(*prompts_of(self.template, examples, texts))


@contextmanager
def start_index(
    config: Config,
    roles: tuple[str, ...],
    data: PreparedSet,
    index_root: Path,
    interruption: Interruption | None = None,
) -> Iterator[tuple[Config, IndexService]]:
    """Start Ray for these roles and the index service; see `start_workers`."""
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    with ray_cluster(config, roles, interruption, sizes) as laid_out:
        require_seen_by_all(index_root, [data.folder, data.corpus_path, *local_models(laid_out)])
        with (
            sole_writer(index_root),
            closing(IndexService(index_root, watched_texts(data), laid_out.retrieve.k)) as index,
        ):
            yield laid_out, index


@contextmanager
def start_workers(
    config: Config,
    roles: tuple[str, ...],
    source: LMSource,
    data: PreparedSet,
    index_root: Path,
    scores: Path,
    interruption: Interruption | None = None,
) -> Iterator[tuple[Config, Workers]]:
    """Start Ray for these roles and the LM's, the LM behind its cache, and the index service.

    Yields the configuration with the resources that they have. All are stopped at the end. Raises UserError where a
    node of the cluster does not see the files.
    """
    # The index first: scorers may wait for room, its actors may not.
    with start_index(config, (*roles, *source.roles), data, index_root, interruption) as (laid_out, index):  # noqa: SIM117
        with started_lm(laid_out.lm, source, scores) as lm:
            yield laid_out, Workers(lm, index, prompt_template(laid_out.lm, source))


def started_lm(lm: LMConfig, source: LMSource, scores: Path) -> AbstractContextManager[CachingLM | FedLM]:
    """Open the LM behind its cache, with many replicas in a process of their own."""
    if isinstance(source, LocalSource) and scorers(lm)[0] > MOST_FED_HERE:
        return closing(FedLM(lm, source, scores))
    return opened_lm(lm, source, scores)


def local_models(config: Config) -> list[Path]:
    """Return the folders that scorers and trainer ranks load from; a name on the hub is not a folder."""
    retriever = located(config.retriever)
    documents = document_encoder(retriever.path)  # of tuned queries
    named = [retriever.path, retriever.query_path, documents and encoder_location(documents["path"])]
    named += [resolve_lm_path(config.lm.path)] if config.lm.path else []
    return [Path(name) for name in named if name and Path(name).is_dir()]
