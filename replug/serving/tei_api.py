"""Requests and responses in the shapes of text-embeddings-inference: vectors, and an order of given texts.

Its clients expect bare lists, and errors as `{"error": text, "error_type": ...}`. Texts that are too long are cut, as
`auto_truncate` of /info says; with `truncate` false they are refused. /rerank orders by the retriever's similarity.
"""

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from starlette.responses import JSONResponse

from replug.models.batching import ENCODER_TOKENS
from replug.serving.openai_api import (
    DOCUMENT,
    MAX_TEXTS,
    QUERY,
    RETRIEVER_NAME,
    ApiError,
    Json,
    Side,
    StrictRequest,
    Texts,
    refused,
)
from replug.serving.service import MAX_TEXTS_A_CALL, Service

TEI_INFO = "/info"
TEI_COMPUTING = ("/", "/embed", "/rerank")  # "/" is /embed, for clients that know the server's address alone
OVERLOADED, TOO_MANY_REQUESTS = 503, 429


class _Cutting(StrictRequest):
    truncate: bool = True
    truncation_direction: Literal["right", "Right"] = "right"

    def require_whole(self, are_cut: Sequence[bool], key: str) -> None:
        """Raise ApiError for the first text that was cut, if the request forbids it."""
        if not self.truncate and any(are_cut):
            number = list(are_cut).index(True)
            raise ApiError(413, f"{key}: text {number} is too long for the retriever; expected truncate=true", key)


class EmbedRequest(_Cutting):
    inputs: Texts
    normalize: bool | None = None
    prompt_name: Side | None = None
    dimensions: int | None = None


class RerankRequest(_Cutting):
    query: str
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
    raw_scores: bool = False
    return_text: bool = False


async def embed(service: Service, asked: EmbedRequest) -> list[list[float]]:
    """Return the vector of each text."""
    index = service.index.served
    is_cosine = index.retriever.encoder.similarity == "cosine"
    if asked.normalize is (False if is_cosine else None):
        expected = "true: its" if is_cosine else "false for the vectors it compares, or true for their directions:"
        raise refused("normalize", f"expected {expected} retriever has {'cosine' if is_cosine else 'dot'} similarity")
    index.require_length(asked.dimensions)
    side = index.require_side(asked.prompt_name, "prompt_name")
    vectors, _, are_cut = await service.embed(index, side, asked.inputs)
    asked.require_whole(are_cut, "inputs")
    vectors = index.cut(vectors, asked.dimensions)
    if asked.normalize and not is_cosine:
        vectors = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=-1).numpy()
    return vectors.tolist()


async def rerank(service: Service, asked: RerankRequest) -> list[Json]:
    """Return the texts by falling similarity to the query; a score is its sigmoid, or itself with `raw_scores`."""
    index = service.index.served
    works = service.embed(index, QUERY, [asked.query]), service.embed(index, DOCUMENT, asked.texts)
    (query, _, is_cut), (texts, _, are_cut) = await asyncio.gather(*works)
    asked.require_whole(is_cut, "query")
    asked.require_whole(are_cut, "texts")
    similarities = texts @ query[0]
    scores = similarities if asked.raw_scores else torch.from_numpy(similarities).sigmoid().numpy()
    rows: list[Json] = [
        {"index": number, "score": float(scores[number])}
        for number in np.argsort(-similarities, kind="stable").tolist()
    ]
    return [row | {"text": asked.texts[row["index"]]} for row in rows] if asked.return_text else rows


def info_json(service: Service) -> Json:
    """Return what the server is, under all names that text-embeddings-inference has."""
    retriever = service.index.served.retriever
    encoder = retriever.encoder
    known: dict[str, Any] = {
        "model_id": RETRIEVER_NAME,
        "model_sha": retriever.identity,
        "model_dtype": str(encoder.backbones[0].dtype).removeprefix("torch."),
        "model_type": {"embedding": {"pooling": encoder.describe(QUERY)}},
        "max_concurrent_requests": service.limits.max_concurrency,
        "max_input_length": encoder.max_tokens,
        "max_batch_tokens": ENCODER_TOKENS[encoder.device_kind],
        "max_batch_requests": MAX_TEXTS_A_CALL,
        "max_client_batch_size": MAX_TEXTS,
        "auto_truncate": True,
        "tokenization_workers": 1,
        "version": version("replug"),
    }
    return known | {"sha": None, "docker_label": None}


def error_response(error: ApiError, path: str) -> JSONResponse:
    """Return a refusal in the shape that clients of the route know."""
    if path not in (TEI_INFO, *TEI_COMPUTING):
        return error.response()
    status = TOO_MANY_REQUESTS if error.status == OVERLOADED else error.status
    kind = "Overloaded" if status == TOO_MANY_REQUESTS else "Backend" if status >= 500 else "Validation"
    return JSONResponse({"error": str(error), "error_type": kind}, status, error.headers)
