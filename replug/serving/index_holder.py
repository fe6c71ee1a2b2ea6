"""The index that is searched, and its switch to a newer version without a pause.

A request takes the index once and keeps it, so its answer comes from one version. The last request on an old version
frees it. A newer version is opened beside the old one, checked as at the start, and only then given to new requests.
A version that cannot be opened leaves the old one in use; the holder reports the problem and tries again.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.data.folder import CHECKSUMS
from replug.index_workers.build_plan import missing_index
from replug.index_workers.local_index import IndexRetriever, LocalIndex, query_encoder_folder
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import require_finite_vectors
from replug.models.ensemble_temperature import FILE as TEMPERATURE
from replug.models.ensemble_temperature import own_temperature
from replug.models.hardware import available_cores
from replug.serving.openai_api import DOCUMENT, QUERY, Side, refused

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
State = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ServedIndex:
    """One version with its encoder and the ensemble's temperature; `state` identifies the files it was read from."""

    state: State
    version: int
    retriever: IndexRetriever
    temperature: float
    is_independent: bool  # the queries of one search do not change each other's documents

    @property
    def is_asymmetric(self) -> bool:
        """Return whether queries and documents have different encoders or prompts."""
        encoder = self.retriever.encoder
        return encoder.is_pair or encoder.prompt(QUERY) != encoder.prompt(DOCUMENT)

    def require_side(self, side: Side | None, key: str) -> Side:
        """Return the side that a request names by `key`. Raises ApiError if it names none and that matters."""
        if side is None and self.is_asymmetric:
            raise refused(key, "this retriever embeds queries and documents apart; expected query or document")
        return side or QUERY

    def require_length(self, dimensions: int | None) -> None:
        """Raise ApiError for vectors of another length than the index has; None means its own."""
        if dimensions not in (None, self.retriever.encoder.dim):
            raise refused("dimensions", f"{dimensions}; expected {self.retriever.encoder.dim} (index.dims sets it)")

    def embed(self, texts: list[str], side: Side) -> tuple[np.ndarray, list[int]]:
        """Return vectors [N, D] float32 and the tokens of each text, special ones included."""
        encoder = self.retriever.encoder
        ids = encoder.token_ids(texts, side)
        vectors = encoder.encode_tokens(ids, task=side).numpy()
        require_finite_vectors(vectors, [f"input {number}" for number in range(len(texts))])
        return vectors, [len(row) for row in ids]

    def is_cut(self, text: str, side: Side) -> bool:
        """Return whether the encoder reads only the beginning of a text."""
        return self.retriever.encoder.sides[side].is_cut(text)


def open_served_index(root: Path, temperature: float | None = None) -> ServedIndex:
    """Open the newest version. A temperature replaces the retriever's own. Raises UserError."""
    state = state_of(root)
    index = LocalIndex(root, available_cores())
    retriever = IndexRetriever(index)
    own = own_temperature(retriever).value if temperature is None else temperature
    return ServedIndex(state, index.plan.version, retriever, own, index.is_independent)


def state_of(root: Path) -> State:
    """Identify what the folder offers: the state changes when something else is to be served. Raises UserError."""
    store = VersionStore(root.absolute())
    versions = store.published()
    if not versions:
        raise missing_index(root)
    own, encoder = query_encoder_folder(root), store.encoder_folder(versions[-1])
    files = [encoder / TEMPERATURE, *([own / CHECKSUMS, own / TEMPERATURE] if own else [])]
    times = [path.stat().st_mtime_ns if path.is_file() else None for path in files]
    return (versions[-1], store.fingerprint(versions[-1]), *times)


class IndexHolder:
    """Hold the index in use and replace it by newer versions; `problem` says why the newest cannot be opened."""

    def __init__(self, root: Path, temperature: float | None = None, poll_seconds: float = POLL_SECONDS) -> None:
        self._root, self._temperature, self._poll_seconds = root, temperature, poll_seconds
        self.served = open_served_index(root, temperature)
        self.problem: str | None = None

    async def keep_newest(self) -> None:
        """Look for a newer version again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            await asyncio.to_thread(self.swap_if_newer)

    def swap_if_newer(self) -> None:
        """Open a newer version if there is one. One assignment switches to it, so any thread may call this."""
        try:
            if state_of(self._root) == self.served.state:
                self.problem = None
                return
            newer = open_served_index(self._root, self._temperature)
        except Exception as error:  # noqa: BLE001 - a damaged version may raise anything, and must not end the watcher
            problem = str(error) or type(error).__name__
            if problem != self.problem:
                log.warning(
                    f"index version {self.served.version} stays in use; a newer one cannot be opened: {problem}"
                )
            self.problem = problem
            return
        log.info(f"index version {newer.version} replaces {self.served.version}")
        self.served, self.problem = newer, None
