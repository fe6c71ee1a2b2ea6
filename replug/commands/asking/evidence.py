"""Where the evidence of `replug ask` comes from: an index with its own encoder, or a search engine and its pages."""

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from replug.commands.asking.options import LOCAL, AskOptions
from replug.config.evaluation_schema import AskConfig
from replug.data.rows import read_documents
from replug.index_workers.build_plan import index_folder
from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.build import load_encoder
from replug.models.ensemble_temperature import own_temperature
from replug.models.hardware import available_cores
from replug.web.engines.local import BM25Retriever, LocalEngine
from replug.web.evidence import evidence_finder, first_passages, passages_of_documents, rank_densely
from replug.web.records import FoundEvidence, Passage, SearchEngine

log = logging.getLogger(__name__)


def open_index(directory: Path) -> IndexRetriever:
    """The newest version of a run's or an index's folder, with the encoder that it was made by."""
    return IndexRetriever(LocalIndex(index_folder(directory), available_cores()))


def find_evidence(question: str, k: int, options: AskOptions, config: AskConfig, folder: Path) -> FoundEvidence:
    """The `k` passages nearest to the question, whose weights sum to 1. Without `k` nobody is asked."""
    if not k:
        return FoundEvidence(question, (), {})
    if options.engine is None:
        assert options.index is not None  # `checked`
        retriever = open_index(options.index)
        [documents] = retriever.retrieve([question], k)
        return FoundEvidence(question, tuple(passages_of_documents(documents, temperature_of(config, retriever))), {})
    with closing(evidence_finder(config.web, folder / "snapshot", _local_engine(options))) as finder:
        found = finder.find(question)
    if found.failures:
        log.info(f"the search gave less: {', '.join(f'{name} {count}' for name, count in found.failures.items())}")
    return FoundEvidence(question, tuple(_nearest(question, k, found.passages, config)), found.failures)


def temperature_of(config: AskConfig, owner: object) -> float:
    """Of the ensemble: what is asked for, else what was saved with the retriever or encoder, else the paper's."""
    asked = config.ensemble.temperature
    return own_temperature(owner).value if asked is None else float(asked)


def _local_engine(options: AskOptions) -> SearchEngine | None:
    """Dense over an index, or BM25 over a file of documents."""
    if options.engine != LOCAL:
        return None
    if options.index is not None:
        return LocalEngine(open_index(options.index))
    assert options.corpus is not None  # `checked`
    return LocalEngine(BM25Retriever(read_documents(options.corpus)))


def _nearest(question: str, k: int, passages: Sequence[Passage], config: AskConfig) -> list[Passage]:
    """By TF-IDF as they come, or by the retriever that re-ranks them."""
    if config.retriever.path:
        encoder = load_encoder(config.retriever)
        passages = rank_densely(encoder, question, passages, temperature_of(config, encoder))
    return first_passages(passages, k)
