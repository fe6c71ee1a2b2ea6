"""What the server does with a request, whatever its shape: embed, search, and answer through the ensemble.

An answer is REPLUG's (section 3.2): documents are found for the query, each stands before the prompt, and the LM's
predictions are mixed by softmax(similarities / temperature). Requests of one kind are computed together (`batching`).

A chat's document stands before the user's last message, within it: the LM's template begins with what its chats begin
with. What does not fit is cut from the document's end, never from what was asked, and the answer says so.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

from replug.config.errors import RunError
from replug.models.black_box_lm import BlackBoxLM, GrowingAnswer, Mixture
from replug.models.ensemble import Retrieved, document_weights
from replug.models.generation import Generated, GenerationOptions
from replug.models.prompt import PromptTemplate, join_document
from replug.serving.batching import BatchQueue, Metrics
from replug.serving.index_holder import IndexHolder, ServedIndex
from replug.serving.requests import QUERY, ApiError, Message, ServingLimits, Side, refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Build = Callable[[str | None], str]  # the prompt with a document, or without
Listener = Callable[[str], None]  # of the pieces of an answer, in the LM's thread
Embedded = tuple[np.ndarray, list[int]]
Searched = tuple[list[list[Retrieved]], list[bool]]


class Prompting:
    """How an LM is asked. Without its tokenizer nothing is counted, cut, or chatted."""

    def __init__(self, separator: str, tokenizer: "PreTrainedTokenizerBase | None", max_tokens: int | None) -> None:
        self._separator, self._tokenizer, self._max_tokens = separator, tokenizer, max_tokens
        self.template = PromptTemplate(separator, tokenizer, None if tokenizer is None else max_tokens)
        self._start = ""
        if (
            tokenizer is not None
            and tokenizer.bos_token
            and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]
        ):
            # A chat template writes the token that begins a text, which such a tokenizer would add once more.
            self._start = str(tokenizer.bos_token)

    def of_text(self, prompt: str) -> Build:
        return lambda document: prompt if document is None else join_document(document, self._separator, prompt)

    def of_chat(self, messages: Sequence[Message]) -> Build:
        """Raise ApiError for an LM that has no template, and for messages that the template does not take."""
        tokenizer = self._tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ApiError(
                400,
                "the LM has no chat template (an LM behind a server: give lm.tokenizer); expected /v1/completions",
                code="no_chat_template",
            )
        if messages[-1].role != "user":
            raise refused("messages", f"the last is the {messages[-1].role}'s; expected the user's")
        rows = [{"role": "system" if one.role == "developer" else one.role, "content": one.text} for one in messages]

        def build(document: str | None) -> str:
            asked = self.of_text(rows[-1]["content"])(document)
            chat = [*rows[:-1], {"role": "user", "content": asked}]
            try:
                text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
            except TemplateError as error:
                raise refused("messages", f"the LM's chat template does not take them: {error}") from error
            return text.removeprefix(self._start)

        return build

    def require_fits(self, build: Build, num_new: int) -> None:
        """Raise ApiError where prompt and answer are too long without any document."""
        if not self.template.holds(build(None), num_new):
            raise ApiError(
                400,
                f"the prompt and max_tokens={num_new} are more than {self._max_tokens} tokens; expected less",
                code="context_length_exceeded",
            )


@dataclass(frozen=True, slots=True)
class RetrieverInput:
    """Texts of a request, named by its parameter; those that the retriever does not read whole are cut or refused."""

    texts: list[str]
    param: str
    may_cut: bool


@dataclass(eq=False)
class Question:
    """A prompt to answer from `k` documents, which `query` finds in `index`, and what is known of its answer so far.

    `query_is_cut`: the retriever reads the beginning of the query only. `are_cut`: of which documents the LM does not
    read the end. The client listens to the pieces, and may go.
    """

    build: Build
    query: str
    k: int
    options: GenerationOptions
    index: ServedIndex
    documents: Sequence[Retrieved] = ()
    query_is_cut: bool = False
    weights: Sequence[float] = ()
    are_cut: Sequence[bool] = ()
    generated: Generated | None = None
    listen: Listener | None = None
    gone: threading.Event = field(default_factory=threading.Event)
    error: RunError | None = None

    def __post_init__(self) -> None:
        self._growing = GrowingAnswer(self.options.stop)

    @property
    def answer(self) -> Generated:
        assert self.generated is not None
        return self.generated

    def mixture(self, template: PromptTemplate) -> Mixture:
        """Return the prompts of the ensemble, each with as much of its document as fits."""
        if not self.documents:
            return Mixture([self.build(None)], [1.0])
        texts = [one.text for one in self.documents]
        prompts = [template.fit(text, self.build, self.options.max_new_tokens) for text in texts]
        self.are_cut = [prompt != self.build(text) for prompt, text in zip(prompts, texts, strict=True)]
        self.weights = document_weights([one.similarity for one in self.documents], self.index.temperature).tolist()
        return Mixture(prompts, self.weights)

    def hear(self, whole: str) -> bool:
        """Tell the client what is new; return whether the answer is still wanted."""
        self._tell(self._growing.grow, whole)
        return self.error is None and not self.gone.is_set()

    def end(self, generated: Generated) -> None:
        """Tell the client the rest."""
        self.generated = generated
        self._tell(self._growing.end, generated.text)

    def _tell(self, grow: Callable[[str], str], whole: str) -> None:
        if self.listen is None or self.error is not None or self.gone.is_set():
            return
        try:
            if piece := grow(whole):
                self.listen(piece)
        except RunError as error:  # the tokenizer wrote it anew; others of the call go on
            self.error = error


class Service:
    """Made on the event loop that it is used on. Answers are from `k` documents where nobody says otherwise."""

    def __init__(
        self,
        lm: BlackBoxLM,
        prompting: Prompting,
        k: int,
        index: IndexHolder,
        limits: ServingLimits,
        metrics: Metrics,
    ) -> None:
        self.lm, self.prompting, self.k, self.index, self.limits = lm, prompting, k, index, limits
        self._metrics = metrics
        # A tokenizer refuses to be used by two threads at once, so a thread has each model to itself.
        self._retrieving, self._generating = ThreadPoolExecutor(1, "retriever"), ThreadPoolExecutor(1, "lm")
        of_texts = limits.max_texts, self._retrieving, metrics, lambda asked: len(asked.texts)
        self._embedding: BatchQueue[tuple[ServedIndex, Side], RetrieverInput, Embedded] = BatchQueue(
            "embed", _embed_all, *of_texts
        )
        self._searching: BatchQueue[tuple[ServedIndex, int], RetrieverInput, Searched] = BatchQueue(
            "search", _search_all, *of_texts
        )
        self._answering: BatchQueue[GenerationOptions, Question, None] = BatchQueue(
            "answer", self._answer_all, limits.max_batch, self._generating, metrics
        )
        self._watcher = asyncio.create_task(index.keep_newest())

    async def close(self) -> None:
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        for queue in (self._embedding, self._searching, self._answering):
            await queue.close()
        for thread in (self._retrieving, self._generating):
            await asyncio.to_thread(thread.shutdown)

    async def embed(self, index: ServedIndex, side: Side, texts: RetrieverInput) -> Embedded:
        """Return vectors [N, D] float32, and the tokens of each text."""
        vectors, counts = await self._embedding.submit((index, side), texts)
        self._metrics.tokens.labels("embedded").inc(sum(counts))
        return vectors, counts

    async def search(self, index: ServedIndex, k: int, queries: RetrieverInput) -> Searched:
        """Return the documents of each query, and whether it was cut."""
        return await self._searching.submit((index, k), queries)

    async def find(self, question: Question) -> None:
        """Find the documents of a question. Raises ApiError where its prompt does not fit the LM."""
        await asyncio.to_thread(self.prompting.require_fits, question.build, question.options.max_new_tokens)
        if question.k:
            query = RetrieverInput([question.query], "prompt", may_cut=True)
            [question.documents], [question.query_is_cut] = await self.search(question.index, question.k, query)

    async def answer(self, question: Question) -> None:
        """Answer from the documents that were found; raises RunError. Cancelling it ends the answer in the LM too."""
        try:
            await self._answering.submit(question.options, question)
        finally:
            question.gone.set()
        if question.error is not None:
            raise question.error
        self._metrics.tokens.labels("generated").inc(question.answer.num_tokens)
        self._metrics.tokens.labels("read").inc(question.answer.prompt_tokens or 0)

    def _answer_all(self, options: GenerationOptions, questions: Sequence[Question]) -> list[None]:
        """Answer in the LM's thread."""
        mixtures = [one.mixture(self.prompting.template) for one in questions]
        generated = self.lm.generate(mixtures, options, lambda number, text: questions[number].hear(text))
        for question, answer in zip(questions, generated, strict=True):
            question.end(answer)
        return [None] * len(questions)


