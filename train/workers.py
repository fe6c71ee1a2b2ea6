"""The two services that live beside the trainer: the LM behind its cache, and the index."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from replug.cluster.interruption import Interruption
from replug.cluster.ray_cluster import ray_cluster, require_seen_by_all
from replug.config.schema import Config
from replug.data.folder import sole_writer
from replug.data.store import PreparedSet
from replug.index_workers.build import watched_texts
from replug.index_workers.service import IndexService
from replug.models.build import encoder_location, located, opened_lm, prompt_template
from replug.models.encoder_files import document_encoder
from replug.models.hardware import multiplies_bfloat16
from replug.models.lm_source import LMSource
from replug.models.packaged import resolve_lm_path
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import CachingLM
from replug.planning.memory import run_sizes


@dataclass(frozen=True, slots=True)
class Workers:
    """Holds the two services that live beside the trainer, and how texts are put to the LM."""

    lm: CachingLM
    index: IndexService
    template: PromptTemplate


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
        with opened_lm(laid_out.lm, source, scores) as lm:
            yield laid_out, Workers(lm, index, prompt_template(laid_out.lm, source))


def local_models(config: Config) -> list[Path]:
    """Return the folders that scorers and trainer ranks load from; a name on the hub is not a folder."""
    retriever = located(config.retriever)
    documents = document_encoder(retriever.path)  # of tuned queries
    named = [retriever.path, retriever.query_path, documents and documents.path and encoder_location(documents.path)]
    named += [resolve_lm_path(config.lm.path)] if config.lm.path else []
    return [Path(name) for name in named if name and Path(name).is_dir()]
