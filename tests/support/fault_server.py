"""A server on loopback that scores as StandInLM does, and goes wrong as servers do.

It speaks both wire forms, with text or with ids of a tokenizer whose tokens are the stand-in's words (by default those
of `KNOWN`). `fault_share` of the completions go wrong by a seeded generator; a `mode` is wrong for good. It counts what
it was asked for, so that a test need not believe its client.
"""

import asyncio
import json
import math
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from email.utils import formatdate
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replug.config.choices import ServerAPI
from replug.config.schema import LMConfig
from replug.models.http.server_source import BEGINNINGS, HELPFUL, LONGER, OTHERS
from replug.models.local.stand_in_lm import CACHE_SHARE, WORD
from replug.models.pair_tokens import TRIED

MODEL = "words"
START = "<s>"
KNOWN = [HELPFUL, LONGER, *OTHERS, *BEGINNINGS, "the red boat of blue green was new 日本語 🙂 a b c d e x y"]
LAST_WORD = " fin"  # what generation ends with: unlikely, so that a wrong position shows

THROTTLED = ["throttled", "throttled_seconds", "throttled_until"]
REFUSED = [*THROTTLED, "timed_out", "broken", "down"]
BROKEN_OFF = ["hang", "drip", "drop", "half_body"]
TRANSIENT = [*REFUSED, *BROKEN_OFF, "not_json", "wrong_count", "nan", "null", "short", "reordered"]


def server_spec(url: str, api: str = "echo", **changes: Any) -> LMConfig:
    """How a client asks for MODEL; `changes` are keys of `lm`. It waits 10 s for an answer, and for the server."""
    own = {"timeout_seconds": 10.0, "patience_minutes": 1 / 6, "tokenizer": None if api == "chat" else word_tokenizer()}
    return LMConfig(**{"url": url, "model": MODEL, "api": ServerAPI(api), **own} | changes)


def word_logprobs(words: Sequence[str]) -> list[float]:
    """The stand-in's log-prob of each word after those before it, which it counts as its prefix."""
    counts: Counter[str] = Counter()
    logprobs = []
    for number, word in enumerate(words):
        by_bytes = math.log(1 - CACHE_SHARE) - len(word.encode()) * math.log(256)
        seen = counts[word.strip()]
        by_cache = math.log(CACHE_SHARE * seen / max(1, number)) if seen else -math.inf
        logprobs.append(float(np.float32(np.logaddexp(by_cache, by_bytes))))
        counts[word.strip()] += 1
    return logprobs


def continue_words(words: Sequence[str], number: int, sample: int = 0) -> list[str]:
    """The most frequent word again and again; of other samples another one of the words, by its frequency."""
    counts = Counter(word.strip() for word in words)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    best = ordered[sample % len(ordered)]
    return [f" {best}"] * (number - 1) + [LAST_WORD] if number > 1 else [f" {best}"]


def write_word_tokenizer(folder: Path, texts: Sequence[str]) -> str:
    """A folder with a tokenizer for the words of `texts`, each known with a space before it and without."""
    tried = [text for pair in TRIED for text in pair]
    words = sorted(
        {form for text in [*texts, *tried] for word in WORD.findall(text) for form in (word, f" {word.strip()}")}
    )
    vocabulary = {word: number for number, word in enumerate([START, LAST_WORD, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=START))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD.pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START).save_pretrained(folder)
    (folder / "config.json").write_text("{}")  # so that it is a model's folder
    return str(folder)


@cache
def word_tokenizer() -> str:
    """A folder with the tokenizer of the words of KNOWN, also at the beginning of a text and of a line."""
    words = [f"{start}{word}" for text in KNOWN for word in text.split() for start in ("", "\n")]
    return write_word_tokenizer(Path(tempfile.mkdtemp()), words)


