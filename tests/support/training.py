"""One LSR step in this process: a module on a tiny encoder, and a pipeline with an LM that answers at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from replug.cluster.background import InlineExecutor
from replug.config.schema import Config, RetrieveConfig, TrainConfig
from replug.data.records import RetrievedBatch, ScoredBatch, SearchResult
from replug.data.sampling import QuerySampler
from replug.data.store import PreparedSet
from replug.models.black_box_lm import sums_of
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate
from replug.train.module import Batches, LSRModule
from replug.train.pipeline import BatchPipeline
from replug.train.step_metrics import StepClock
from replug.train.trained_weights import prepare_encoder


class InlineLM(StandInLM):
    """The stand-in, answering at once with what training needs."""

    def submit_sums(self, prefixes, continuations):
        future: Future = Future()
        future.set_result(sums_of(self.score(prefixes, continuations)))
        return future


def documents_of(module: LSRModule) -> Encoder:
    """The encoder of documents."""
    return module.frozen.encoder if module.frozen else module.encoder


def encoded_queries(module: LSRModule, texts: Sequence[str], autocast: bool = False) -> np.ndarray:
    """Return vectors by the current weights, without gradient or dropout."""
    module.encoder.eval()
    return module.encoder.encode_query(texts, autocast=autocast).numpy()


def exact_search(module: LSRModule, data: PreparedSet) -> Callable[..., SearchResult]:
    """Over the corpus as the module's encoder has it now."""
    vectors = documents_of(module).encode_document([doc.text for doc in data.corpus.iterate()]).numpy()

    def search(version: int, queries: np.ndarray, k: int, exclude: object) -> SearchResult:
        similarities = queries @ vectors.T
        rows = np.argsort(-similarities, axis=1)[:, :k]
        return SearchResult(rows, np.take_along_axis(similarities, rows, axis=1), version)

    return search


def pipeline_for(
    module: LSRModule,
    data: PreparedSet,
    lm: InlineLM,
    depth: int = 0,
    steps: int = 3,
    search: Callable[..., SearchResult] | None = None,
    executor: Executor | None = None,
) -> BatchPipeline:
    """Attached to the module."""
    pipeline = BatchPipeline(
        QuerySampler(len(data.queries), 4, 0),
        data,
        RetrieveConfig(k=5),
        TrainConfig(max_steps=steps, pipeline_depth=depth),
        encode=partial(encoded_queries, module),
        search=search or exact_search(module, data),
        executor=executor or InlineExecutor(),
        score=lambda examples, texts: lm.submit_sums(*PromptTemplate().prompts(examples, texts)),
        clock=StepClock(),
    )
    module.batches = pipeline
    return pipeline


def made_module(config: Config, data: PreparedSet, batches: Batches | None = None) -> LSRModule:
    """The module that a training makes. Its batches may be set later: they may need its weights."""
    encoder = load_encoder(config.retriever, dims=config.index.dims)
    frozen = prepare_encoder(config, encoder, data.corpus)
    return LSRModule(config, encoder, cast(Batches, batches), data.queries, data.corpus, frozen)


def module_given(config: Config, data: PreparedSet, batch: ScoredBatch | None = None, **sections: dict) -> LSRModule:
    """A module that gets the same batch at every step. `sections` are changed keys by section of the configuration."""
    changed = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    config = replace(config, **changed)
    module = made_module(config, data, Given(batch or batch_of()))
    module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module


class Given:
    """The same batch at every step."""

    def __init__(self, batch: ScoredBatch) -> None:
        self._batch = batch

    def take(self, step: int) -> ScoredBatch:
        return self._batch


def batch_of() -> ScoredBatch:
    """Two texts of three documents each, the third of both the same."""
    rows = np.array([[0, 1, 2], [3, 4, 2]])
    similarities = np.array([[0.3, 0.1, 0.2], [0.1, 0.2, 0.3]], np.float32)
    retrieved = RetrievedBatch(0, 0, -1, 0, np.array([0, 1]), rows, similarities)
    sums = np.array([[-30.0, -60.0, -20.0], [-50.0, -10.0, -40.0]])
    return ScoredBatch(retrieved, sums, np.array([16, 16]))
