"""Clients of others: routes of text-embeddings-inference, shorter vectors, keys that change nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from replug.config.paths import RUN_CONFIG
from replug.models.encoder import Encoder
from replug.serving.index_holder import trained_lengths
from replug.serving.openai_api import ServingLimits
from tests.support.command_line import ROOT
from tests.support.serving import TEXTS, ask, listening, post, service_of
from tests.support.small_index import write_small_index

TOKEN, QUERY = "0123456789abcdef", " ".join(TEXTS[2].split()[:3])
HEADER = "x-replug-ignored"
LONG = " ".join(TEXTS * 10)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of a run whose loss was taken at 8 and 16 of 32 numbers; as of a training's third step."""
    run = tmp_path_factory.mktemp("run")
    stored = (ROOT / "configs/debug.yaml").read_text()
    (run / RUN_CONFIG).write_text(stored.replace("retriever:", "retriever:\n  dims: [32, 16, 8]"))
    return write_small_index(run, TEXTS)


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with listening(service_of(root), TOKEN) as url:
        yield url


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    """Return vectors of the query, then of TEXTS."""
    return Encoder("stand_in").encode([QUERY, *TEXTS]).numpy()


def first(vectors: np.ndarray, count: int) -> np.ndarray:
    return vectors[:, :count] / np.linalg.norm(vectors[:, :count], axis=1, keepdims=True)