def _embed_all(key: tuple[ServedIndex, Side], calls: Sequence[RetrieverInput]) -> list[Embedded]:
    index, side = key
    for call in calls:
        _which_are_cut(index, side, call)
    vectors, counts = index.embed([text for call in calls for text in call.texts], side)
    return [(vectors[part], counts[part]) for part in _parts(calls)]


def _search_all(key: tuple[ServedIndex, int], calls: Sequence[RetrieverInput]) -> list[Searched]:
    """Search each call by itself where others in a call could change what a lossy kind finds."""
    index, k = key
    are_cut = [_which_are_cut(index, QUERY, call) for call in calls]
    if index.is_independent:
        all_found = index.retriever.retrieve([query for call in calls for query in call.texts], k)
        found = [all_found[part] for part in _parts(calls)]
    else:
        found = [index.retriever.retrieve(call.texts, k) for call in calls]
    return list(zip(found, are_cut, strict=True))


def _parts(calls: Sequence[RetrieverInput]) -> list[slice]:
    ends = np.cumsum([len(call.texts) for call in calls]).tolist()
    return [slice(end - len(call.texts), end) for call, end in zip(calls, ends, strict=True)]


def _which_are_cut(index: ServedIndex, side: Side, asked: RetrieverInput) -> list[bool]:
    """Return of which texts the retriever reads the beginning only. Raises ApiError where that is not allowed."""
    are_cut = [index.is_cut(text, side) for text in asked.texts]
    if any(are_cut) and not asked.may_cut:
        most = index.encoder(side).tokenizer_of(side).model_max_length
        message = f"text {are_cut.index(True)} has more than {most} tokens; expected less, or truncate: true"
        raise refused(asked.param, message)
    return are_cut
