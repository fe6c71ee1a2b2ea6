"""The index that is searched, and its change to a newer version without a pause.

A request takes the index once and stays with it, so its answer is of one version. Whoever holds the old one keeps it in
memory; when the last has ended, it is gone. A newer version is opened beside it, checked as at the start, and only then
given to those who come next. One that cannot be opened leaves the old one serving, and is looked at again.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.config.errors import RunError, UserError
from replug.index_workers.local_index import IndexRetriever, LocalIndex, query_encoder_folder
from replug.index_workers.version_store import WEIGHTS, VersionStore
from replug.models.encoder import Encoder, require_finite_vectors
from replug.models.ensemble_temperature import FILE as TEMPERATURE
from replug.models.ensemble_temperature import own_temperature
from replug.models.hardware import available_cores
from replug.serving.batching import Metrics
from replug.serving.requests import DOCUMENT, QUERY, Side

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0  # between two looks at the folder
State = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ServedIndex:
    """One version with its encoders. `temperature` is its ensemble's; `state` is what the folder held for it."""

    state: State
    version: int
    retriever: IndexRetriever
    document_encoder: Encoder
    temperature: float
    is_independent: bool

    @property
    def is_asymmetric(self) -> bool:
        """Whether queries and documents are embedded apart."""
        is_pair = self.encoder(QUERY) is not self.encoder(DOCUMENT)
        return is_pair or self._prompt(QUERY) != self._prompt(DOCUMENT)

    def encoder(self, side: Side) -> Encoder:
        return self.document_encoder if side == DOCUMENT else self.retriever.encoder.of_queries

    def _prompt(self, side: Side) -> str:
        prompts = self.encoder(side).prompts
        return prompts.document if side == DOCUMENT else prompts.query

    def embed(self, texts: list[str], side: Side) -> tuple[np.ndarray, list[int]]:
        """Vectors [N, D] float32, and the tokens of each text, special ones included."""
        encoder, prompt = self.encoder(side), self._prompt(side)
        ids = encoder.token_ids(texts, prompt)
        vectors = encoder.encode_tokens(ids, prompt=prompt).numpy()
        require_finite_vectors(vectors, [f"input {number}" for number in range(len(texts))])
        return vectors, [len(row) for row in ids]

    def is_cut(self, text: str, side: Side) -> bool:
        """Whether the encoder reads less than the whole text. A token is one byte at least."""
        encoder, text = self.encoder(side), self._prompt(side) + text
        if len(text.encode("utf-8", "surrogatepass")) + 2 <= encoder.max_tokens:
            return False
        return len(encoder.tokenizer(text, truncation=False, verbose=False)["input_ids"]) > encoder.max_tokens


def open_served_index(root: Path, temperature: float | None = None) -> ServedIndex:
    """The newest version; `temperature` is what is asked for instead of its own. Raises UserError."""
    state = state_of(root)
    index = LocalIndex(root, available_cores())
    retriever = IndexRetriever(index)
    is_one = index.encoder_folder == index.query_encoder_folder
    documents = (
        retriever.encoder
        if is_one
        else Encoder(str(index.encoder_folder), index.plan.similarity, index.plan.max_tokens, dims=index.plan.dims)
    )
    own = own_temperature(retriever).value if temperature is None else temperature
    return ServedIndex(state, index.plan.version, retriever, documents, own, index.is_independent)


def state_of(root: Path) -> State:
    """Another one when something else is to be served. Raises UserError where nothing is published."""
    store = VersionStore(root.absolute())
    versions = store.published()
    if not versions:
        raise UserError(
            f"{root} holds no published index; expected a run directory, as `replug prepare --index` writes it"
        )
    own, encoder = query_encoder_folder(root), store.encoder_folder(versions[-1])
    files = [encoder / TEMPERATURE, *([own / WEIGHTS, own / TEMPERATURE] if own else [])]
    times = [path.stat().st_mtime_ns if path.is_file() else None for path in files]
    return (versions[-1], store.fingerprint(versions[-1]), *times)


class IndexHolder:
    """What is served, and who looks for something newer."""

    def __init__(
        self,
        open_index: Callable[[], ServedIndex],
        look: Callable[[], State],
        metrics: Metrics,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._open, self._look, self._metrics, self._seconds = open_index, look, metrics, look_seconds
        self.served = open_index()
        self._problem: str | None = None
        metrics.version.set(self.served.version)

    async def keep_newest(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            await asyncio.to_thread(self.swap_if_newer)

    def swap_if_newer(self) -> None:
        """In any thread: the new one is given out by one assignment."""
        try:
            if self._look() == self.served.state:
                return
            newer = self._open()
        except (UserError, RunError, OSError) as error:  # half removed, damaged, or a disk that is away
            self._keep_old(str(error))
            return
        log.info(f"index version {newer.version} is served; it was {self.served.version}")
        self.served, self._problem = newer, None
        self._metrics.version.set(newer.version)
        self._metrics.swaps.labels("swapped").inc()

    def _keep_old(self, problem: str) -> None:
        self._metrics.swaps.labels("failed").inc()
        if problem != self._problem:
            log.warning(f"index version {self.served.version} is served on, a newer one cannot be opened: {problem}")
        self._problem = problem
