"""An LM behind `lm.url`, served: documents are mixed over what that server shows; what it cannot do is refused by name.

The server speaks as the stand-in does, so that every mixture can be computed here from its words.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from replug.config.schema import LMConfig
from replug.models.http.server_source import BEGINNINGS, HELPFUL, LONGER, OTHERS, TEXT, ServerSource
from replug.models.lm_source import LMFiles
from replug.models.local.stand_in_lm import WORD
from replug.serving.openai_api import ServingLimits
from replug.serving.service import load_service
from tests.support.fault_server import (
    MODEL,
    FaultServer,
    continue_words,
    word_logprobs,
    write_word_tokenizer,
)
from tests.support.serving import TEXTS, ask, post
from tests.support.small_index import write_small_index

NUM_TOKENS = 4
PROMPT = TEXTS[1]
CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"


def chat_of(content: str) -> str:
    return f"[user] {content} [assistant]"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_index(tmp_path_factory.mktemp("index"), TEXTS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the words of the probe, the documents and the chats, with a template."""
    probe = [*BEGINNINGS, HELPFUL, TEXT + LONGER, *OTHERS]
    folder = tmp_path_factory.mktemp("tokenizer")
    asked = [PROMPT, *(f"{text}\n{PROMPT}" for text in TEXTS)]
    write_word_tokenizer(folder, [*probe, *asked, *map(chat_of, asked)])
    made = PreTrainedTokenizerFast.from_pretrained(folder)
    made.chat_template = CHAT
    made.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')  # what is no folder of a model is refused
    return str(folder)


def asked_of(root: Path, server: FaultServer, test: Callable, tokenizer: str | None = None):
    """Return what `test(client)` returns, with an LM behind the server."""
    lm = LMConfig(url=server.url, model=MODEL, tokenizer=tokenizer, timeout_seconds=10)
    limits = ServingLimits(max_new_tokens=8, timeout_seconds=60)
    return ask(load_service(root, ServerSource(lm, LMFiles()), "\n", 2, limits), test)


def completion(**others: object) -> dict:
    return {"model": "replug", "prompt": PROMPT, "max_tokens": NUM_TOKENS, **others}


def chat(**others: object) -> dict:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "replug", "messages": messages, "max_tokens": NUM_TOKENS, **others}


def mixed_answer(prompts: list[str], weights: list[float]) -> str:
    """Of every prompt's own answer the one that is likeliest under the mixture at each of its words."""
    before = [WORD.findall(prompt) for prompt in prompts]
    answers = [continue_words(words, NUM_TOKENS) for words in before]
    masses = []
    for answer in answers:
        logprobs = np.array([word_logprobs([*words, *answer])[-len(answer) :] for words in before])  # [K, T]
        masses.append(float(np.log(np.asarray(weights) @ np.exp(logprobs)).sum()))
    return "".join(answers[int(np.argmax(masses))])


def require_mixed(found: dict, text: str, form: Callable[[str], str]) -> None:
    """`form` makes what the LM reads of a document."""
    documents = found["replug"]["documents"]
    scores = np.exp([one["score"] for one in documents])
    assert len(documents) == 2 and not any(one["is_cut"] for one in documents)
    np.testing.assert_allclose([one["weight"] for one in documents], scores / scores.sum(), rtol=1e-5)
    assert text == mixed_answer([form(one["text"]) for one in documents], [one["weight"] for one in documents])
    assert found["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_completion_mixes_the_servers_answers_with_each_document(
    root: Path, tokenizer: str, has_tokenizer: bool
) -> None:
    async def test(client):
        whole = await post(client, "/v1/completions", **completion())
        alone = await post(client, "/v1/completions", **completion(replug={"k": 0}))
        return whole, alone, (await client.post("/v1/completions", json=completion(stream=True))).text

    of_tokens = tokenizer if has_tokenizer else None
    with FaultServer(tokenizer=of_tokens) as server:
        whole, alone, stream = asked_of(root, server, test, of_tokens)
    require_mixed(whole, whole["choices"][0]["text"], lambda document: f"{document}\n{PROMPT}")
    assert alone["replug"]["documents"] == []
    assert alone["choices"][0]["text"] == "".join(continue_words(WORD.findall(PROMPT), NUM_TOKENS))
    *events, end = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    pieces = [json.loads(event) for event in events]
    assert end == "[DONE]" and pieces[-1]["replug"] == whole["replug"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]


def test_a_chat_is_in_the_template_of_lm_tokenizer(root: Path, tokenizer: str) -> None:
    async def test(client):
        return await post(client, "/v1/chat/completions", **chat())

    with FaultServer(tokenizer=tokenizer) as server:
        found = asked_of(root, server, test, tokenizer)
    said = found["choices"][0]["message"]["content"]
    require_mixed(found, said, lambda document: chat_of(f"{document}\n{PROMPT}"))


def test_what_a_server_cannot_do_is_refused_by_name_before_it_is_asked(root: Path, tokenizer: str) -> None:
    drawn, without_template = [completion(temperature=0.7), completion(temperature=0.7, stream=True)], chat()

    async def test(client):
        asked = server.requests
        refused = [await client.post("/v1/completions", json=body) for body in drawn]
        refused.append(await client.post("/v1/chat/completions", json=without_template))
        return refused, server.requests - asked

    with FaultServer() as server:
        (*refused, chatted), num_asked = asked_of(root, server, test)
    assert num_asked == 0
    for done in refused:
        error = done.json()["error"]
        assert (done.status_code, error["param"], error["code"]) == (400, "temperature", "unsupported_parameter")
        assert "a server's answers can be weighed at temperature 0 only" in error["message"]
    assert (chatted.status_code, chatted.json()["error"]["code"]) == (400, "no_chat_template")
    assert "lm.tokenizer for an LM behind a server" in chatted.text


def test_a_prompt_that_the_server_does_not_hold_is_refused_where_its_tokens_are_known(
    root: Path, tokenizer: str
) -> None:
    async def test(client):
        return await client.post("/v1/completions", json=completion(prompt=" ".join([PROMPT] * 20)))

    with FaultServer(tokenizer=tokenizer, max_model_len=100) as server:
        done = asked_of(root, server, test, tokenizer)
    assert (done.status_code, done.json()["error"]["code"]) == (400, "context_length_exceeded")
