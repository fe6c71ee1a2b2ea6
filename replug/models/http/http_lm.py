"""The language model behind an HTTP server: an `AsyncLM` that returns complete answers in order, or raises an error.

A call is cut into requests, each of a few inputs to score or of one prompt to answer. Up to `max_concurrency` of them
are in flight at once, all on one event loop in a separate thread. A request keeps its place while it waits for a retry,
and reserves its largest cost in the budget before it is sent. With a tokenizer the server gets token ids; without one
it gets text, and the border between prefix and continuation is found in the server's tokens. Now and then, and after a
fault, a text of the probe is scored again: a call returns its answers only if the scores are the same.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from replug.config.choices import ServerAPI, Teacher
from replug.config.errors import RunError, UserError
from replug.config.rules import READS_TOKENS
from replug.config.schema import LMConfig
from replug.models.black_box_lm import (
    AsyncLM,
    Call,
    ContinuationScore,
    Meter,
    Mixture,
    ScoreCall,
    UnscorableText,
    as_mixtures,
    check_pairs,
)
from replug.models.ensemble import mix_and_weigh
from replug.models.generation import Generated, GenerationOptions, Stop, all_prompt_tokens, before_stop, stop_texts
from replug.models.http import completions_api as api
from replug.models.http.completions_api import Pair, Scored
from replug.models.http.connection import FILTERED, IllFormed, ServerConnection, ServerError, ServerFault
from replug.models.http.request_budget import RequestBudget
from replug.models.packaged import resolve_lm_path
from replug.models.pair_tokens import check_lengths, pair_token_ids, reading_pair, require_exact

log = logging.getLogger(__name__)

T = TypeVar("T")

FILTERED_SHOWN = 5  # prompts that are logged as filtered
INPUTS_PER_REQUEST = 4  # to score: the client's work for a request exceeds that for an input
REQUESTS_BETWEEN_LOOKS = 256  # at the probed model: so short a request costs next to nothing

# Two log-probs from a server count as the same within these bounds. Bfloat16 logits between 16 and 32 lie 0.125 apart,
# so single tokens of an honest server move by that and more with other texts in the batch. Their mean over a text moves
# little. A wrong position costs nats.
MEAN_TOLERANCE_NATS = 0.15
TOLERANCE_NATS = 1.0


class HttpLM(AsyncLM):
    """An `AsyncLM` at `lm.url`. `budget` is this LM's alone.

    `models.http.server_source.connect` probes it. Until then `identity` is the model's name, and `max_tokens` is None.
    """

    max_tokens: int | None = None

    def __init__(self, lm: LMConfig, budget: RequestBudget) -> None:
        self.model, self.api, self._is_chat = str(lm.model), lm.api.value, lm.api is ServerAPI.chat
        self._wants_logprobs = lm.score in (Teacher.logprob, Teacher.yes)
        self.identity = self.model
        self.inputs_per_request = 1 if self._is_chat else INPUTS_PER_REQUEST
        self.fingerprint = np.empty(0, dtype=np.float32)
        self._tokenizer: Any = None
        if (tokenizer := server_tokenizer(lm)) and not self._is_chat:  # a chat is sent as text
            self._tokenizer = tokenizer
        self._look_at: Pair | None = None
        self._requests_since_look, self._is_doubtful = 0, False
        self._budget, self._settled = budget, asyncio.Event()
        self._slots = asyncio.Semaphore(lm.max_concurrency)
        self._meter, self._max_concurrency, self._num_filtered = Meter(), lm.max_concurrency, 0
        self._extra_body, self._refused = dict(lm.extra_body), set[str]()  # fields that the server does not know
        self._connection = ServerConnection(lm)
        self.url = self._connection.url
        self._lock, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-lm", daemon=True)
        self._thread.start()

    def look_again_at(self, prefix: str, continuation: str) -> None:
        """Use this pair, the first of `fingerprint`, to check from now on that the model is the probed one."""
        self._look_at, self._requests_since_look = self.pair(0, prefix, continuation), 0

    def units(self, call: Call) -> list[list[int]]:
        """Return the rows of each request for scores."""
        return self._chunks(list(range(len(call)))) if isinstance(call, ScoreCall) else super().units(call)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        """Ask the server. The future's errors are ServerError, BudgetSpent and UnscorableText.

        Raises UnscorableText at once for empty continuations and inputs beyond `max_tokens`. `generate` raises
        UserError for a temperature above 0, and RunError for a server that does not show log-probs. The answer to
        several prompts is the likeliest of the prompts' own (`likeliest_answer`). `sample` asks for the
        server's own draws; servers may ignore the seed.
        """
        if isinstance(call, ScoreCall):
            check_pairs(call.prefixes, call.continuations)
            texts = zip(call.prefixes, call.continuations, strict=True)
            pairs = [self.pair(row, *both) for row, both in enumerate(texts)]
            check_lengths([pair.ids for pair in pairs if pair.ids], self.max_tokens)
            return self._run(self._score_and_read(pairs, call.read) if call.read else self.score_pairs(pairs))
        if call.draws:
            return self._run(self._sample(self._prompts(call.prompts, call.options), call.options))
        require_greedy(call.options)
        mixtures = as_mixtures(call.prompts)
        if self._tokenizer is None and any(mixture.weighting.read and len(mixture.prompts) > 1 for mixture in mixtures):
            raise UserError(READS_TOKENS)
        prompts = [self._prompts(mixture.prompts, call.options) for mixture in mixtures]
        return self._run(
            _all(self._answer(*arguments, call.options) for arguments in zip(prompts, mixtures, strict=True))
        )

    def metrics(self) -> dict[str, float]:
        """Return requests and tokens counted by the budget, retries of this process, and rates since the last call."""
        totals = {"requests": float(self._budget.requests), "tokens_sent": float(self._budget.tokens)}
        rates, sums = self._meter.read(self._max_concurrency)
        waited = sums["waited_seconds"] / max(1, sums["waits"])
        return totals | rates | {"retries": float(self._connection.num_retries), "queue_wait_seconds": waited}

    def close(self) -> None:
        """Cancel calls in flight, which then raise RunError, and end the thread."""
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
        size = self.inputs_per_request
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def pair(self, row: int, prefix: str, continuation: str) -> Pair:
        ids = pair_token_ids(self._tokenizer, prefix, continuation) if self._tokenizer else None
        return Pair(row, prefix, continuation, ids)

    def _prompts(self, prompts: Sequence[str], options: GenerationOptions) -> list[Pair]:
        pairs = [self.pair(row, prompt, "") for row, prompt in enumerate(prompts)]
        check_lengths([(pair.ids[0], [0] * options.max_new_tokens) for pair in pairs if pair.ids], self.max_tokens)
        return pairs

    def _run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(self._unless_closed(work), self._loop)
        work.close()
        raise RunError(f"the connection to {self.url} is closed")

    async def _unless_closed(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if not self._closed:  # the caller cancelled it
                raise
            raise RunError(f"the connection to {self.url} was closed before its work was done") from None

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._connection.close()

    def listed_models(self) -> dict[str, int | None]:
        """Return the models that `GET /models` lists, with their context lengths; none if it gives no such list."""

        async def listed() -> dict[str, int | None]:
            try:
                return api.context_lengths(await self._connection.exchange("GET", "/models"))
            except (ServerFault, ServerError):
                return {}

        return self._run(listed()).result()

    def words(self, text: str) -> str:
        """Return a server's message without the key."""
        return self._connection.words(text)

    async def score_pairs(self, pairs: list[Pair]) -> list[ContinuationScore]:
        scores = await _all(self._score_request(chunk) for chunk in self._chunks(pairs))
        _check_same_tokens(pairs, scores)
        await self._check_unchanged()
        return [ContinuationScore(logprobs) for logprobs, _ in scores]

    async def _score_and_read(self, pairs: list[Pair], read: int) -> list[ContinuationScore]:
        if self._tokenizer is None:
            raise UserError(READS_TOKENS)
        cut = [(pair, *reading_pair(pair.ids, read)) for pair in pairs if pair.ids]
        scores = await self.score_pairs([replace(pair, ids=ids) for pair, ids, _ in cut])
        return [
            ContinuationScore.of_pair(score.token_logprobs, ids[1], num_read)
            for score, (_, ids, num_read) in zip(scores, cut, strict=True)
        ]

    async def _score_request(self, pairs: list[Pair]) -> list[Scored]:
        return await self._ask(pairs, api.score_payload(self.api, pairs), partial(api.read_scores, self.api, pairs))

    async def _sample(self, pairs: list[Pair], options: GenerationOptions) -> list[list[Generated]]:
        async def ask(pair: Pair) -> list[list[Generated]]:
            payload = api.sample_payload(self.api, pair, options)
            num_drawn = payload.get("n", 1)
            answers = await self._ask([pair], payload, partial(api.read_generated, num_samples=num_drawn))
            drawn = [Generated(before_stop(one.text, options.stop), one.token_logprobs) for one, _ in answers]
            return [drawn * (options.num_samples // num_drawn)]

        samples = await _all(map(ask, pairs))
        await self._check_unchanged()
        self._require_logprobs(answer for drawn in samples for answer in drawn)
        return samples

    async def _answer(self, pairs: list[Pair], mixture: Mixture, options: GenerationOptions) -> list[Generated]:
        if len(pairs) > 1:
            return [await likeliest_answer(self, pairs, mixture, options)]
        answers = await self.answers(pairs, options.max_new_tokens, options.stop, options.num_tops)
        return answers if options.num_tops else [replace(answer, tops={}) for answer in answers]

    async def answers(
        self, pairs: list[Pair], max_new_tokens: int, stop: Stop, num_tops: int = 1, ending: str = ""
    ) -> list[Generated]:
        """Return greedy answers; `ending` is appended to an answer that the server ended itself.

        Prompt tokens are counted by the server, else by its tokenizer.
        """

        async def ask(pair: Pair) -> list[tuple[Generated, bool]]:
            payload = api.generate_payload(self.api, pair, max_new_tokens, stop, num_tops)
            [(answer, is_ended)] = await self._ask([pair], payload, api.read_generated)
            count = len(pair.ids[0]) if answer.prompt_tokens is None and pair.ids else answer.prompt_tokens
            return [(replace(answer, text=before_stop(answer.text, stop), prompt_tokens=count), is_ended)]

        answers = await _all(map(ask, pairs))
        await self._check_unchanged()
        self._require_logprobs(answer for answer, _ in answers)
        return [replace(answer, text=answer.text + ending) if is_ended else answer for answer, is_ended in answers]

    def _require_logprobs(self, answers: Iterable[Generated]) -> None:
        """Raise RunError for an answer with text and no log-probs."""
        if self._wants_logprobs and any(answer.text and not len(answer.token_logprobs) for answer in answers):
            raise RunError(
                f"{self.url} gives no log-probs of generated tokens, so its answers cannot be weighed; expected "
                "completions with logprobs"
            )

    async def _check_unchanged(self) -> None:
        """Raise ServerError if the server is no longer the probed one."""
        if self._look_at is None or not (self._is_doubtful or self._requests_since_look >= REQUESTS_BETWEEN_LOOKS):
            return
        since, self._requests_since_look, self._is_doubtful = self._requests_since_look, 0, False
        [(again, _)] = await self._score_request([self._look_at])
        if not len(again) or not agree(self.fingerprint[: len(again)], again):
            self._is_doubtful = True  # for other calls in flight
            raise ServerError(
                f"{self.url} is not the model that was probed at the start: it gives a text other log-probs; answers "
                f"to its last {since} requests may be another model's, and the cache of scores may hold some of them: "
                "move that file away before you resume"
            )

    async def _ask(self, pairs: list[Pair], payload: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Send one request until `read` accepts its answer."""
        payload = {"model": self.model, **payload}
        if not self._wants_logprobs:  # many hosted models refuse the key
            payload.pop("logprobs", None)
        if own := self._extra_body.keys() & api.NUMBER_OF_TOKENS:
            payload["max_tokens"] = int(self._extra_body[min(own)])
            payload.pop("stop", None)  # it would end the reasoning
        begun = time.monotonic()
        async with self._slots:
            self._meter.add(waits=1, waited_seconds=time.monotonic() - begun)
            what = f"rows {pairs[0].row} to {pairs[-1].row} of a call"
            return await self._connection.retrying(what, partial(self._attempt, payload, read))

    async def _attempt(self, payload: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Send once: reserved in the budget before, settled after. A request that breaks off counts in full."""
        most = spent = api.most_tokens(self.api, payload)
        while not self._budget.reserve(most):
            self._settled.clear()
            await self._settled.wait()
        self._requests_since_look += 1
        begun = time.monotonic()
        try:
            most_bytes = api.MOST_OTHER_ANSWER_BYTES + api.MOST_ANSWER_BYTES_PER_TOKEN * most
            answer = await self._exchange(payload, most_bytes)
            body = api.well_formed(lambda: api.completion(self.api, answer, payload))
            spent = api.tokens_used(self.api, body, payload)
            if any(choice.get("finish_reason") == FILTERED for choice in body["choices"]):
                self._num_filtered += 1
                if self._num_filtered <= FILTERED_SHOWN:
                    log.warning(
                        f"{self.url}: the server's filter gives no answer to the prompt that begins with "
                        f"{payload['prompt'][0][:60]!r}; it counts as an empty one, the worst"
                    )
            return read(body)
        except ServerFault as fault:
            spent = 0 if fault.unread else spent
            self._is_doubtful = self._is_doubtful or not isinstance(fault, IllFormed)
            raise
        finally:
            self._budget.settle(most, spent)
            self._meter.add(tokens=spent, busy_seconds=time.monotonic() - begun)
            self._settled.set()

    async def _exchange(self, payload: dict[str, Any], most_bytes: int) -> Any:
        """Return the server's answer to a payload, sent without the fields that it refuses."""
        path, whole = api.request(self.api, payload)
        whole |= self._extra_body
        while True:
            sent = api.accepted_fields(whole, self._refused)
            try:
                return await self._connection.exchange("POST", path, sent, most_bytes)
            except ServerError as error:
                if error.is_filtered and self._is_chat:
                    return api.refused_by_filter(payload)
                name = error.unsupported
                if name not in sent or name not in api.OPTIONAL:
                    raise
                if name in api.DRAWING:
                    log.warning(
                        f"{self.url}: the server does not take {name}={sent[name]}, so it draws answers by its own "
                        "settings: a repeated request gets other answers and scores"
                    )
                self._refused.add(name)


def agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether log-probs (nats) [T] can be one model's, with other texts in the same request."""
    if one.shape != other.shape:
        return False
    difference = np.abs(one - other)
    return bool(difference.mean() <= MEAN_TOLERANCE_NATS and difference.max() <= TOLERANCE_NATS)


async def _all(work: Iterable[Coroutine[Any, Any, list[T]]]) -> list[T]:
    """Return all parts, joined in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return [item for part in await asyncio.gather(*tasks) for item in part]
    finally:
        for task in tasks:
            task.cancel()


def server_tokenizer(lm: LMConfig) -> Any:
    """Load the server's tokenizer; None if `lm.tokenizer` is not set."""
    from replug.models.model_files import load_tokenizer  # seconds to import, which a server without a tokenizer saves

    if not lm.tokenizer:
        return None
    tokenizer = load_tokenizer(resolve_lm_path(lm.tokenizer, "lm.tokenizer"), "lm.tokenizer")
    require_exact(tokenizer, lm.tokenizer, "lm.tokenizer")
    return tokenizer


def require_greedy(options: GenerationOptions) -> None:
    """Raise UserError for a temperature above 0."""
    if options.temperature:
        raise UserError(
            f"temperature is {options.temperature:g}; a server's answers can be weighed at temperature 0 only, "
            "since their mixture is unknown: set temperature to 0, or take local weights"
        )


def _check_same_tokens(pairs: list[Pair], scores: list[Scored]) -> None:
    """Raise UnscorableText unless a continuation has the same tokens after all prefixes: scores are compared."""
    first: dict[str, int] = {}
    for pair, (_, tokens) in zip(pairs, scores, strict=True):
        row = first.setdefault(pair.continuation, pair.row)
        if scores[row][1] != tokens:
            raise UnscorableText(
                f"inputs {row} and {pair.row} have the same continuation, but the server cuts it into other tokens "
                f"after another prefix; {api.USE_IDS}"
            )


async def likeliest_answer(lm: HttpLM, prompts: list[Pair], mixture: Mixture, options: GenerationOptions) -> Generated:
    """Return the likeliest of the prompts' own answers under their mixture [K], with one log-prob for all of it.

    A server shows answers and no distributions, so it cannot be decoded token by token as local weights are (REPLUG,
    section 3.2). Every prompt's own greedy answer is scored after every prompt instead: one request for each prompt,
    and one scored input for each prompt and each different answer. Weights follow the tokens of an answer.
    """
    read, ids = None, [prompt.ids[0] for prompt in prompts if prompt.ids is not None]
    if mixture.weighting.read and (num_read := mixture.num_read(ids)):  # the prompts' last tokens move the weights
        pairs = [Pair(number, "", "", (row[:-num_read], row[-num_read:])) for number, row in enumerate(ids)]
        read = np.stack([score.token_logprobs for score in await lm.score_pairs(pairs)])
    ending = (stop_texts(options.stop) or [""])[0]
    shown = await lm.answers(prompts, options.max_new_tokens, None, ending=ending)
    prompt_tokens = all_prompt_tokens(shown)
    candidates, count = _candidates(shown, options), len(prompts)
    if not candidates:  # nothing was generated after any prompt
        return Generated("", np.empty(0, dtype=np.float32), None, mixture.moving(read).weights, prompt_tokens)
    rows = [(prompt.prefix, scored) for _, scored in candidates for prompt in prompts]
    scores = await lm.score_pairs([lm.pair(row, *texts) for row, texts in enumerate(rows)])
    given = [
        np.stack([score.token_logprobs for score in scores[start : start + count]])
        for start in range(0, len(scores), count)
    ]
    mixed = [mix_and_weigh(one, mixture.log_prior, mixture.weighting, read) for one in given]
    sums = [logprobs.sum() for logprobs, _ in mixed]
    best = int(np.argmax(sums))
    whole, weights = np.array([sums[best]], dtype=np.float32), mixed[best][1]
    num_tokens = given[best].shape[1]
    return Generated(candidates[best][0], whole, None, weights[:, -1], prompt_tokens, answer_tokens=num_tokens)


def _candidates(shown: Sequence[Generated], options: GenerationOptions) -> list[tuple[str, str]]:
    """Return the distinct answers, ignoring white space round them, each with the text to score.

    An answer is scored with the stop that ended it: without the stop a short answer would always be likelier.
    """
    by_text: dict[str, tuple[str, str]] = {}
    stops = stop_texts(options.stop)
    for answer in shown:
        text = before_stop(answer.text, options.stop)
        rest = answer.text[len(text) :]
        ending = min((one for one in stops if rest.startswith(one)), key=len, default="")  # complete first
        if scored := text + ending:
            by_text.setdefault(text.strip(), (text, scored))
    return list(by_text.values())
