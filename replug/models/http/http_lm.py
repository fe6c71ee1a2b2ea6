"""The language model behind an HTTP server: an `AsyncLM` that returns complete answers in order, or raises an error.

A call is cut into requests, each of a few inputs to score or of one prompt to answer. Up to `max_concurrency` of them
are in flight at once, all on one event loop in a separate thread. A request keeps its place while it waits for a retry,
and reserves its largest cost in the budget before it is sent. Scoring sends token ids, so it needs the server's
tokenizer. Now and then, and after a fault, a text of the probe is scored again: a call returns its answers only if the
scores are the same.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from replug.config.choices import ServerAPI, Teacher
from replug.config.errors import RunError, UserError
from replug.config.schema import LMConfig
from replug.models.black_box_lm import (
    AsyncLM,
    Call,
    ContinuationScore,
    Mixture,
    ScoreCall,
    as_mixtures,
    check_pairs,
)
from replug.models.ensemble import mix_and_weigh
from replug.models.generation import Generated, GenerationOptions, all_prompt_tokens, before_stop, stop_texts
from replug.models.http import completions_api as api
from replug.models.http.completions_api import Prompt
from replug.models.http.connection import FILTERED, IllFormed, ServerConnection, ServerError, ServerFault
from replug.models.http.request_budget import RequestBudget
from replug.models.packaged import resolve_lm_path
from replug.models.pair_tokens import (
    PairIds,
    check_lengths,
    pair_token_ids,
    pairs_token_ids,
    prompts_token_ids,
    reading_pair,
    require_exact,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

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
        self._look_at: PairIds | None = None
        self._requests_since_look, self._is_doubtful = 0, False
        self._budget, self._settled = budget, asyncio.Event()
        self._slots = asyncio.Semaphore(lm.max_concurrency)
        self._extra_body, self._refused = dict(lm.extra_body), set[str]()  # fields that the server does not know
        self._connection = ServerConnection(lm)
        self.url = self._connection.url
        self._lock, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http-lm", daemon=True)
        self._thread.start()

    def look_again_at(self, prefix: str, continuation: str) -> None:
        """Use this pair, the first of `fingerprint`, to check from now on that the model is the probed one."""
        self._look_at, self._requests_since_look = pair_token_ids(self._tokenizer, prefix, continuation), 0

    def units(self, call: Call) -> list[list[int]]:
        """Return the rows of each request for scores."""
        return self._chunks(list(range(len(call)))) if isinstance(call, ScoreCall) else super().units(call)

    def submit_call(self, call: Call) -> "Future[list[Any]]":
        """Ask the server. The future's errors are ServerError, BudgetSpent and UnscorableText.

        Raises UnscorableText at once for empty continuations and inputs beyond `max_tokens`. `generate` raises
        UserError for a temperature above 0, and RunError for a server that does not show log-probs. The answer to
        several prompts is the likeliest of the prompts' own. `sample` asks for the server's own draws; servers may
        ignore the seed.
        """
        if isinstance(call, ScoreCall):
            check_pairs(call.prefixes, call.continuations)
            pairs = pairs_token_ids(self._tokenizer, call.prefixes, call.continuations)
            check_lengths(pairs, self.max_tokens)
            return self._run(self._score(pairs, call.read))
        if call.draws:
            return self._run(self._sample(self._prompts(call.prompts, call.options), call.options))
        require_greedy(call.options)
        mixtures = as_mixtures(call.prompts)
        prompts = [self._prompts(mixture.prompts, call.options) for mixture in mixtures]
        return self._run(_all(self._answer(*row, call.options) for row in zip(prompts, mixtures, strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return requests and tokens counted by the budget, and retries of this process."""
        totals = {"requests": float(self._budget.requests), "tokens_sent": float(self._budget.tokens)}
        return totals | {"retries": float(self._connection.num_retries)}

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

    def _prompts(self, texts: Sequence[str], options: GenerationOptions) -> list[Any]:
        """Return what is sent for prompts: token ids, or texts without a tokenizer."""
        if self._tokenizer is None:
            return list(texts)
        prompts = prompts_token_ids(self._tokenizer, texts)
        check_lengths([(ids, [0] * options.max_new_tokens) for ids in prompts], self.max_tokens)
        return prompts

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

    async def score_pairs(self, pairs: list[PairIds]) -> list[np.ndarray]:
        """Return log-probs [T] of each continuation."""
        scores = await _all(self._score_request(chunk) for chunk in self._chunks(pairs))
        await self._check_unchanged()
        return scores

    async def _score(self, pairs: list[PairIds], read: int) -> list[ContinuationScore]:
        cut = [reading_pair(pair, read) if read else (pair, 0) for pair in pairs]
        scores = await self.score_pairs([pair for pair, _ in cut])
        return [ContinuationScore.of_pair(one, pair[1], num) for one, (pair, num) in zip(scores, cut, strict=True)]

    async def _score_request(self, pairs: list[PairIds]) -> list[np.ndarray]:
        return await self._ask(api.score_payload(self.api, pairs), partial(api.read_scores, self.api, pairs))

    async def _sample(self, prompts: list[Prompt], options: GenerationOptions) -> list[list[Generated]]:
        async def ask(prompt: Prompt) -> list[list[Generated]]:
            payload = api.sample_payload(self.api, prompt, options)
            num_drawn = payload.get("n", 1)
            answers = await self._ask(payload, partial(api.read_generated, num_samples=num_drawn))
            drawn = [Generated(before_stop(one.text, options.stop), one.token_logprobs) for one, _ in answers]
            return [drawn * (options.num_samples // num_drawn)]

        samples = await _all(map(ask, prompts))
        await self._check_unchanged()
        self._require_logprobs(answer for drawn in samples for answer in drawn)
        return samples

    async def _answer(self, prompts: list[Prompt], mixture: Mixture, options: GenerationOptions) -> list[Generated]:
        answers = await self._answers(prompts, options)
        if len(prompts) > 1:
            return [await self._likeliest(prompts, answers, mixture, options)]
        return [answer if options.num_tops else replace(answer, tops={}) for answer, _ in answers]

    async def _answers(self, prompts: list[Prompt], options: GenerationOptions) -> list[tuple[Generated, bool]]:
        """Return greedy answers, and whether each ended before its longest.

        Prompt tokens are counted by the server, else by its tokenizer.
        """

        async def ask(prompt: Prompt) -> list[tuple[Generated, bool]]:
            [(answer, is_ended)] = await self._ask(api.generate_payload(self.api, prompt, options), api.read_generated)
            text, count = before_stop(answer.text, options.stop), answer.prompt_tokens
            if count is None and not isinstance(prompt, str):
                count = len(prompt)
            return [(replace(answer, text=text, prompt_tokens=count), is_ended or text != answer.text)]

        answers = await _all(map(ask, prompts))
        await self._check_unchanged()
        self._require_logprobs(answer for answer, _ in answers)
        return answers

    async def _likeliest(
        self,
        prompts: list[Any],
        answers: list[tuple[Generated, bool]],
        mixture: Mixture,
        options: GenerationOptions,
    ) -> Generated:
        """Return the likeliest of the prompts' own answers under their mixture [K], with one log-prob for all of it.

        A server shows answers and no distributions, so it cannot be decoded token by token as local weights are
        (REPLUG, section 3.2). Each different answer is scored after every prompt instead, with a stop if it ended:
        without it a short answer would always be likelier. Weights follow the tokens of an answer.
        """
        prompt_tokens, read = all_prompt_tokens([answer for answer, _ in answers]), None
        if num_read := mixture.num_read(prompts):  # the prompts' last tokens move the weights
            read = np.stack(await self.score_pairs([(ids[:-num_read], ids[-num_read:]) for ids in prompts]))
        stop = (stop_texts(options.stop) or [""])[0]
        candidates: dict[str, tuple[str, str]] = {}
        for answer, is_ended in answers:
            if scored := answer.text + (stop if is_ended else ""):
                candidates.setdefault(answer.text.strip(), (answer.text, scored))
        best = Generated("", np.empty(0, dtype=np.float32), None, mixture.moving(read).weights, prompt_tokens)
        prefixes = [prompt for _ in candidates for prompt in mixture.prompts]
        after = [scored for _, scored in candidates.values() for _ in prompts]
        scores = await self.score_pairs(pairs_token_ids(self._tokenizer, prefixes, after))
        for number, (text, _) in enumerate(candidates.values()):
            given = np.stack(scores[number * len(prompts) : (number + 1) * len(prompts)])
            logprobs, weights = mix_and_weigh(given, mixture.log_prior, mixture.weighting, read)
            whole = np.array([logprobs.sum()], dtype=np.float32)
            if not best.num_tokens or whole[0] > best.token_logprobs[0]:
                best = Generated(text, whole, None, weights[:, -1], prompt_tokens, answer_tokens=given.shape[1])
        return best

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
        [again] = await self._score_request([self._look_at])
        if not len(again) or not agree(self.fingerprint[: len(again)], again):
            self._is_doubtful = True  # for other calls in flight
            raise ServerError(
                f"{self.url} is not the model that was probed at the start: it gives a text other log-probs; answers "
                f"to its last {since} requests may be another model's, and the cache of scores may hold some of them: "
                "move that file away before you resume"
            )

    async def _ask(self, payload: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Send one request until `read` accepts its answer."""
        payload = {"model": self.model, **payload}
        if not self._wants_logprobs:  # many hosted models refuse the key
            payload.pop("logprobs", None)
        if own := self._extra_body.keys() & api.NUMBER_OF_TOKENS:
            payload["max_tokens"] = int(self._extra_body[min(own)])
            payload.pop("stop", None)  # it would end the reasoning
        async with self._slots:
            return await self._connection.retrying(partial(self._attempt, payload, read))

    async def _attempt(self, payload: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Send once: reserved in the budget before, settled after. A request that breaks off counts in full."""
        most = spent = api.most_tokens(self.api, payload)
        while not self._budget.reserve(most):
            self._settled.clear()
            await self._settled.wait()
        self._requests_since_look += 1
        try:
            most_bytes = api.MOST_OTHER_ANSWER_BYTES + api.MOST_ANSWER_BYTES_PER_TOKEN * most
            answer = await self._exchange(payload, most_bytes)
            body = api.well_formed(partial(api.completion, self.api, answer, payload))
            spent = api.tokens_used(self.api, body, payload)
            if any(choice.get("finish_reason") == FILTERED for choice in body["choices"]):
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
