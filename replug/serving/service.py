"""What the server does with a request, whatever its shape: embed, search, and answer through the ensemble.

An answer is REPLUG's (section 3.2): documents are found for the query, each stands before the prompt, and the LM's
predictions are mixed by softmax(similarities / temperature). Requests of one kind are computed together (`batching`).
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from replug.config.errors import RunError
from replug.index_workers.local_index import FoundDocument
from replug.models.black_box_lm import BlackBoxLM, answer_mixtures
from replug.models.generation import Generated, GenerationOptions
from replug.models.streaming import GrowingAnswer
from replug.serving.batching import BatchQueue, Work
from replug.serving.errors import refused
from replug.serving.index_holder import IndexHolder, ServedIndex
from replug.serving.limits import ServingLimits
from replug.serving.metrics import EMBEDDED, GENERATED, READ, Metrics
from replug.serving.prompting import Build, PromptedMixture, Prompting
from replug.serving.requests import QUERY, Side

Listener = Callable[[str], None]  # of the pieces of an answer, in the LM's thread
Embedded = tuple[np.ndarray, list[int]]
Searched = tuple[list[list[FoundDocument]], list[bool]]


@dataclass(frozen=True, slots=True)
class RetrieverInput:
    """Texts of a request, named by its parameter; those that the retriever does not read whole are cut or refused."""

    texts: list[str]
    param: str
    may_cut: bool


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that is to be answered from `k` documents, which `query` finds in `index`."""

    build: Build
    query: str
    k: int
    options: GenerationOptions
    index: ServedIndex


@dataclass(frozen=True, slots=True)
class AnswerEvidence:
    """The documents of an answer, of one version. `query_is_cut`: the retriever reads the beginning of it only."""

    index: ServedIndex
    documents: Sequence[FoundDocument]
    query_is_cut: bool


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """What the LM said, with all it is from."""

    generated: Generated
    prompted: PromptedMixture


@dataclass(eq=False)
class _Job:
    """An answer that is asked of the LM; its client may listen, and may go."""

    prompted: Callable[[], PromptedMixture]
    growing: GrowingAnswer
    listen: Listener | None
    gone: threading.Event = field(default_factory=threading.Event)
    error: RunError | None = None

    def hear(self, whole: str) -> bool:
        """Whether the answer is still wanted, now that it has grown."""
        if self.listen is not None:
            try:
                self._tell(self.growing.grow(whole))
            except RunError as error:  # the tokenizer wrote it anew; others of the call go on
                self.error = error
        return self.error is None and not self.gone.is_set()

    def end(self, whole: str) -> RunError | None:
        """Why the client cannot be told the rest."""
        if self.error is None and self.listen is not None and not self.gone.is_set():
            try:
                self._tell(self.growing.end(whole))
            except RunError as error:
                self.error = error
        return self.error

    def _tell(self, piece: str) -> None:
        if piece and self.listen is not None:
            self.listen(piece)


@dataclass(frozen=True, slots=True)
class Ensembled:
    """An LM, how it is asked, and from how many documents it answers by default."""

    lm: BlackBoxLM
    prompting: Prompting
    k: int