class FaultServer:
    """Serves from a thread while the `with` block lasts; `url` is its address."""

    paths: Sequence[str] = ()  # that it answers besides

    def __init__(
        self,
        fault_share: float = 0.0,
        kinds: Sequence[str] = TRANSIENT,
        mode: str = "honest",
        seed: int = 0,
        seconds: float = 0.0,
        api_key: str | None = None,
        tokenizer: str | None = None,
        max_model_len: int | None = None,
        retry_after: str = "0",
        first_faults: int = 0,
    ) -> None:
        self.fault_share, self.kinds, self.mode, self.first_faults = fault_share, list(kinds), mode, first_faults
        self.seconds, self.api_key, self.max_model_len = seconds, api_key, max_model_len
        self.retry_after = retry_after
        self.requests = self.tokens = self.open = self.most_open = 0
        self.connections: set[object] = set()
        self.faults: Counter[str] = Counter()
        self.payloads: list[dict] = []
        self.times: list[float] = []
        self.port = 0
        self._rng = np.random.default_rng(seed)
        self._words = _words_by_id(tokenizer or word_tokenizer())
        self._loop = asyncio.new_event_loop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "FaultServer":
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", *self.paths):
            app.router.add_post(path, self._completions)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _models(self, request: web.Request) -> web.Response:
        if refusal := self._unauthorized(request):
            return refusal
        card = {"id": MODEL, "object": "model"} | ({"max_model_len": self.max_model_len} if self.max_model_len else {})
        return web.json_response({"object": "list", "data": [card]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        request["seconds"] = self.seconds  # of now: a test may change them once it sees the request open
        self.requests += 1
        self.connections.add(request.transport)
        self.times.append(time.monotonic())
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return self._unauthorized(request) or await self._answer(request, await request.json())
        finally:
            self.open -= 1

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "")
        if self.api_key is None or given == f"Bearer {self.api_key}":
            return None
        return web.json_response({"error": {"message": f"Invalid key:\n{given}"}}, status=401)

    async def _answer(self, request: web.Request, payload: dict) -> web.StreamResponse:
        payload["prompt"] = _listed(payload["prompt"])
        self.payloads.append(payload)
        fault = self._draw()
        self.faults[fault] += 1
        if fault in REFUSED or self.mode == "down":
            return _refusal(fault, self.retry_after)
        if self.mode == "moved":
            raise web.HTTPTemporaryRedirect("/v1/completions")
        prompts = [self._split(prompt) for prompt in payload["prompt"]]
        self.tokens += sum(map(len, prompts)) + len(prompts) * payload.get("n", 1) * payload["max_tokens"]
        if self.mode == "one_input" and len(prompts) > 1:
            return web.json_response({"error": {"message": ""}}, status=500)
        if self.max_model_len and max(map(len, prompts)) >= self.max_model_len:
            said = f"maximum context length is {self.max_model_len} tokens"
            return web.json_response({"error": {"message": said}}, status=400)
        await asyncio.sleep(request["seconds"])
        return await self._send(request, fault, self._body(prompts, payload))

    def body(self, payload: dict) -> dict:
        """What it answers to a request, by its mode."""
        return self._body([self._split(prompt) for prompt in _listed(payload["prompt"])], payload)

    def _body(self, prompts: list[list[str]], payload: dict) -> dict:
        num_samples, num_tokens = payload.get("n", 1), sum(map(len, prompts))
        return {
            "choices": [
                self._choice(number * num_samples + sample, words, payload, payload.get("seed", 0) + sample)
                for number, words in enumerate(prompts)
                for sample in range(num_samples)
            ],
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens + len(prompts) * num_samples * payload["max_tokens"],
            },
        }

    def _draw(self) -> str:
        if self.requests <= self.first_faults or self._rng.random() < self.fault_share:
            return str(self._rng.choice(self.kinds))
        return "none"

    def _split(self, prompt: str | list[int]) -> list[str]:
        if isinstance(prompt, str):
            return WORD.findall(prompt)
        return [self._words[number] for number in prompt]

    def _choice(self, index: int, words: list[str], payload: dict, sample: int) -> dict:
        new = continue_words([word for word in words if word != START], payload["max_tokens"], sample)
        of_prompt = payload.get("echo") or "prompt_logprobs" in payload
        shown = [*words, *new] if of_prompt else new
        values = self._values([*words, *new])[-len(shown) :]
        if self.mode == "shifted" and of_prompt:
            values = [None, None, *values[1:-1]]
        if self.mode == "crowded":
            values = [value and value / len(payload["prompt"]) for value in values]
        choice = {"index": index, "text": "".join(shown), "finish_reason": "length"}
        if "prompt_logprobs" in payload:
            prompt = payload["prompt"][index]
            entries = [{str(i): {"logprob": value, "rank": 1}} for i, value in zip(prompt, values, strict=False)]
            return choice | {"prompt_logprobs": [None, *entries[1:]], "text": "".join(new)}
        if self.mode == "no_echo":
            shown, values = new, values[-len(new) :]
        logprobs = {"tokens": shown, "token_logprobs": values, "text_offset": [0] * len(shown)}
        return choice | {"logprobs": None if self.mode == "no_logprobs" else logprobs}

    def _values(self, words: list[str]) -> list[float | None]:
        """Log-probs of all words as this server gives them. A start token counts for nothing."""
        opening = 1 if words[0] == START else 0
        values: list[float | None] = [*[0.0] * opening, *word_logprobs(words[opening:])]
        if self.mode == "constant":
            values = [-2.0] * len(values)
        if self.mode == "other_model":  # as good, and another
            values = [value and value * 0.8 for value in values]
        if self.mode == "length_dependent":
            values = [value - 0.05 * len(values) for value in values if value is not None]
        return [None, *values[1:]]

    async def _send(self, request: web.Request, fault: str, body: dict) -> web.StreamResponse:
        _spoil(body, fault)
        content = json.dumps(body).encode()
        if fault == "not_json":
            content = b"<html>Bad gateway</html>"
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault in ("drop", "half_body", "drip"):
            return await _break_off(request, fault, content)
        return web.Response(body=content, content_type="application/json")


