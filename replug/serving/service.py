"""Embed, search, and answer through the ensemble, whatever the shape of the request.

An answer is REPLUG's (section 3.2): documents are retrieved for the query, each stands before the prompt, and the LM's
predictions are mixed by weights that begin as softmax(similarities / temperature) and follow the answer
(`models.ensemble`). Requests that wait together are computed in one call.

In a chat the document stands inside the user's last message, so that the chat template still opens the prompt. If a
prompt is too long, the end of its document is cut, never the user's text, and the answer reports it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from replug.cluster.background import attempt
from replug.config.choices import ServerAPI
from replug.config.errors import RunError
from replug.config.schema import LMConfig
from replug.index_workers.build_plan import index_folder
from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.black_box_lm import AsyncLM, BlackBoxLM, GrowingAnswer, Mixture
from replug.models.build import limited_template
from replug.models.encoder import require_finite_vectors
from replug.models.ensemble import POSTERIOR_WEIGHTS, REPLUG_WEIGHTS, Retrieved, Weighting, document_weights
from replug.models.ensemble_temperature import own_temperature
from replug.models.generation import Generated, GenerationOptions
from replug.models.hardware import available_cores
from replug.models.lm_source import LMSource, LocalSource
from replug.models.pair_tokens import chat_text
from replug.models.prompt import Build, PromptTemplate
from replug.models.replug_lm import answer_all
from replug.serving.openai_api import (
    DOCUMENT,
    QUERY,
    Answer,
    ApiError,
    Message,
    ServingLimits,
    Side,
    document_json,
    refused,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MOST_DOCUMENTS = 16  # of an answer, or --k if that is more: the LM holds their prompts at once
GATHER_SECONDS = 0.005  # clients of one batch send their next requests together
MAX_TEXTS_A_CALL = 256
Listener = Callable[[str], None]  # called with the pieces of an answer, in the LM's thread


Work = tuple[Callable[..., Sequence[Any]], *tuple[Hashable, ...]]  # a function and its first arguments


class ServedIndex:
    """The newest version of an index, with its encoder and the ensemble's temperature. Raises UserError.

    `temperature` replaces the retriever's own.
    """

    def __init__(self, root: Path, temperature: float | None = None) -> None:
        index = LocalIndex(root, available_cores())
        self.retriever, self.version = IndexRetriever(index), index.plan.version
        self.temperature = own_temperature(self.retriever).value if temperature is None else temperature
        self._is_independent = index.is_independent  # queries of one search do not affect each other's results

    def require_side(self, side: Side | None) -> Side:
        """Return the side that a request names. Raises ApiError if it names none and the sides differ."""
        encoder = self.retriever.encoder
        if side is None and (encoder.is_pair or encoder.prompt(QUERY) != encoder.prompt(DOCUMENT)):
            raise refused("input_type", "the retriever's sides differ; expected query or document")
        return side or QUERY

    def embed(self, side: Side, texts: Sequence[str]) -> list[tuple[np.ndarray, int, bool]]:
        """Return each text's vector [D] float32, its number of tokens, and whether it was cut."""
        encoder = self.retriever.encoder
        ids = encoder.token_ids(texts, side)
        vectors = encoder.encode_tokens(ids, task=side).numpy()
        require_finite_vectors(vectors, [f"input {number}" for number in range(len(ids))])
        return list(zip(vectors, map(len, ids), self._are_cut(texts, side), strict=True))

    def search(self, k: int, queries: Sequence[str]) -> list[tuple[list[Retrieved], bool]]:
        """Return each query's documents, and whether it was cut.

        Queries are searched one by one if a lossy index's results depend on the other queries of a pass.
        """
        passes = [queries] if self._is_independent else [[query] for query in queries]
        results = [documents for each in passes for documents in self.retriever.retrieve(each, k)]
        return list(zip(results, self._are_cut(queries, QUERY), strict=True))

    def _are_cut(self, texts: Sequence[str], side: Side) -> list[bool]:
        """Return whether the encoder reads only the beginning of each text."""
        return [self.retriever.encoder.sides[side].is_cut(text) for text in texts]


