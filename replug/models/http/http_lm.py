"""The language model behind somebody's HTTP server: an `AsyncLM` whose answers are whole and in order, or an error.

A call is cut into requests of `prompts_per_request` inputs, of which `max_concurrency` are under way at once.
A request keeps its place while it waits to be tried again, so a server that is down ends the run soon and
one that throttles is not pressed. The most that a request can cost is taken from the budget before it is sent.
With a tokenizer the server gets the very token ids that local weights would get; without one it gets
text, and finds the border between prefix and continuation in its own tokens.
Servers are restarted, moved and replaced while a run goes on: every so many requests, and after a fault, a text of the
probe is scored again, and a call's answers are given out only where that has the scores it had.
All requests live on one event loop, in a thread of its own.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np

from replug.config.errors import RunError, UserError
from replug.models.black_box_lm import ContinuationScore, UnscorableText, check_ensemble, check_pairs, require_texts
from replug.models.generation import Generated, GenerationOptions, Sampled, SamplingOptions, Stop, before_stop
from replug.models.http import completions_api as api
from replug.models.http.completions_api import GeneratedTexts, Pair, ServerFault, ShownAnswers, TokenForms, TokenScores
from replug.models.http.connection import ServerConnection, ServerError, ServerSpec
from replug.models.http.mixed_answer import ServerCalls, ServerMixture, TokenNames
from replug.models.http.request_budget import RequestBudget, RequestMeter
from replug.models.pair_tokens import check_lengths, pair_token_ids

T = TypeVar("T")

REQUESTS_BETWEEN_LOOKS = 256  # at the model that was probed: one in so many, short as it is, costs next to nothing


class HttpLM:
    """An `AsyncLM` at `spec.url`; a server that does not answer, or does not serve the model, is a UserError at once.

    `max_tokens` leaves room for the one token that every request must generate, and is None where the server
    does not say. `identity` is the model's name until a probe has given a `fingerprint`
    (`models.http.server_source.connect`). `budget` is this LM's alone.
    """

    def __init__(self, spec: ServerSpec, budget: RequestBudget) -> None:
        self.spec = spec
        self.identity = spec.model
        self.fingerprint = np.empty(0, dtype=np.float32)
        self._tokenizer: Any = None
        self._forms: TokenForms | None = None
        self._names: TokenNames | None = None
        if spec.tokenizer:
            from replug.models.model_files import load_tokenizer  # seconds to import, which text alone can do without

            self._tokenizer = load_tokenizer(spec.tokenizer, "lm.tokenizer")
            if self._tokenizer.eos_token_id is None and self._tokenizer.bos_token_id is None:
                raise UserError(
                    f"lm.tokenizer: the tokenizer of {spec.tokenizer} has neither a start nor an end token; set one"
                )
            self._forms, self._names = TokenForms(self._tokenizer), TokenNames(self._tokenizer)
        self._look: Callable[[], Coroutine[Any, Any, str | None]] | None = None
        self._requests_since_look, self._is_doubtful = 0, False
        self._budget, self._settled = budget, asyncio.Event()
        self._slots = asyncio.Semaphore(spec.max_concurrency)
        self._meter = RequestMeter(spec.max_concurrency)
        self._connection = ServerConnection(spec, self._meter.retried)
        self._lock, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-lm", daemon=True)
        self._thread.start()
        try:
            self.max_tokens = self._run(self._longest_input()).result()
        except UserError:
            self.close()
            raise

    def look_again_at(self, prefix: str, continuation: str, shortcoming: Callable[[np.ndarray], str | None]) -> None:
        """From now on, look whether the server is the one that was probed.

        `shortcoming` says what is wrong with the pair's log-probs, float32 [T].
        """
        pair = self._pair(0, prefix, continuation)

        async def look() -> str | None:
            return shortcoming((await self._score_request([pair]))[0].logprobs)

        self._look, self._requests_since_look = look, 0

    def units(self, prefixes: Sequence[str], continuations: Sequence[str]) -> list[list[int]]:
        """One request each."""
        return self._chunks(list(range(len(prefixes))))

    def submit(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> "Future[list[ContinuationScore]]":
        """Scores in nats, whole and in order, or the first error: ServerError, BudgetSpent, UnscorableText.

        Raises UnscorableText at once for empty continuations and inputs beyond `max_tokens`.
        """
        check_pairs(prefixes, continuations)
        pairs = [self._pair(row, p, c) for row, (p, c) in enumerate(zip(prefixes, continuations, strict=True))]
        check_lengths([pair.ids for pair in pairs if pair.ids], self.max_tokens)
        return self._run(self._score(pairs))

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[str], *, opening: str | None = None
    ) -> list[ContinuationScore]:
        return self.submit(prefixes, continuations, opening=opening).result()

    def generate(self, prompts: Sequence[str], max_new_tokens: int, stop: Stop = None) -> list[str]:
        """Greedy continuations. Raises as `submit` does."""
        options = GenerationOptions(max_new_tokens, stop or None)
        texts = [text for text, _ in self.generate_scored(prompts, max_new_tokens, options.stop)]
        return [before_stop(text, options.stop) for text in texts]

    def generate_scored(
        self, prompts: Sequence[str], max_new_tokens: int, stop: Stop = None
    ) -> list[tuple[str, np.ndarray]]:
        """Greedy continuations, each with the log-probs (nats) of its tokens, float32 [T]."""
        require_texts(prompts, "prompts")
        return self._run(self._generate(self._prompts(prompts, max_new_tokens), max_new_tokens, stop)).result().answers

    def submit_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> "Future[Generated]":
        """The greedy answer of the mixture: token by token with `lm.tokenizer`, else the likeliest whole answer.

        `models.http.mixed_answer` says how. Raises as `submit` does, UserError for a temperature above 0, RunError for
        a server that shows no log-probs, and ValueError for weights.
        """
        check_ensemble(prompts, weights)
        self.require_greedy(options)
        pairs = self._prompts(prompts, options.max_new_tokens)
        return self._run(self._generate_ensemble(pairs, list(weights), options))

    def require_greedy(self, options: GenerationOptions) -> None:
        """Raise UserError for a temperature above 0."""
        if options.temperature:
            raise UserError(
                f"temperature is {options.temperature:g}; a server's answers can be weighed at temperature 0 only, "
                "since the mixture is not seen: set temperature to 0, or take local weights"
            )

    def generate_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        return self.submit_ensemble(prompts, weights, options).result()

    def submit_samples(self, prompts: Sequence[str], options: SamplingOptions) -> "Future[list[list[Sampled]]]":
        """The server's own draws, `n` after each prompt by one request; the seed is sent, and servers may ignore it.

        Raises as `submit` does, UserError for a server without `n`, and RunError for one that gives no log-probs.
        """
        require_texts(prompts, "prompts")
        return self._run(self._sample(self._prompts(prompts, options.max_new_tokens), options))

    def sample(self, prompts: Sequence[str], options: SamplingOptions) -> list[list[Sampled]]:
        return self.submit_samples(prompts, options).result()

    def metrics(self) -> dict[str, float]:
        """Requests and tokens that the budget has counted, retries of this process, and rates since the last call."""
        totals = {"requests": float(self._budget.requests), "tokens_sent": float(self._budget.tokens)}
        return totals | self._meter.read()

    def close(self) -> None:
        """Break off what is under way, which raises RunError, and end the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            done = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        done.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _chunks(self, rows: list[T]) -> list[list[T]]:
        size = self.spec.prompts_per_request
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _pair(self, row: int, prefix: str, continuation: str) -> Pair:
        ids = pair_token_ids(self._tokenizer, prefix, continuation) if self._tokenizer else None
        return Pair(row, prefix, continuation, ids)

    def _prompts(self, prompts: Sequence[str], max_new_tokens: int) -> list[Pair]:
        pairs = [self._pair(row, prompt, " ") for row, prompt in enumerate(prompts)]
        check_lengths([(pair.ids[0], [0] * max_new_tokens) for pair in pairs if pair.ids], self.max_tokens)
        return pairs

    def _run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(self._unless_closed(work), self._loop)
        work.close()
        raise RunError(f"the connection to {self.spec.url} is closed")

    async def _unless_closed(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            raise RunError(f"the connection to {self.spec.url} was closed before its work was done") from None

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._connection.close()

    async def _longest_input(self) -> int | None:
        """In tokens, as `GET /models` tells, or None. Raises UserError where the model is not served."""
        try:
            body = await self._connection.retrying("GET /models", partial(self._connection.exchange, "GET", "/models"))
        except ServerError as error:
            raise UserError(f"lm.url: {error}") from error
        context = api.context_length(body, self.spec.model, self._connection.words)
        return context - 1 if context is not None else None

    async def _score(self, pairs: list[Pair]) -> list[ContinuationScore]:
        scores = await _all(self._score_request(chunk) for chunk in self._chunks(pairs))
        _check_same_tokens(pairs, scores)
        await self._check_unchanged()
        return [ContinuationScore(score.logprobs) for score in scores]

    async def _score_request(self, pairs: list[Pair]) -> list[TokenScores]:
        payload = api.score_payload(self.spec.api, pairs)
        read = partial(api.read_scores, self.spec.api, pairs, forms=self._forms)
        return await self._ask(pairs, payload, read, is_compared=True)

    async def _generate(self, pairs: list[Pair], max_new_tokens: int, stop: Stop) -> GeneratedTexts:
        async def ask(some: list[Pair]) -> list[GeneratedTexts]:
            payload = api.generate_payload(some, max_new_tokens, stop)
            return [await self._ask(some, payload, partial(api.read_generated, some))]

        parts = await _all(ask(chunk) for chunk in self._chunks(pairs))
        await self._check_unchanged()
        return GeneratedTexts([answer for part in parts for answer in part.answers], _prompt_tokens(pairs, parts))

    async def _sample(self, pairs: list[Pair], options: SamplingOptions) -> list[list[Sampled]]:
        async def ask(some: list[Pair]) -> list[list[tuple[str, np.ndarray]]]:
            payload = api.sample_payload(some, options)
            num_samples = payload.get("n", 1)
            drawn = await self._ask(some, payload, partial(api.read_samples, some, num_samples))
            return [answers * (options.num_samples // num_samples) for answers in drawn]

        drawn = await _all(ask(chunk) for chunk in self._chunks(pairs))
        await self._check_unchanged()
        samples = [[Sampled(before_stop(text, options.stop), logprobs) for text, logprobs in some] for some in drawn]
        self._require_logprobs((one.text, one.token_logprobs) for some in samples for one in some)
        return samples

    def _require_logprobs(self, answers: Iterable[tuple[str, np.ndarray]]) -> None:
        if any(answer and not len(logprobs) for answer, logprobs in answers):
            raise RunError(f"{self.spec.url} gives no log-probs of what it generates: its answers cannot be weighed")

    async def _generate_ensemble(
        self, pairs: list[Pair], weights: list[float], options: GenerationOptions
    ) -> Generated:
        if len(pairs) > 1:
            calls = ServerCalls(self._show, self._score, self._pair, self._names, api.num_tops(self.spec.api))
            return await ServerMixture(calls, pairs, weights, options).find()
        found = await self._generate(pairs, options.max_new_tokens, options.stop)
        [(text, logprobs)] = found.answers
        answer = before_stop(text, options.stop)
        self._require_logprobs([(answer, logprobs)])
        return Generated(answer, logprobs, None, 1, found.prompt_tokens)

    async def _show(self, pairs: Sequence[Pair], max_new_tokens: int) -> ShownAnswers:
        async def ask(some: list[Pair]) -> list[ShownAnswers]:
            payload = api.show_payload(self.spec.api, some, max_new_tokens)
            return [await self._ask(some, payload, partial(api.read_shown, some))]

        parts = await _all(ask(chunk) for chunk in self._chunks(list(pairs)))
        await self._check_unchanged()
        answers = [answer for part in parts for answer in part.answers]
        self._require_logprobs((answer.text, np.empty(len(answer.tokens))) for answer in answers)
        return ShownAnswers(answers, _prompt_tokens(pairs, parts))

    async def _check_unchanged(self) -> None:
        """Raises ServerError where the server is no longer the one that was probed; a call's scores end there."""
        if self._look is None or not (self._is_doubtful or self._requests_since_look >= REQUESTS_BETWEEN_LOOKS):
            return
        since, self._requests_since_look, self._is_doubtful = self._requests_since_look, 0, False
        if shortcoming := await self._look():
            self._is_doubtful = True  # for the calls that are under way
            raise ServerError(
                f"{self.spec.url} is not the model that was probed at the start: it {shortcoming}; what its last "
                f"{since} requests brought may be another model's, and what of it an earlier call has put into the "
                "cache of scores stays there: move that file away before you go on"
            )

    async def _ask(
        self, pairs: list[Pair], payload: dict[str, Any], read: Callable[[Any], T], is_compared: bool = False
    ) -> T:
        """One request, tried until `read` accepts its answer, which by `is_compared` tells it from others'."""
        payload = {"model": self.spec.model, **payload}
        begun = time.monotonic()
        async with self._slots:
            self._meter.waited(time.monotonic() - begun)
            what = f"rows {pairs[0].row} to {pairs[-1].row} of a call"
            return await self._connection.retrying(what, partial(self._attempt, payload, read, is_compared))

    async def _attempt(self, payload: dict[str, Any], read: Callable[[Any], T], is_compared: bool) -> T:
        """Send once: reserved in the budget before, settled after. What breaks off half-way counts in full."""
        most = spent = api.most_tokens(payload)
        await self._reserve(most)
        self._requests_since_look += 1
        try:
            with self._meter.in_flight():
                body = await self._connection.exchange(
                    "POST", "/completions", payload, api.most_answer_bytes(payload), is_compared
                )
            spent = api.tokens_used(body, payload)
            return read(body)
        except ServerFault as fault:
            spent = 0 if fault.unread else spent
            self._is_doubtful = self._is_doubtful or not isinstance(fault, api.IllFormed)
            raise
        finally:
            self._budget.settle(most, spent)
            self._meter.spent(spent)
            self._settled.set()

    async def _reserve(self, tokens: int) -> None:
        while not self._budget.reserve(tokens):
            self._settled.clear()
            await self._settled.wait()


async def _all(work: Iterable[Coroutine[Any, Any, list[T]]]) -> list[T]:
    """All parts, joined in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return [item for part in await asyncio.gather(*tasks) for item in part]
    finally:
        for task in tasks:
            task.cancel()


def _prompt_tokens(pairs: Sequence[Pair], parts: Sequence[GeneratedTexts | ShownAnswers]) -> int | None:
    """Of all prompts: as the server counted them, else by its tokenizer; None where neither is there."""
    counted = [part.prompt_tokens for part in parts if part.prompt_tokens is not None]
    if len(counted) == len(parts):
        return sum(counted)
    sent = [len(pair.ids[0]) for pair in pairs if pair.ids is not None]
    return sum(sent) if len(sent) == len(pairs) else None


def _check_same_tokens(pairs: list[Pair], scores: list[TokenScores]) -> None:
    """Scores of one continuation after several prefixes can only be compared over the same tokens."""
    first: dict[str, int] = {}
    for pair, score in zip(pairs, scores, strict=True):
        row = first.setdefault(pair.continuation, pair.row)
        if scores[row].tokens != score.tokens:
            raise UnscorableText(
                f"inputs {row} and {pair.row} have the same continuation, but the server cuts it into other tokens "
                f"after another prefix; {api.USE_IDS}"
            )
