"""`replug serve` as a user types it; the real command in a process, asked by OpenAI's own client."""

import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from replug.serving.access import TOKEN_VARIABLE
from tests.support.command_line import start_process
from tests.support.real_models import real_lm
from tests.support.serving import TEXTS
from tests.support.small_index import write_small_index

TOKEN = "a token of this test".replace(" ", "-")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_index(tmp_path_factory.mktemp("index"), TEXTS)


@pytest.mark.slow
def test_openais_client_asks_the_real_command_which_ends_well(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

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
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(model="replug", messages=messages, max_tokens=8, extra_body=WITHOUT)
    assert "Paris" in chat.choices[0].message.content


WITHOUT = {"replug": {"k": 0}}
