"""A language model with a retriever plugged in front of it: REPLUG at inference, as a library (section 3.2).

The documents of a text are retrieved by the text itself and stand before it, one to a prompt. The LM's predictions are
mixed by weights that start as softmax(similarities / temperature), with the retriever's saved temperature or another,
and follow the text (`models.ensemble`). A `ReplugLM` is a `BlackBoxLM`, as is the LM inside: local weights, a pool or a
server. To show the sources, retrieve first and pass the documents: an answer has their weights, in the same order.
"""

import math
import uuid
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from replug.models.black_box_lm import (
    BlackBoxLM,
    ContinuationScore,
    Mixture,
    Prompt,
    Watch,
    as_mixtures,
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
    the retriever's saved temperature, else to 1 as in the paper. `weighting` sets how weights follow the text, and
    overrides the weighting of mixtures with documents; the paper's is Weighting(share=1.0).

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
        if k < 0:
            raise ValueError(f"k is {k}; expected 0 (no documents) or more")
        self.temperature = own_temperature(retriever).value if temperature is None else temperature
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {temperature}; expected a finite number above 0")
        self.weighting = weighting
        self._lm, self._retriever, self._k = lm, retriever, k
        self._template = template or PromptTemplate("\n")
        self.max_tokens = lm.max_tokens
        # Unique to this object, since two retrievers cannot be compared.
        self.identity = f"replug:{lm.identity}:{uuid.uuid4().hex}"

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
        self, contexts: str, continuations: str, documents: Documents | None = None, *, opening: str | None = None
    ) -> ContinuationScore: ...

    @overload
    def score(
        self,
        contexts: Texts,
        continuations: Texts,
        documents: Sequence[Documents] | None = None,
        *,
        opening: str | None = None,
    ) -> list[ContinuationScore]: ...

    def score(
        self, contexts: str | Texts, continuations: str | Texts, documents: Any = None, *, opening: str | None = None
    ) -> ContinuationScore | list[ContinuationScore]:
        """Score each continuation's tokens under the mixture (nats); two strings give one score.

        `documents` holds the documents of each context. An `opening` saves nothing here: documents stand before it.
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
        self,
        prompts: str | Mixture,
        options: GenerationOptions,
        watch: Watch | None = None,
        *,
        documents: Documents | None = None,
    ) -> Generated: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        watch: Watch | None = None,
        *,
        documents: Sequence[Documents] | None = None,
    ) -> list[Generated]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: GenerationOptions,
        watch: Watch | None = None,
        *,
        documents: Any = None,
    ) -> Generated | list[Generated]:
        """Answer each prompt from its own documents, a mixture of prompts by a mixture of mixtures.

        `documents` holds the documents of each text, including each prompt of a mixture; by default they are retrieved.
        A single prompt gives one answer, and takes one list of documents.
        """
        if isinstance(prompts, str | Mixture):
            return self.generate([prompts], options, watch, documents=None if documents is None else [documents])[0]
        mixtures = as_mixtures(prompts)
        of_prompts = iter(self._documents([text for mixture in mixtures for text in mixture.prompts], documents))
        grown = [self._with_documents(mixture, [next(of_prompts) for _ in mixture.prompts]) for mixture in mixtures]
        return answer_all(grown, self._lm, options, watch)

    def sample(self, prompts: Texts, options: GenerationOptions) -> list[list[Generated]]:
        """Draw from the mixture of each prompt's documents: one generation for each sample."""
        samples = []
        for prompt, own in zip(prompts, self._documents(prompts, None), strict=True):
            mixture = self._with_documents(Mixture([prompt], [1.0]), [own])
            samples.append([answer_all([mixture], self._lm, own)[0] for own in options.draws(prompt)])
        return samples

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

    def _with_documents(self, mixture: Mixture, documents: Sequence[Documents]) -> Mixture:
        """Return the mixture with the documents of each prompt; they share the prompt's weight."""
        prompts: list[str] = []
        weights: list[float] = []
        for prompt, weight, own in zip(mixture.prompts, mixture.weights, documents, strict=True):
            prompts += self._prompts(prompt, "", own)
            similarities = [document.similarity for document in own]
            shares = document_weights(similarities, self.temperature).tolist() if own else [1.0]
            weights += [weight * share for share in shares]
        return Mixture(prompts, weights, self.weighting if any(documents) else mixture.weighting)