class BatchQueue:
    """Compute waiting requests in one call, in a separate thread, first come first served.

    A call takes the first item and others of equal work, at most `max_size` in all. A cancelled request leaves the
    queue. If a call fails, its items are computed one by one, so that an item fails only by its own fault.
    """

    def __init__(self, name: str, max_size: int) -> None:
        self._max_size = max_size
        self._waiting: dict[asyncio.Future[Any], tuple[Work, Any]] = {}  # in the order of arrival
        self._computing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, name)  # a tokenizer refuses two threads at once

    async def submit(self, work: Work, item: Any) -> Any:
        """Return the item's entry of `function(*arguments, items)`, or raise its error."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = work, item
        if self._computing is None or self._computing.done():
            self._computing = asyncio.create_task(self._compute())
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    async def _compute(self) -> None:
        """Compute submitted items until none waits."""
        while self._waiting:
            await asyncio.sleep(GATHER_SECONDS)
            if not self._waiting:  # all clients disconnected
                return
            work, _ = next(iter(self._waiting.values()))
            equal = (future for future, (other, _) in self._waiting.items() if other == work)
            taken = {future: self._waiting[future][1] for future in islice(equal, self._max_size)}
            self._waiting = {future: call for future, call in self._waiting.items() if future not in taken}
            items = list(taken.values())
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, _outcomes, work, items)
            for future, outcome in zip(taken, outcomes, strict=True):
                if future.done():  # its client disconnected
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)


def _outcomes(work: Work, items: Sequence[Any]) -> list[Any]:
    function, *arguments = work
    try:
        results = attempt(function, *arguments, items)
    except BaseException as error:  # noqa: BLE001 - a panic in a tokenizer's Rust code is not an Exception
        results = RuntimeError(f"{type(error).__name__}: {error}")
    if isinstance(results, Exception):
        return [results] if len(items) == 1 else [_outcomes(work, [item])[0] for item in items]
    return list(results)


def build_chat(
    template: PromptTemplate, tokenizer: "PreTrainedTokenizerBase | None", messages: Sequence[Message]
) -> Build:
    """Return a function that builds a chat's prompt. Raises ApiError if the chat template refuses the messages.

    Chats need a tokenizer.
    """
    if tokenizer is None or not tokenizer.chat_template:
        message = (
            "the LM has no chat template; expected /v1/completions, or for an LM behind a server lm.tokenizer and "
            "lm.api=echo"
        )
        raise ApiError(400, message, code="no_chat_template")
    if messages[-1].role != "user":
        raise refused("messages", f"the last is the {messages[-1].role}'s; expected the user's")
    rows = [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in messages]

    def build(document: str | None) -> str:
        last = template.fill(document, rows[-1]["content"])
        try:
            return chat_text(tokenizer, [*rows[:-1], {"role": "user", "content": last}])
        except TemplateError as error:
            raise refused("messages", f"the LM's chat template refuses them: {error}") from error

    return build


@dataclass(eq=False)
class Question:
    """A prompt to answer from the `k` documents retrieved for `query`, and the state of its answer.

    `listen` is called with the pieces of the answer as they come. Setting `disconnected` ends the answer at the LM's
    next token.
    """

    build: Build
    query: str
    k: int
    options: GenerationOptions
    listen: Listener | None = None
    documents: Sequence[Retrieved] = ()
    query_is_cut: bool = False
    ensemble: Mixture | None = None
    are_cut: Sequence[bool] = ()
    disconnected: threading.Event = field(default_factory=threading.Event)
    error: RunError | None = None

    def __post_init__(self) -> None:
        self._growing = GrowingAnswer(self.options.stop)

    def fit(self, template: PromptTemplate, weighting: Weighting, temperature: float) -> Mixture:
        """Build the prompts of the ensemble, each with its document, cut to fit."""
        if not self.documents:
            self.ensemble = Mixture([self.build(None)], [1.0], REPLUG_WEIGHTS)
            return self.ensemble
        texts = [document.text for document in self.documents]
        prompts = [template.fit(text, self.build, self.options.max_new_tokens) for text in texts]
        self.are_cut = [prompt != self.build(text) for prompt, text in zip(prompts, texts, strict=True)]
        priors = document_weights([document.similarity for document in self.documents], temperature)
        self.ensemble = Mixture(prompts, priors.tolist(), weighting)
        return self.ensemble

    def on_token(self, text: str, is_whole: bool = False) -> bool:
        """Send the client the new part of the text; return whether the answer is still wanted."""
        if self.listen is not None and self.error is None and not self.disconnected.is_set():
            try:
                if piece := (self._growing.end if is_whole else self._growing.grow)(text):
                    self.listen(piece)
            except RunError as error:  # the tokenizer changed earlier text; other answers continue
                self.error = error
        return self.error is None and not self.disconnected.is_set()

    def answered(self, generated: Generated, index: ServedIndex) -> Answer:
        assert self.ensemble is not None, "fitted before the call"
        weights, priors = generated.weights.tolist(), self.ensemble.weights
        rows = zip(self.documents, weights, priors, self.are_cut, strict=bool(self.documents))
        evidence = {
            "index_version": index.version,
            "temperature": index.temperature,
            "query_is_cut": self.query_is_cut,
            "documents": [
                document_json(document) | {"weight": weight, "prior": prior, "is_cut": is_cut}
                for document, weight, prior, is_cut in rows
            ],
        }
        is_full = generated.num_tokens >= self.options.max_new_tokens
        return Answer(generated, "length" if is_full else "stop", evidence)


class Service:
    """The models behind the routes. `k` is the default number of documents of an answer.

    `template` counts and cuts prompts where it has a tokenizer; `chats` is the tokenizer with the chat template.
    """

    def __init__(
        self,
        lm: BlackBoxLM,
        template: PromptTemplate,
        k: int,
        index: ServedIndex,
        limits: ServingLimits,
        weighting: Weighting = POSTERIOR_WEIGHTS,
        chats: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        self.lm, self.template, self.k, self.index, self.limits = lm, template, k, index, limits
        self.weighting, self.chats = weighting, chats
        self._retriever_queue = BatchQueue("retriever", MAX_TEXTS_A_CALL)
        self._lm_queue = BatchQueue("lm", limits.max_batch)

    async def embed(self, side: Side, texts: Sequence[str]) -> list[tuple[np.ndarray, int, bool]]:
        """Return each text's vector [D] float32, its number of tokens, and whether it was cut."""
        return await asyncio.gather(*(self._retriever_queue.submit((self.index.embed, side), text) for text in texts))

    async def search(self, k: int, queries: Sequence[str]) -> list[tuple[list[Retrieved], bool]]:
        """Return each query's documents, and whether it was cut."""
        return await asyncio.gather(*(self._retriever_queue.submit((self.index.search, k), query) for query in queries))

    async def retrieve(self, question: Question) -> None:
        """Retrieve the documents of a question. Raises ApiError if its prompt does not fit the LM without documents."""
        num_new = question.options.max_new_tokens
        if not await asyncio.to_thread(lambda: self.template.holds(question.build(None), num_new)):
            message = f"the prompt and max_tokens={num_new} exceed {self.template.max_tokens} tokens; expected less"
            raise ApiError(400, message, code="context_length_exceeded")
        if question.k:
            [(question.documents, question.query_is_cut)] = await self.search(question.k, [question.query])

    async def answer(self, question: Question) -> Answer:
        """Answer from the question's documents. Cancelling ends the answer in the LM. Raises RunError.

        Answers of a server are awaited separately: a hanging call does not delay the others.
        """
        try:
            if isinstance(self.lm, AsyncLM):
                call = await self._lm_queue.submit((self._ask_server, question.options), question)
                answers = await asyncio.wrap_future(call)
                assert question.ensemble is not None, "fitted before the call"
                generated = question.ensemble.answer(answers)
                question.on_token(generated.text, is_whole=True)
            else:
                generated = await self._lm_queue.submit((self._generate, question.options), question)
        finally:
            question.disconnected.set()
        if question.error is not None:
            raise question.error
        return question.answered(generated, self.index)

    def _ask_server(self, options: GenerationOptions, questions: Sequence[Question]) -> list[Future[list[Generated]]]:
        assert isinstance(self.lm, AsyncLM)
        return [ensemble.submit(self.lm, options) for ensemble in self._fitted(questions)]

    def _generate(self, options: GenerationOptions, questions: Sequence[Question]) -> list[Generated]:
        answers = answer_all(
            self._fitted(questions), self.lm, options, lambda number, text: questions[number].on_token(text)
        )
        for question, answer in zip(questions, answers, strict=True):
            question.on_token(answer.text, is_whole=True)
        return answers

    def _fitted(self, questions: Sequence[Question]) -> list[Mixture]:
        return [question.fit(self.template, self.weighting, self.index.temperature) for question in questions]


def load_service(
    directory: Path,
    source: LMSource,
    config: LMConfig,
    k: int,
    limits: ServingLimits,
    temperature: float | None = None,
    weighting: Weighting = POSTERIOR_WEIGHTS,
) -> Service:
    """Load the newest index of a run or an index directory, and the LM of `source`.

    A temperature of None means the retriever's own.
    """
    index = ServedIndex(index_folder(directory), temperature)
    # Local weights are used directly, without a wrapper: they mix and stream by themselves.
    lm = source.load() if isinstance(source, LocalSource) else source.open_here()
    most = min(limits.max_prompt_tokens, lm.max_tokens or limits.max_prompt_tokens)
    log.info(f"loaded {config.path or config.model} ({lm.identity}), index version {index.version}")
    # A chat server applies its own chat template, and would read ours as text.
    tokenizer = None if config.url and config.api is ServerAPI.chat else source.tokenizer()
    return Service(lm, limited_template(config, source, most), k, index, limits, weighting, tokenizer)