class Service:
    """Made on the event loop that it is used on."""

    def __init__(self, ensemble: Ensembled, index: IndexHolder, limits: ServingLimits, metrics: Metrics) -> None:
        self.lm, self.prompting, self.k = ensemble.lm, ensemble.prompting, ensemble.k
        self.index, self.limits, self._metrics = index, limits, metrics
        # A tokenizer refuses to be used by two threads at once, so a thread has each model to itself.
        self._retrieving, self._generating = ThreadPoolExecutor(1, "retriever"), ThreadPoolExecutor(1, "lm")
        self._embedding: BatchQueue[tuple[ServedIndex, Side], RetrieverInput, Embedded] = BatchQueue(
            Work("embed", _embed_all, _num_texts, limits.max_texts), self._retrieving, metrics
        )
        self._searching: BatchQueue[tuple[ServedIndex, int], RetrieverInput, Searched] = BatchQueue(
            Work("search", _search_all, _num_texts, limits.max_texts), self._retrieving, metrics
        )
        self._answering: BatchQueue[GenerationOptions, _Job, ServedAnswer | RunError] = BatchQueue(
            Work("answer", self._answer_all, lambda job: 1, limits.max_batch), self._generating, metrics
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
        """Vectors [N, D] float32, and the tokens of each text."""
        vectors, counts = await self._embedding.submit((index, side), texts)
        self._metrics.tokens.labels(EMBEDDED).inc(sum(counts))
        return vectors, counts

    async def search(self, index: ServedIndex, k: int, queries: RetrieverInput) -> Searched:
        """Documents of each query, and whether it was cut."""
        return await self._searching.submit((index, k), queries)

    async def find(self, question: Question) -> AnswerEvidence:
        """The documents of a question whose prompt fits the LM. Raises ApiError."""
        index = question.index
        await asyncio.to_thread(self.prompting.require_fits, question.build, question.options.max_new_tokens)
        if not question.k:
            return AnswerEvidence(index, (), False)
        query = RetrieverInput([question.query], "prompt", may_cut=True)
        [found], [is_cut] = await self._searching.submit((index, question.k), query)
        return AnswerEvidence(index, found, is_cut)

    async def answer(
        self, question: Question, evidence: AnswerEvidence, listen: Listener | None = None
    ) -> ServedAnswer:
        """From these documents; `listen` hears of the pieces as they come. Raises RunError."""
        options = question.options
        job = _Job(
            lambda: self.prompting.mixture(
                question.build, evidence.documents, evidence.index.temperature, options.max_new_tokens
            ),
            GrowingAnswer(options.stop),
            listen,
        )
        try:
            answered = await self._answering.submit(options, job)
        finally:
            job.gone.set()
        if isinstance(answered, RunError):
            raise answered
        self._metrics.tokens.labels(GENERATED).inc(answered.generated.num_tokens)
        self._metrics.tokens.labels(READ).inc(answered.generated.prompt_tokens or 0)
        return answered

    def _answer_all(self, options: GenerationOptions, jobs: Sequence[_Job]) -> list[ServedAnswer | RunError]:
        """In the LM's thread."""
        prompted = [job.prompted() for job in jobs]
        mixtures = [one.mixture for one in prompted]
        generated = answer_mixtures(self.lm, mixtures, options, lambda number, text: jobs[number].hear(text))
        return [_ended(*one) for one in zip(jobs, generated, prompted, strict=True)]


def _ended(job: _Job, generated: Generated, prompted: PromptedMixture) -> ServedAnswer | RunError:
    error = job.end(generated.text)
    return ServedAnswer(generated, prompted) if error is None else error


def _num_texts(asked: RetrieverInput) -> int:
    return len(asked.texts)


def _embed_all(key: tuple[ServedIndex, Side], calls: Sequence[RetrieverInput]) -> list[Embedded]:
    index, side = key
    for call in calls:
        _which_are_cut(index, side, call)
    vectors, counts = index.embed([text for call in calls for text in call.texts], side)
    return [(vectors[part], counts[part]) for part in _parts(calls)]


def _search_all(key: tuple[ServedIndex, int], calls: Sequence[RetrieverInput]) -> list[Searched]:
    """Each by itself where others in a call could change what a lossy kind finds."""
    index, k = key
    are_cut = [_which_are_cut(index, QUERY, call) for call in calls]
    if index.is_independent:
        all_found = index.retriever.find([query for call in calls for query in call.texts], k)
        found = [all_found[part] for part in _parts(calls)]
    else:
        found = [index.retriever.find(call.texts, k) for call in calls]
    return list(zip(found, are_cut, strict=True))


def _parts(calls: Sequence[RetrieverInput]) -> list[slice]:
    ends = np.cumsum([len(call.texts) for call in calls]).tolist()
    return [slice(end - len(call.texts), end) for call, end in zip(calls, ends, strict=True)]


def _which_are_cut(index: ServedIndex, side: Side, asked: RetrieverInput) -> list[bool]:
    """Of which texts the retriever reads the beginning only. Raises ApiError where that is not allowed."""
    are_cut = [index.is_cut(text, side) for text in asked.texts]
    if any(are_cut) and not asked.may_cut:
        most = index.encoder(side).max_tokens
        message = f"text {are_cut.index(True)} has more than {most} tokens; expected less, or truncate: true"
        raise refused(asked.param, message)
    return are_cut
