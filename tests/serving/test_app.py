"""The server in this process: OpenAI's shapes, the ensemble's numbers, what is refused, and a swap under requests."""

import asyncio
import base64
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.index_workers.version_store import VersionStore
from replug.models.black_box_lm import Mixture, Watch
from replug.models.generation import Generated, GenerationOptions
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.stand_in_lm import StandInLM, StandInSource
from replug.models.prompt import PromptTemplate
from replug.models.replug_lm import ReplugLM
from replug.serving.requests import ServingLimits
from replug.serving.service import Prompting
from tests.support.index_versions import flip
from tests.support.lm_answers import mixed, texts_of
from tests.support.serving import TEXTS, opener, served
from tests.support.small_index import write_small_index
from tests.support.tiny_lms import MAX_TOKENS, load, random_lms_need_make_no_sense, write_gpt2  # noqa: F401

LIMITS = ServingLimits(max_texts=8, max_documents=6, max_new_tokens=40, timeout_seconds=60)
PROMPTS = ["the cat sat", "the mat and", "a cat slept on", "x"]
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@dataclass(frozen=True)
class Tiny:
    """A random LM, its index, and how the two are served."""

    lm: HuggingFaceLM
    root: Path
    prompting: Prompting
    tokenizer: PreTrainedTokenizerFast

    def opener(self, limits: ServingLimits = LIMITS) -> Callable:
        return opener(self.root, self.lm, self.prompting, limits)

    def replug(self, max_new_tokens: int) -> ReplugLM:
        retriever = IndexRetriever(LocalIndex(self.root, 1))
        return ReplugLM(self.lm, retriever, 2, PromptTemplate("\n", self.tokenizer, MAX_TOKENS - max_new_tokens))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, random_lms_need_make_no_sense: None) -> Tiny:  # noqa: F811
    folder = tmp_path_factory.mktemp("tiny")
    lm = load(write_gpt2, folder / "lm")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "lm")
    tokenizer.chat_template = CHAT
    return Tiny(lm, write_small_index(folder, TEXTS), Prompting("\n", tokenizer, MAX_TOKENS), tokenizer)


def ask(tiny: Tiny, test: Callable, limits: ServingLimits = LIMITS, token: str | None = None):
    """What `test(client)` returns."""

    async def run():
        async with served(tiny.opener(limits), limits, token) as client:
            return await test(client)

    return asyncio.run(run())


async def post(client, path: str, **body: object) -> dict:
    done = await client.post(path, json=body)
    assert done.status_code == 200, done.text
    return done.json()


def completion(prompt: object, **others: object) -> dict:
    return {"path": "/v1/completions", "model": "replug", "prompt": prompt, "max_tokens": 12, **others}


def chat(*texts: str, **others: object) -> dict:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"path": "/v1/chat/completions", "model": "replug", "messages": messages, "max_tokens": 12, **others}


def events(text: str) -> list:
    rows = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert rows[-1] == "[DONE]"
    return [json.loads(row) for row in rows[:-1]]


# Answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_is_that_of_the_ensemble_with_its_documents_weights_and_version(tiny: Tiny) -> None:
    async def test(client):
        return [await post(client, **completion(prompt)) for prompt in PROMPTS]

    replug = tiny.replug(12)
    expected = replug.generate(PROMPTS, GenerationOptions(12))
    for found, whole, documents in zip(ask(tiny, test), expected, replug.retrieve(PROMPTS), strict=True):
        assert found["choices"][0]["text"] == whole.text
        assert found["object"] == "text_completion"
        assert found["usage"]["prompt_tokens"] == whole.prompt_tokens
        assert found["usage"]["completion_tokens"] == whole.num_tokens
        own = found["replug"]
        assert (own["index_version"], own["temperature"], own["query_is_cut"]) == (0, 1.0, False)
        assert [(one["id"], one["text"]) for one in own["documents"]] == [(one.id, one.text) for one in documents]
        assert sum(one["weight"] for one in own["documents"]) == pytest.approx(1)


def test_answers_asked_at_once_are_decoded_together_and_are_those_of_each_alone(tiny: Tiny) -> None:
    drawn = {"temperature": 1.0, "seed": 3, "stop": ["the"]}

    async def test(client):
        alone = [await post(client, **completion(p, **o)) for p in PROMPTS for o in ({}, drawn)]
        before = (await client.get("/metrics")).text
        together = await asyncio.gather(*[post(client, **completion(p, **o)) for p in PROMPTS for o in ({}, drawn)])
        listed = await post(client, **completion(PROMPTS))
        return alone, together, before, (await client.get("/metrics")).text, listed

    alone, together, before, after, listed = ask(tiny, test)
    assert [one["choices"] for one in together] == [one["choices"] for one in alone]
    assert [one["replug"] for one in together] == [one["replug"] for one in alone]
    assert [one["text"] for one in listed["choices"]] == [one["choices"][0]["text"] for one in alone[::2]]
    assert listed["replug"] == [one["replug"] for one in alone[::2]]
    assert 'replug_batch_size_count{queue="answer"} 8.0' in before  # each alone
    assert 'replug_batch_size_count{queue="answer"} 11.0' in after  # greedy ones, drawn ones, and a list


