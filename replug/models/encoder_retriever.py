"""A retriever over a few texts in memory, for trials of the library and to re-rank a search engine's passages.

Similarities are exact. Millions of documents need an index.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from replug.config.errors import UserError
from replug.models.black_box_lm import require_texts
from replug.models.ensemble import Retrieved
from replug.models.ensemble_temperature import own_temperature


class TextEncoder(Protocol):
    """An encoder of texts as vectors: an `Encoder`, or a `SentenceTransformer`.

    Its `encode_query` and `encode_document` are called if it has them, as both do: these add its prompts.

    >>> class Letters:
    ...     def encode(self, texts):
    ...         return [[text.count(letter) for letter in "abcdefgh"] for text in texts]
    >>> EncoderRetriever(Letters(), ["a bad cab", "egg"]).retrieve(["beg"], k=1)[0][0].text
    'egg'
    """

    def encode(self, texts: list[str], /) -> Any:
        """Return vectors [N, D], a numpy array or a tensor on the CPU."""


class EncoderRetriever:
    """Exact search over a few texts in memory: they are encoded once, each query at its retrieval.

    Similarities are inner products of the vectors of `encoder`: cosines, if they have length 1.

    Documents of equal similarity keep the order of `texts`. `ids` default to the texts' numbers. `temperature` is the
    ensemble temperature of `encoder`.

    >>> retriever = EncoderRetriever(Encoder("package:minilm"), ["the Loire in Nantes", "the Rhine in Basel"])
    >>> [found.text for found in retriever.retrieve(["a river in Basel"], k=1)[0]]
    ['the Rhine in Basel']
    """

    def __init__(self, encoder: TextEncoder, texts: Sequence[str], ids: Sequence[str] | None = None) -> None:
        require_texts(texts, "texts")
        require_texts(() if ids is None else ids, "ids")
        self._texts = list(texts)
        self._ids = list(map(str, range(len(texts)))) if ids is None else list(ids)
        if not len(texts) == len(self._ids) == len({*self._ids}):
            raise UserError(f"{len(texts)} texts have {len({*self._ids})} different ids; expected one id for each text")
        require_both_sides(encoder)
        self.temperature = own_temperature(encoder)
        self._encoder = encoder
        # Equal texts are encoded once: at two places of a batch their vectors may differ in the last bit.
        place = {text: number for number, text in enumerate(dict.fromkeys(self._texts))}
        vectors = _vectors(encoder, list(place), "encode_document")
        self._vectors = vectors[[place[text] for text in self._texts]]  # [N, D]

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        require_texts(queries, "queries")
        return [self._nearest(vector, k) for vector in _vectors(self._encoder, list(queries), "encode_query")]

    def _nearest(self, query: np.ndarray, k: int) -> list[Retrieved]:
        # A product of each row by itself: BLAS may give equal rows sums that differ in the last bit.
        similarities = np.einsum("nd,d->n", self._vectors, query)
        rows = np.argsort(-similarities, kind="stable")[:k]
        return [Retrieved(self._texts[row], float(similarities[row]), self._ids[row]) for row in rows]


def _vectors(encoder: TextEncoder, texts: list[str], method: str) -> np.ndarray:
    """Return vectors [N, D] float32, by a method for one side or by `encode`."""
    return np.asarray(getattr(encoder, method, encoder.encode)(texts), dtype=np.float32)


def require_both_sides(encoder: object) -> None:
    """Raise UserError for a SentenceTransformer of tuned queries alone: it has no documents' encoder."""
    folder = getattr(getattr(encoder, "tokenizer", None), "name_or_path", "")
    if not folder or not Path(folder).is_dir():
        return
    from replug.models.encoder_files import document_encoder  # imports sentence-transformers, as the object did

    if document_encoder(folder) is not None:
        raise UserError(
            f"the model of {folder} encodes queries alone; expected that path as the retriever, or "
            f"Encoder({folder!r}): both load its documents' encoder too"
        )
