"""A language model with a retriever plugged in front of it: REPLUG at inference, as a library (section 3.2).

The documents of a text are retrieved by the text itself and stand before it, one to a prompt. The LM's predictions are
mixed by weights that start as softmax(similarities / temperature), with the retriever's saved temperature or another,
and follow the text (`models.ensemble`). The LM inside is any `BlackBoxLM`: local weights, a pool or a server. To show
the sources, retrieve first and pass the documents: an answer has their weights, in the same order.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from typing import Any, overload

import numpy as np

from replug.models.black_box_lm import (
    BlackBoxLM,
    ContinuationScore,
    GrowingAnswer,
    Mixture,
    Watch,
    check_pairs,
    common_read,
    reading,
    require_texts,
)
from replug.models.ensemble import (
    POSTERIOR_WEIGHTS,
    Retrieved,
    Retriever,
    Weighting,
    document_weights,
    mix,
    prior_log_weights,
)
from replug.models.ensemble_temperature import own_temperature
from replug.models.generation import Generated, GenerationOptions
from replug.models.prompt import PromptTemplate

Texts = Sequence[str]
Documents = Sequence[Retrieved]  # of one text


def answer_all(
    mixtures: Sequence[Mixture], lm: BlackBoxLM, options: GenerationOptions, watch: Watch | None = None
) -> list[Generated]:
    """Answer each mixture, by the votes of its prompts if `weighting.votes` is set.

    `watch` gets empty texts for answers by votes: they have no text before their end.
    """
    calls = [(number, call) for number, mixture in enumerate(mixtures) for call in mixture.calls]

    def on_token(place: int, text: str) -> bool:
        number = calls[place][0]
        assert watch is not None
        return watch(number, "" if mixtures[number].weighting.votes else text)

    answers = iter(lm.generate([call for _, call in calls], options, on_token if watch else None))
    return [mixture.answer([next(answers) for _ in mixture.calls]) for mixture in mixtures]


class ReplugLM:
    """`lm` with up to `k` documents before every text; with k=0, or without documents, `lm` alone.

    `template` joins them, and with the LM's tokenizer cuts prompts that are too long. For generation, its limit is the
    LM's `max_tokens` less the new tokens. `temperature` divides similarities in the ensemble's softmax. It defaults to
    the retriever's saved temperature, else to 1 as in the paper. `weighting` sets how weights follow the text;
    the paper's is Weighting(share=1.0).

    >>> texts = ["The Loire flows through Nantes.", "The Rhine flows through Basel."]
    >>> lm = ReplugLM(StandInLM(), EncoderRetriever(Encoder("package:minilm"), texts), k=1)
    >>> lm.score("Basel lies on the", " Rhine").sum_logprob > lm.score("Basel lies on the", " Loire").sum_logprob
    True
    >>> lm.generate("Basel Basel lies on the", GenerationOptions(1)).text
    'Basel'
    """

    def __init__(
        self,
        lm: BlackBoxLM,
        retriever: Retriever,
        k: int = 10,
        template: PromptTemplate | None = None,
        temperature: float | None = None,
        weighting: Weighting = POSTERIOR_WEIGHTS,
    ) -> None:
        self.temperature = own_temperature(retriever).value if temperature is None else temperature
        self.weighting = weighting
        self._lm, self._retriever, self._k = lm, retriever, k
        self._template = template or PromptTemplate()

    def retrieve(self, queries: Texts) -> list[list[Retrieved]]:
        """Return the documents of each query, searching once for equal queries."""
        require_texts(queries, "queries")
        if not self._k:
            return [[] for _ in queries]
        once = list(dict.fromkeys(queries))
        results = dict(zip(once, self._retriever.retrieve(once, self._k), strict=True)) if once else {}
        return [results[query] for query in queries]

    @overload
    def score(  # type: ignore[overload-overlap]  # a string is a sequence of strings, but one text here
        self, contexts: str, continuations: str, documents: Documents | None = None
    ) -> ContinuationScore: ...

    @overload
    def score(
        self, contexts: Texts, continuations: Texts, documents: Sequence[Documents] | None = None
    ) -> list[ContinuationScore]: ...

    def score(
        self, contexts: str | Texts, continuations: str | Texts, documents: Any = None
    ) -> ContinuationScore | list[ContinuationScore]:
        """Score each continuation's tokens under the mixture (nats); two strings give one score.

        `documents` holds the documents of each context.
        """
        if isinstance(contexts, str) and isinstance(continuations, str):
            return self.score([contexts], [continuations], None if documents is None else [documents])[0]
        check_pairs(contexts, continuations)
        if self.weighting.votes:
            raise ValueError("weighting has votes, which score no text; expected a weighting without")
        documents = self._documents(contexts, documents)
        prompts = [self._prompts(*row) for row in zip(contexts, continuations, documents, strict=True)]
        afters = [after for after, own in zip(continuations, prompts, strict=True) for _ in own]
        read = self.weighting.read if self.weighting.share < 1 else 0
        scores = iter(self._lm.score([prompt for own in prompts for prompt in own], afters, **reading(read)))
        mixed = []
        for texts, own in zip(prompts, documents, strict=True):
            given = [next(scores) for _ in texts]
            if not own:
                mixed.append(given[0])
                continue
            prior = prior_log_weights([one.similarity for one in own], self.temperature)
            logprobs = np.stack([score.token_logprobs for score in given])
            mixture = mix(logprobs, prior, self.weighting, common_read(given))
            mixed.append(ContinuationScore(mixture.astype(np.float32)))
        return mixed

    @overload
    def generate(  # type: ignore[overload-overlap]  # as of `score`
        self, prompts: str, options: GenerationOptions, documents: Documents | None = None
    ) -> Generated: ...

    @overload
    def generate(
        self, prompts: Texts, options: GenerationOptions, documents: Sequence[Documents] | None = None
    ) -> list[Generated]: ...

    def generate(
        self, prompts: str | Texts, options: GenerationOptions, documents: Any = None
    ) -> Generated | list[Generated]:
        """Answer each prompt from its own documents; a single prompt gives one answer, and takes one list of them."""
        if isinstance(prompts, str):
            return self.generate([prompts], options, None if documents is None else [documents])[0]
        documents = self._documents(prompts, documents)
        return answer_all(list(map(self._mixture, prompts, documents)), self._lm, options)

    def stream(self, prompt: str, options: GenerationOptions, documents: Documents | None = None) -> Iterator[str]:
        """Yield the answer of `generate` piece by piece: without half a stop or character; a server's as one piece."""
        mixture = self._mixture(prompt, self.retrieve([prompt])[0] if documents is None else documents)
        texts, growing, left = SimpleQueue[str | None](), GrowingAnswer(options.stop), Event()

        def watch(_: int, text: str) -> bool:
            texts.put(text)
            return not left.is_set()

        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(answer_all, [mixture], self._lm, options, watch)
            answers.add_done_callback(lambda _: texts.put(None))
            try:
                while (text := texts.get()) is not None:
                    if piece := growing.grow(text):
                        yield piece
                if piece := growing.end(answers.result()[0].text):
                    yield piece
            finally:  # a caller that reads no further ends the answer in the LM
                left.set()

    def _documents(self, texts: Texts, documents: Sequence[Documents] | None) -> Sequence[Documents]:
        if documents is None:
            return self.retrieve(texts)
        if len(documents) != len(texts):
            raise ValueError(f"documents of {len(documents)} texts, but {len(texts)} texts; expected equal numbers")
        return documents

    def _prompts(self, text: str, continuation: str, documents: Documents) -> list[str]:
        """Return a prompt for each document; without documents the prompt of the text alone."""
        texts: Sequence[str | None] = [document.text for document in documents] or [None]
        return [self._template.prefix(document, text, continuation) for document in texts]

    def _mixture(self, prompt: str, documents: Documents) -> Mixture:
        """Return the mixture of the prompts with each document."""
        prompts = self._prompts(prompt, "", documents)
        if not documents:
            return Mixture(prompts, [1.0])
        similarities = [document.similarity for document in documents]
        return Mixture(prompts, document_weights(similarities, self.temperature).tolist(), self.weighting)