def test_pieces_of_a_stream_are_the_answer(tiny: Tiny) -> None:
    async def test(client):
        whole = await post(client, **completion(PROMPTS[0], max_tokens=40))
        asked = completion(PROMPTS[0], max_tokens=40, stream=True, stream_options={"include_usage": True})
        streams = await asyncio.gather(*[client.post(asked["path"], json=_body(asked)) for _ in range(2)])
        return whole, streams

    whole, streams = ask(tiny, test)
    for stream in streams:
        assert stream.headers["content-type"].startswith("text/event-stream")
        *chunks, last, counts = events(stream.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        assert len(chunks) > 3
        assert {chunk["id"] for chunk in (*chunks, last, counts)} == {last["id"]}
        assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert last["replug"] == whole["replug"]
        assert (counts["choices"], counts["usage"]) == ([], whole["usage"])


def _body(asked: dict) -> dict:
    return {name: value for name, value in asked.items() if name != "path"}


def test_a_chat_has_each_document_in_its_last_message_and_one_beginning(tiny: Tiny) -> None:
    documents = tiny.replug(12).retrieve([TEXTS[1]])[0]
    prompts = [f"[user] hello\n[assistant] hi\n[user] {one.text}\n{TEXTS[1]}\n[assistant] " for one in documents]

    async def test(client):
        asked = chat("hello", "hi", TEXTS[1])
        stream = await client.post(asked["path"], json=_body({**asked, "stream": True}))
        return await post(client, **asked), events(stream.text)

    found, stream = ask(tiny, test)
    weights = [one["weight"] for one in found["replug"]["documents"]]
    # The tiny tokenizer adds no token at the beginning, so the template's stays.
    whole = mixed(tiny.lm, [f"<s>{prompt}" for prompt in prompts], weights, GenerationOptions(12))
    assert found["choices"][0]["message"] == {"role": "assistant", "content": whole.text}
    assert [one["id"] for one in found["replug"]["documents"]] == [one.id for one in documents]
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in stream) == whole.text


def test_a_start_that_the_tokenizer_adds_is_not_written_by_the_template_too(tiny: Tiny) -> None:
    class Adding:
        bos_token, bos_token_id, chat_template = "<s>", 0, CHAT
        apply_chat_template = staticmethod(tiny.tokenizer.apply_chat_template)

        def __call__(self, text: str, **options: object) -> dict:
            return {"input_ids": [0, 5]}

    from replug.serving.requests import Message

    message = Message(role="user", content="x")
    assert Prompting("\n", Adding(), None).of_chat([message])("d") == "[user] d\nx\n[assistant] "
    assert Prompting("\n", tiny.tokenizer, None).of_chat([message])(None) == "<s>[user] x\n[assistant] "


def test_a_document_that_does_not_fit_is_cut_and_the_answer_says_so(tiny: Tiny) -> None:
    prompt = "qzjxvk " * 13  # no merges

    async def test(client):
        return await post(client, **completion(prompt)), await post(client, **completion(prompt, replug={"k": 0}))

    found, alone = ask(tiny, test)
    assert any(one["is_cut"] for one in found["replug"]["documents"])
    assert alone["replug"]["documents"] == []
    assert alone["choices"][0]["text"] == texts_of(tiny.lm, [prompt], 12)[0]


# Retrieval ---------------------------------------------------------------------------------------------------------