def test_openais_client_gets_vectors_as_short_as_were_trained(url: str, vectors: np.ndarray) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0)
    for count in (8, 16, 32):
        found = client.embeddings.create(model="retriever", input=TEXTS, dimensions=count)
        np.testing.assert_allclose([row.embedding for row in found.data], first(vectors[1:], count), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions: 12; expected 8 or 16 or 32"):
        client.embeddings.create(model="retriever", input=TEXTS, dimensions=12)


def test_openais_client_is_told_which_keys_change_nothing(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0)
    neutral = {"user": "me", "metadata": {"a": "b"}, "service_tier": "flex", "store": True, "safety_identifier": "x"}
    chat = {"model": "replug", "prompt": "x", "max_tokens": 2}
    with_keys = client.completions.with_raw_response.create(**chat, extra_body=neutral)
    assert with_keys.headers[HEADER] == "metadata, safety_identifier, service_tier, store, user"
    plain = client.completions.with_raw_response.create(**chat)
    assert HEADER not in plain.headers and plain.parse().choices == with_keys.parse().choices
    stream = client.completions.with_raw_response.create(**chat, stream=True, user="me")
    assert stream.headers[HEADER] == "user"
    assert client.embeddings.with_raw_response.create(model="retriever", input="x", user="me").headers[HEADER] == "user"
    with pytest.raises(openai.BadRequestError, match="audio: unknown, or not supported"):
        client.completions.create(**chat, extra_body={"audio": {"voice": "x"}})


def test_hugging_faces_client_gets_vectors_and_errors(url: str, vectors: np.ndarray) -> None:
    for address in (url, f"{url}/embed"):
        client = InferenceClient(address, token=TOKEN)
        np.testing.assert_allclose(client.feature_extraction(TEXTS[0]), vectors[1:2], atol=1e-6)
        whole = client.feature_extraction(TEXTS, normalize=True, truncate=True, truncation_direction="right")  # type: ignore[arg-type]
        np.testing.assert_allclose(whole, vectors[1:], atol=1e-6)
    short = client.feature_extraction(TEXTS[0], dimensions=8, prompt_name="query")
    np.testing.assert_allclose(short, first(vectors[1:2], 8), atol=1e-6)
    refusals = [
        ({"dimensions": 5}, "dimensions: 5; expected 8 or 16 or 32"),
        ({"normalize": False}, "normalize: expected true"),
        ({"truncation_direction": "left"}, "truncation_direction: Input should be 'right'"),
        ({"prompt_name": "clustering"}, "prompt_name: Input should be 'query' or 'document'"),
    ]
    for keys, message in refusals:
        with pytest.raises(HfHubHTTPError, match=message):
            client.feature_extraction(TEXTS[0], **keys)
    np.testing.assert_allclose(client.feature_extraction(LONG).shape, (1, 32))
    with pytest.raises(HfHubHTTPError, match="inputs: text 0 is too long"):
        client.feature_extraction(LONG, truncate=False)


# The shapes, as the documentation of text-embeddings-inference has them ---------------------------------------------


def test_texts_are_ranked_by_similarity_in_the_shape_of_others(root: Path, vectors: np.ndarray) -> None:
    asked = {"query": QUERY, "texts": TEXTS}

    async def test(client):
        plain = await post(client, "/rerank", **asked)
        return plain, await post(client, "/rerank", **asked, raw_scores=True, return_text=True)

    plain, raw = ask(service_of(root), test)
    similarities = vectors[1:] @ vectors[0]
    order = np.argsort(-similarities).tolist()
    assert [row["index"] for row in plain] == [row["index"] for row in raw] == order
    assert [row["score"] for row in raw] == pytest.approx(similarities[order].tolist(), abs=1e-6)
    assert [row["score"] for row in plain] == pytest.approx((1 / (1 + np.exp(-similarities[order]))).tolist())
    assert [row.keys() for row in plain] == [{"index", "score"}] * len(TEXTS)
    assert [row["text"] for row in raw] == [TEXTS[number] for number in order]


def test_info_and_errors_have_the_shape_of_others(root: Path) -> None:
    async def test(client):
        info, wrong = await client.get("/info"), await client.post("/rerank", json={"query": "x"})
        large = await client.post("/embed", json={"inputs": ["x"] * 2049})
        return info.json(), wrong, large

    info, wrong, large = ask(service_of(root), test)
    assert info["model_type"] == {"embedding": {"pooling": "mean"}} and info["max_input_length"] == 64
    assert info.keys() == {
        *("model_id", "model_sha", "model_dtype", "model_type", "max_concurrent_requests", "max_input_length"),
        *("max_batch_tokens", "max_batch_requests", "max_client_batch_size", "auto_truncate", "tokenization_workers"),
        *("version", "sha", "docker_label"),
    }
    assert wrong.json() == {"error": "texts: Field required", "error_type": "Validation"}
    assert large.status_code == 400 and "at most 2048 items" in large.json()["error"]


def test_too_many_requests_are_told_as_others_tell_it(root: Path) -> None:
    service = service_of(root, limits=ServingLimits(max_concurrency=0))
    busy = ask(service, lambda client: client.post("/embed", json={"inputs": "x"}))
    assert (busy.status_code, busy.json()["error_type"], busy.headers["retry-after"]) == (429, "Overloaded", "1")


def test_a_retriever_of_dot_products_has_its_own_vectors_or_their_directions(tmp_path: Path) -> None:
    encoder = Encoder("stand_in", similarity="dot")
    encoder.save(tmp_path / "encoder")
    service = service_of(write_small_index(tmp_path, TEXTS, str(tmp_path / "encoder")))
    served = service.index.served
    served.retriever.encoder.similarity = "dot"

    async def test(client):
        keys = ({}, {"normalize": False}, {"normalize": True}, {"dimensions": 8, "normalize": False})
        return [await client.post("/embed", json={"inputs": TEXTS, **key}) for key in keys]

    unsaid, own, directions, short = ask(service, test)
    assert unsaid.status_code == 400 and "expected false for the vectors it compares" in unsaid.json()["error"]
    assert own.status_code == directions.status_code == 200
    np.testing.assert_allclose(np.linalg.norm(directions.json(), axis=1), 1, atol=1e-6)
    assert short.json()["error"] == "dimensions: 8; expected 32 (retriever.dims trains shorter ones)"


@pytest.mark.parametrize("step", [0, 3])
def test_vectors_of_weights_that_no_step_trained_are_whole(root: Path, step: int) -> None:
    assert trained_lengths(root, step) == ((32, 16, 8) if step else ())


def test_the_routes_describe_themselves(root: Path) -> None:
    async def test(client):
        return (await client.get("/openapi.json")).json()

    described = ask(service_of(root), test)
    assert set(described["paths"]) == {
        *("/", "/embed", "/rerank", "/info", "/search", "/health", "/metrics"),
        *("/v1/models", "/v1/models/{name}", "/v1/embeddings", "/v1/completions", "/v1/chat/completions"),
    }
    inputs = described["components"]["schemas"]["EmbedRequest"]["properties"]["inputs"]
    assert {"type": "string"} in inputs["anyOf"]
    assert "422" not in json.dumps(described)  # refusals have status 400
