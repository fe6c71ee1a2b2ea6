"""Clients: vectors of queries and documents that are embedded apart, and OpenAI's own client of the real command."""

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from replug.config.choices import TrainedSide
from replug.config.schema import RetrieverConfig
from replug.models.encoder import Encoder
from replug.serving.access import TOKEN_VARIABLE
from replug.train.trained_weights import save_retriever
from tests.support.command_line import start_process
from tests.support.encoder_folders import write_dpr_pair
from tests.support.real_models import real_lm
from tests.support.serving import TEXTS, ask, service_of
from tests.support.small_index import write_small_index

DIMS = 8


@dataclass(frozen=True)
class Apart:
    """An index, and the vectors [N, D] of TEXTS on either side."""

    root: Path
    query: np.ndarray
    document: np.ndarray


def with_prompts(folder: Path) -> Apart:
    """One encoder, another prompt for each side."""
    encoder = Encoder("stand_in", query_prompt=f"{TEXTS[0]} ", document_prompt=f"{TEXTS[1]} ")
    encoder.save(folder / "encoder")
    plain = Encoder("stand_in")
    query, document = (plain.encode([f"{TEXTS[place]} {text}" for text in TEXTS]).numpy() for place in (0, 1))
    return Apart(write_small_index(folder, TEXTS, str(folder / "encoder")), query, document)


def of_a_pair(folder: Path) -> Apart:
    """Two encoders."""
    documents, queries = map(str, write_dpr_pair(folder))
    Encoder(documents, query_path=queries).save(folder / "pair")
    query, document = (Encoder(path).encode(TEXTS).numpy() for path in (queries, documents))
    return Apart(write_small_index(folder, TEXTS, str(folder / "pair")), query, document)


def of_tuned_queries(folder: Path) -> Apart:
    """A run that tuned queries alone, searched by the first numbers: documents have the encoder of the index."""
    documents, queries = map(str, write_dpr_pair(folder))
    config = RetrieverConfig(documents, train=TrainedSide.query)
    save_retriever(folder / "retriever", Encoder(queries), config, Encoder(documents))
    query, document = (Encoder(path, dims=DIMS).encode(TEXTS).numpy() for path in (queries, documents))
    return Apart(write_small_index(folder, TEXTS, documents, dims=DIMS), query, document)


@pytest.mark.parametrize("make", [with_prompts, of_a_pair, of_tuned_queries])
def test_the_side_must_be_said_and_each_gives_its_own_vectors(make: Callable[[Path], Apart], tmp_path: Path) -> None:
    apart, asked = make(tmp_path), {"model": "retriever", "input": TEXTS}
    bodies = [asked, *({**asked, "input_type": side} for side in ("query", "document"))]

    async def test(client):
        return [await client.post("/v1/embeddings", json=body) for body in bodies]

    unsaid, query, document = ask(service_of(apart.root), test)
    assert (unsaid.status_code, unsaid.json()["error"]["param"]) == (400, "input_type")
    assert "expected query or document" in unsaid.text
    for found, expected in ((query, apart.query), (document, apart.document)):
        assert found.status_code == 200, found.text
        vectors = np.array([row["embedding"] for row in found.json()["data"]])
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert np.abs(apart.query - apart.document).max() > 0.01


# The real command in a process, asked by OpenAI's own client ----------------------------------------------------------

TOKEN = "a-token-of-this-test"


@pytest.mark.slow
def test_openais_client_asks_the_real_command_which_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    index = write_small_index(tmp_path, TEXTS)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    real_lm()
    process = start_process("serve", index, "lm.path=package:smollm2", "--port", 0, "--k", 2)
    try:
        assert process.stdout is not None
        url = _url(process.stdout)
        _wait_until_ready(url)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0)
        _ask_all(client)
        with pytest.raises(openai.AuthenticationError, match="expected the server's token"):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        stream = client.completions.create(model="replug", prompt=TEXTS[0], max_tokens=40, stream=True)
        next(stream)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "stopped; all accepted requests have been answered" in output
    assert TOKEN not in output


def _url(lines) -> str:
    for line in lines:
        if found := re.search(r"listening on (\S+)", line):
            return found[1]
    raise AssertionError("the server said no address")


def _wait_until_ready(url: str) -> None:
    end = time.monotonic() + 300
    while httpx.get(f"{url}/health", timeout=60).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.2)


def _ask_all(client) -> None:
    assert [model.id for model in client.models.list()] == ["replug", "retriever"]
    vectors = client.embeddings.create(model="retriever", input=TEXTS)  # in base64, as the client asks by itself
    assert len(vectors.data) == len(TEXTS) and len(vectors.data[0].embedding) > 8
    asked = {"model": "replug", "prompt": TEXTS[0], "max_tokens": 6}
    whole = client.completions.create(**asked)
    assert len(whole.replug["documents"]) == 2 and whole.replug["index_version"] == 0
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == (
        whole.choices[0].text
    )
    alone = {"replug": {"k": 0}}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(model="replug", messages=messages, max_tokens=8, extra_body=alone)
    assert "Paris" in chat.choices[0].message.content