def test_embeddings_are_the_retrievers_in_either_form(tiny: Tiny) -> None:
    expected = IndexRetriever(LocalIndex(tiny.root, 1)).encoder.encode(TEXTS).numpy()

    async def test(client):
        asked = {"path": "/v1/embeddings", "model": "retriever"}
        plain = await post(client, **asked, input=TEXTS)
        packed = await asyncio.gather(*[post(client, **asked, input=one, encoding_format="base64") for one in TEXTS])
        return plain, packed

    plain, packed = ask(tiny, test)
    np.testing.assert_allclose([row["embedding"] for row in plain["data"]], expected, atol=1e-6)
    rows = [np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), "<f4") for one in packed]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert plain["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in packed) > 0


def test_texts_that_the_retriever_does_not_read_whole_are_refused_or_cut(tiny: Tiny) -> None:
    long = " ".join(TEXTS * 10)

    async def test(client):
        refused = await client.post("/search", json={"query": ["x", long]})
        asked = {"model": "retriever", "input": long}
        embedding = await client.post("/v1/embeddings", json=asked)
        beside = await asyncio.gather(client.post("/v1/embeddings", json=asked), post(client, "/search", query="x"))
        cut = await post(client, "/search", query=long, truncate=True)
        return refused, embedding, beside, cut, await post(client, **completion("x", replug={"query": long}))

    refused, embedding, beside, cut, answer = ask(tiny, test)
    assert "query: text 1 has more than 64 tokens; expected less, or truncate: true" in refused.text
    assert (embedding.status_code, embedding.json()["error"]["param"]) == (400, "input")
    assert beside[0].status_code == 400
    assert cut["data"][0]["query_is_cut"] and answer["replug"]["query_is_cut"]


# What is refused ---------------------------------------------------------------------------------------------------

REFUSED = [
    (completion("x", n=2), 400, "n", "this server does 1 only"),
    (completion("x", logprobs=1), 400, "logprobs", "False only"),
    (completion("x", colour="red"), 400, "colour", "unknown"),
    (completion("x", temperature=-1), 400, "temperature", "expected 0 (greedy) or more"),
    (completion("x", top_p=0), 400, "top_p", "expected above 0"),
    (completion("x", max_tokens=41), 400, "max_tokens", "expected 1 to 40"),
    (completion("x", stop=["a"] * 17), 400, "stop", "16"),
    (completion("x", replug={"k": 7}), 400, "replug.k", "expected 0 to 6"),
    (completion("x", replug={"depth": 7}), 400, "replug.depth", "unknown"),
    (completion(["x"] * 9), 400, "prompt", "9 texts; expected 1 to 8"),
    (completion([1, 2]), 400, "prompt", "ids of tokens"),
    (completion("\ud800"), 400, "prompt", "half a character"),
    (chat("\ud800"), 400, "messages", "half a character"),
    (completion(["x", "y"], stream=True), 400, "stream", "expected one that is streamed"),
    (completion(["x", "y"], replug={"query": "z"}), 400, "replug.query", "expected one prompt"),
    (completion("qz" * 100), 400, None, "the prompt and max_tokens=12 are more than 128 tokens"),
    (completion("x", model="gpt-4"), 404, "model", "'gpt-4' is not served; expected 'replug'"),
    (chat("x", tools=[{"type": "function"}]), 400, "tools", "only"),
    (chat("x", "y"), 400, "messages", "the last is the assistant's; expected the user's"),
    (chat("x", max_completion_tokens=3), 400, "max_tokens", "another number"),
    (chat(), 400, "messages", "at least 1"),
    ({"path": "/v1/embeddings", "model": "retriever", "input": "x", "dimensions": 3}, 400, "dimensions", "expected "),
    ({"path": "/v1/embeddings", "model": "retriever", "input": "x", "input_type": "x"}, 400, "input_type", "query"),
    ({"path": "/v1/embeddings", "model": "retriever", "input": ["x"] * 9}, 400, "input", "expected 1 to 8"),
    ({"path": "/search", "query": "x", "k": 7}, 400, "k", "expected 1 to 6"),
    ({"path": "/nothing"}, 404, None, "POST /nothing: Not Found"),
]


def test_what_cannot_be_done_is_refused_by_name_in_openais_shape(tiny: Tiny) -> None:
    async def test(client):
        return [
            await client.post(asked["path"], content=json.dumps(_body(asked)), headers=JSON) for asked, *_ in REFUSED
        ]

    for done, (asked, status, param, fragment) in zip(ask(tiny, test), REFUSED, strict=True):
        error = done.json()["error"]
        assert (done.status_code, error["param"]) == (status, param), (asked, done.text)
        assert fragment in error["message"], (asked, error)
        assert error["type"] == "invalid_request_error"


JSON = {"content-type": "application/json"}


def test_without_a_template_there_is_no_chat(tiny: Tiny) -> None:
    prompting = Prompting("\n", StandInSource().tokenizer(), 4096)

    async def test():
        async with served(opener(tiny.root, StandInLM(), prompting, LIMITS), LIMITS) as client:
            asked = chat("x")
            whole = await post(client, **completion(TEXTS[0]))
            return await client.post(asked["path"], json=_body(asked)), whole

    refused, whole = asyncio.run(test())
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")
    assert "expected /v1/completions" in refused.text
    assert whole["choices"][0]["text"]


# Loading, models, going, swapping --------------------------------------------------------------------------------


def test_a_server_is_ready_when_all_is_loaded_and_says_what_it_serves(tiny: Tiny) -> None:
    may_load, ready = asyncio.Event(), {}

    async def slowly(metrics):
        await may_load.wait()
        return await tiny.opener()(metrics)

    async def test():
        from replug.serving.app import create_app
        from tests.support.serving import httpx

        app = create_app(slowly, LIMITS, None, lambda: None)
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url=URL) as client:
            for path in ("/health", "/v1/models"):
                ready[path] = await client.get(path)
            may_load.set()
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
            return (await client.get("/v1/models")).json(), (await client.get("/metrics")).text

    models, metrics = asyncio.run(test())
    assert [done.status_code for done in ready.values()] == [503, 503]
    assert ready["/v1/models"].headers["retry-after"] == "1"
    assert [one["id"] for one in models["data"]] == ["replug", "retriever"]
    assert models["data"][0]["replug"]["lm"] == tiny.lm.identity
    assert "replug_index_version 0.0" in metrics


