"""An LM behind `lm.url`, served: its answers are mixed over the documents; what it cannot do is refused by name."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from replug.config.choices import ServerAPI, Teacher
from replug.config.schema import EnsembleConfig, LMConfig
from replug.models.build import lm_source, posterior_weighting
from replug.models.ensemble import SHARE, Weighting, mix
from replug.models.http.server_source import BEGINNINGS, HELPFUL, LONGER, OTHERS, TEXT, ServerSource
from replug.models.local.stand_in_lm import WORD, StandInLM
from replug.serving.openai_api import ApiError, Message, ServingLimits
from replug.serving.service import build_chat, load_service
from tests.support.fault_server import MODEL, FaultServer, continue_words, word_logprobs, write_word_tokenizer
from tests.support.serving import TEXTS, ask, events, post
from tests.support.small_index import write_small_index

NUM_TOKENS, PROMPT = 4, TEXTS[1]
COMPLETION = {"model": "replug", "prompt": PROMPT, "max_tokens": NUM_TOKENS}
CHAT = {"model": "replug", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_TOKENS}
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_index(tmp_path_factory.mktemp("index"), TEXTS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the words of the probe, the documents and the chats, with a template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    asked = [PROMPT, *(f"{text}\n{PROMPT}" for text in TEXTS)]
    chats = [f"[user] {text} [assistant]" for text in asked]
    write_word_tokenizer(folder, [*BEGINNINGS, HELPFUL, TEXT + LONGER, *OTHERS, *asked, *chats])
    made = PreTrainedTokenizerFast.from_pretrained(folder)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')  # a folder that is not a model's is refused
    return str(folder)


def ask_server(root: Path, server: FaultServer, test: Callable, tokenizer: str):
    lm = LMConfig(url=server.url, model=MODEL, tokenizer=tokenizer, timeout_seconds=10)
    limits = ServingLimits(max_new_tokens=8, timeout_seconds=60)
    return ask(load_service(root, ServerSource(lm), lm, 2, limits), test)


def expected_answer(found: dict, form: str) -> str:
    """Of every prompt's own answer the one that is likeliest under the mixture at each of its words."""
    documents = found["replug"]["documents"]
    assert len(documents) == 2 and not any(one["is_cut"] for one in documents)
    prompts = [form.format(f"{one['text']}\n{PROMPT}") for one in documents]
    before = [WORD.findall(prompt) for prompt in prompts]
    answers = [continue_words(words, NUM_TOKENS) for words in before]
    masses = []
    for answer in answers:
        logprobs = np.array([word_logprobs([*words, *answer])[-len(answer) :] for words in before])  # [K, T]
        masses.append(float(mix(logprobs, np.log([one["prior"] for one in documents]), Weighting(SHARE)).sum()))
    return "".join(answers[int(np.argmax(masses))])


def test_the_servers_answers_are_mixed_over_the_documents(root: Path, tokenizer: str) -> None:
    async def test(client):
        whole = await post(client, "/v1/completions", **COMPLETION)
        stream = (await client.post("/v1/completions", json={**COMPLETION, "stream": True})).text
        return whole, stream, await client.post("/v1/chat/completions", json=CHAT)

    with FaultServer(tokenizer=tokenizer) as server:
        whole, stream, chat = ask_server(root, server, test, tokenizer)
    assert whole["choices"][0]["text"] == expected_answer(whole, "{}")
    pieces = events(stream)
    assert pieces[-1]["replug"] == whole["replug"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    expected = expected_answer(chat.json(), "[user] {} [assistant]")
    assert chat.json()["choices"][0]["message"]["content"] == expected


def test_a_server_that_is_asked_in_chats_gets_no_chat_template_of_ours(root: Path, tokenizer: str) -> None:
    lm = LMConfig(url="http://127.0.0.1/v1", model=MODEL, tokenizer=tokenizer, api=ServerAPI.chat)
    source = SimpleNamespace(tokenizer=ServerSource(lm).tokenizer, open_here=StandInLM)
    service = load_service(root, source, lm, 2, ServingLimits())
    with pytest.raises(ApiError, match=r"no chat template; expected /v1/completions, or .* lm\.api=echo"):
        build_chat(service.template, service.chats, [Message(role="user", content=PROMPT)])
    assert service.template.whole(TEXTS[0], PROMPT) == f"{TEXTS[0]}\n{PROMPT}"
    assert posterior_weighting(EnsembleConfig(), lm, is_asked=True).read == 0  # which would want token ids


def test_what_a_server_cannot_do_is_refused_by_name_before_it_is_asked(root: Path, tokenizer: str) -> None:
    drawn, long = {**COMPLETION, "temperature": 0.7}, {**COMPLETION, "prompt": " ".join([PROMPT] * 20)}

    async def test(client):
        asked = server.requests
        refused = [await client.post("/v1/completions", json=one) for one in (drawn, {**drawn, "stream": True}, long)]
        assert server.requests == asked
        return [(done.status_code, done.json()["error"]["param"], done.json()["error"]["code"]) for done in refused]

    with FaultServer(tokenizer=tokenizer, max_model_len=100) as server:
        found = ask_server(root, server, test, tokenizer)
    assert found == [(400, "temperature", "unsupported_parameter")] * 2 + [(400, None, "context_length_exceeded")]


def test_answers_vote_behind_a_server_without_any_log_probs(root: Path) -> None:
    async def test(client):
        return await post(client, "/v1/completions", **COMPLETION)

    with FaultServer() as server:
        lm = LMConfig(url=server.url, model=MODEL, timeout_seconds=10, score=Teacher.answer)
        limits = ServingLimits(max_new_tokens=8, timeout_seconds=60)
        voting = Weighting(1.0, votes=True)
        whole = ask(load_service(root, lm_source(lm, None, None), lm, 2, limits, weighting=voting), test)
    documents = whole["replug"]["documents"]
    own = ["".join(continue_words(WORD.findall(f"{one['text']}\n{PROMPT}"), NUM_TOKENS)) for one in documents]
    priors = [one["prior"] for one in documents]
    assert whole["choices"][0]["text"] == own[int(np.argmax(priors))]  # two answers, the heavier one is elected
    assert sum(one["weight"] for one in documents) == pytest.approx(1)
    assert not any(key in payload for payload in server.payloads for key in ("logprobs", "echo", "prompt_logprobs"))


def test_a_call_that_hangs_holds_up_nobody_and_ends_with_its_time(root: Path, tokenizer: str) -> None:
    with FaultServer(tokenizer=tokenizer) as server:
        lm = LMConfig(url=server.url, model=MODEL, tokenizer=tokenizer, timeout_seconds=600)
        service = load_service(root, ServerSource(lm), lm, 2, ServingLimits(max_new_tokens=8, timeout_seconds=1.5))

        async def test(client):
            server.seconds = 1000.0
            server.connections.clear()
            hanging = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            while not server.open:
                await asyncio.sleep(0.01)
            server.seconds, held = 0.0, set(server.connections)
            assert (await post(client, "/v1/completions", **COMPLETION))["choices"]
            assert not hanging.done()
            assert (await hanging).status_code == 504
            while not all(connection.is_closing() for connection in held):
                await asyncio.sleep(0.01)  # the server's side of what was cancelled

        ask(service, test)