def _listed(prompt: str | list) -> list:
    return [prompt] if isinstance(prompt, str) else prompt


def _spoil(body: dict, fault: str) -> None:
    choice = body["choices"][-1]
    logprobs = choice.get("logprobs")
    if fault == "wrong_count":
        body["choices"].append(dict(choice))
    if fault == "reordered":
        body["choices"].reverse()
    if fault in ("nan", "null", "short"):
        values = logprobs["token_logprobs"] if logprobs else choice["prompt_logprobs"]
        wrong = {"nan": float("nan"), "null": None}
        if fault == "short":
            del values[-2:]
        else:
            values[-2] = wrong[fault]


async def _break_off(request: web.Request, fault: str, content: bytes) -> web.StreamResponse:
    assert request.transport is not None
    response = web.StreamResponse(headers={"Content-Length": str(len(content)), "Content-Type": "application/json"})
    if fault != "drop":
        await response.prepare(request)
        await response.write(content[: len(content) // 2])
    while fault == "drip":
        await asyncio.sleep(0.02)
        await response.write(b" ")
    request.transport.abort()
    return response


def _refusal(fault: str, retry_after: str) -> web.Response:
    headers = {
        "throttled_seconds": {"Retry-After": retry_after},
        "throttled_until": {"Retry-After": formatdate(time.time() + float(retry_after), usegmt=True)},
    }
    status = 429 if fault in THROTTLED else {"timed_out": 408, "broken": 500}.get(fault, 503)
    said = fault if fault in REFUSED else "down"
    return web.json_response({"error": {"message": f"it is {said}"}}, status=status, headers=headers.get(fault))


@cache
def _words_by_id(folder: str) -> list[str]:
    vocabulary = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    return sorted(vocabulary, key=lambda word: vocabulary[word])