URL = "http://127.0.0.1"


class EndlessLM(StandInLM):
    """Lengthens every answer until nobody wants it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.began = threading.Event()

    def generate(
        self, mixtures: Sequence[Mixture], options: GenerationOptions, watch: Watch | None = None
    ) -> list[Generated]:
        assert watch is not None
        text = "a"
        while watch(0, text):
            text += "a"
            self.began.set()
            threading.Event().wait(0.001)
        self.lengths.append(len(text))
        return [Generated(text, np.zeros(len(text)), None, 1, 1) for _ in mixtures]


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_too_long_ends_in_the_lm_too(tiny: Tiny, stream: bool) -> None:
    lm, limits = EndlessLM(), ServingLimits(timeout_seconds=0.3)

    async def test():
        prompting = Prompting("\n", None, None)
        async with served(opener(tiny.root, lm, prompting, limits), limits) as client:
            asked = completion("x", stream=stream)
            return await client.post(asked["path"], json=_body(asked))

    done = asyncio.run(test())
    assert "longer than 0.3 s" in done.text
    assert done.status_code == (200 if stream else 504)  # of a stream the status was sent before
    assert lm.began.is_set() and len(lm.lengths) == 1


def test_requests_end_on_the_version_they_began_on_while_a_newer_one_is_swapped_in(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(shutil.copytree(tiny.root.parent, tmp_path / "moved")) / "index"
    stop = asyncio.Event()

    async def search_on(client, seen: list) -> None:
        while not stop.is_set():
            found = await post(client, "/search", query=TEXTS[0], k=1)
            seen.append((found["index_version"], found["data"][0]["documents"][0]["text"]))

    async def until_version(client, version: int) -> None:
        while (await client.get("/health")).json()["index_version"] != version:
            await asyncio.sleep(0.01)

    async def test():
        seen: list = []
        async with served(opener(root, StandInLM(), Prompting("\n", None, None), LIMITS), LIMITS) as client:
            asking = [asyncio.create_task(search_on(client, seen)) for _ in range(3)]
            await asyncio.to_thread(write_small_index, root.parent, [*TEXTS[::-1], "new"], version=1)
            await until_version(client, 1)
            await post(client, "/search", query=TEXTS[0], k=1)
            stop.set()
            await asyncio.gather(*asking)
            await asyncio.to_thread(write_small_index, root.parent, TEXTS, version=2)
            await until_version(client, 2)
            return seen, (await client.get("/metrics")).text

    seen, metrics = asyncio.run(test())
    assert {version for version, _ in seen} == {0, 1}
    assert [version for version, _ in seen] == sorted(version for version, _ in seen)
    assert {text for _, text in seen} == {TEXTS[0]}  # both versions hold it, at another place
    assert 'replug_index_swaps_total{outcome="swapped"} 2.0' in metrics


def test_a_newer_version_that_is_damaged_leaves_the_old_one_serving(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(shutil.copytree(tiny.root.parent, tmp_path / "moved")) / "index"

    async def test():
        async with served(opener(root, StandInLM(), Prompting("\n", None, None), LIMITS), LIMITS) as client:
            other = write_small_index(tmp_path / "other", TEXTS, version=1)
            flip(VersionStore(other).vectors_path(1, 0))
            shutil.copytree(VersionStore(other).folder(1), VersionStore(root).folder(1))
            while "failed" not in (metrics := (await client.get("/metrics")).text):
                await asyncio.sleep(0.01)
            return metrics, await post(client, "/search", query=TEXTS[0])

    metrics, found = asyncio.run(test())
    assert found["index_version"] == 0
    assert "replug_index_version 0.0" in metrics
    assert "index version 0 is served on, a newer one cannot be opened" in caplog.text
