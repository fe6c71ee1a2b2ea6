"""A language model with a retriever plugged in front of it: REPLUG at inference, as a library (section 3.2).

The documents of a text are retrieved by the text itself and stand before it, one to a prompt. The LM's predictions are
mixed by weights that begin as softmax(similarities / temperature), with the temperature that was saved with the
retriever, or another, and follow the text (`models.ensemble`). It is a `BlackBoxLM` as the one that it wraps is, which
may be local weights, a pool or a server. To show the sources, retrieve first and hand in what was found: the weights
of an answer are those of its documents, in their order.

With a policy (`models.policy`) each prompt is answered from its documents or without any. `decide` says which, and
`follow` answers; `generate` does both.
"""

import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from replug.config.errors import UserError
from replug.config.rules import DOCUMENT
from replug.models.black_box_lm import (
    AsyncLM,
    BlackBoxLM,
    ContinuationScore,
    Mixture,
    Prompt,
    StreamingLM,
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
from replug.models.policy import KnownFrom, Policy, Subject
from replug.models.prompt import PromptTemplate

Texts = Sequence[str]
Documents = Sequence[Retrieved]  # of one text


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's decision on a prompt: its documents, none for an answer of the LM alone, and the reason.

    `value` is the signal's, None where there is none, such as that of an empty answer. `closed_answer` is the LM's
    own, where it was asked for it and retrieval is not used.
    """

    retrieves: bool
    value: float | None
    documents: Documents = ()
    closed_answer: Generated | None = None


class ReplugLM:
    """`lm` with up to `k` documents before every text; with k=0, or where nothing is found, `lm` alone.

    `template` joins them, and cuts what is too long where it was given the LM's tokenizer. For generation, give it the
    LM's `max_tokens` less those that will be generated. `policy` decides which answers of `generate` have documents;
    `score`, `sample` and mixtures of prompts refuse one. A policy that was fitted to another LM, retriever, number of
    documents, temperature or weighting is a UserError. `temperature` divides similarities in the ensemble's softmax. It
    defaults to the one that the retriever was saved with, else to 1 as in the paper. `weighting` says how weights
    follow the text, whatever mixtures of prompts say themselves; the paper's is Weighting(share=1.0). Its `alone` is
    the prior of the text without a document, whose weight comes last among those of an answer.

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
        policy: Policy | None = None,
        temperature: float | None = None,
        weighting: Weighting = POSTERIOR_WEIGHTS,
    ) -> None:
        if k < 0:
            raise ValueError(f"k is {k}; expected 0 (no documents) or more")
        self.temperature = own_temperature(retriever).value if temperature is None else temperature
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {temperature}; expected a finite number above 0")
        if policy is not None:
            policy.require_lm(lm.identity)
            policy.require_retriever(getattr(retriever, "identity", None))
            policy.require_ensemble(k, self.temperature, weighting)
        self.weighting = weighting
        self._lm, self._retriever, self._k, self._policy = lm, retriever, k, policy
        self._template = template or PromptTemplate("\n")
        self.max_tokens = lm.max_tokens
        # Each object's own, since nothing tells that two retrievers find the same.
        self.identity = f"replug:{lm.identity}:{uuid.uuid4().hex}"

    def retrieve(self, queries: Texts) -> list[list[Retrieved]]:
        """Return the documents of each query, found once for queries that are equal."""
        require_texts(queries, "queries")
        return self._search(queries, self._k)

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

        `documents` holds those of each context. An `opening` saves nothing here: documents stand before it.
        """
        if isinstance(contexts, str) and isinstance(continuations, str):
            return self.score([contexts], [continuations], None if documents is None else [documents])[0]
        check_pairs(contexts, continuations)
        documents = self._documents(contexts, documents)
        prompts = [self._prompts(*row) for row in zip(contexts, continuations, documents, strict=True)]
        mixed = []
        scores = self._score(contexts, prompts, continuations)
        for given, found, continuation in zip(scores, documents, continuations, strict=True):
            if not found:
                mixed.append(given[0])
                continue
            if given[-1].num_tokens != given[0].num_tokens:  # the last is without a document
                raise UserError(
                    f"the continuation {continuation[:40]!r} has {given[0].num_tokens} tokens after a document and "
                    f"{given[-1].num_tokens} without one; expected a context before it, or a weighting with alone=0"
                )
            prior = prior_log_weights([one.similarity for one in found], self.temperature, self.weighting.alone)
            logprobs = np.stack([score.token_logprobs for score in given])
            mixture = mix(logprobs, prior, self.weighting.share, self.weighting.prune, common_read(given))
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
        subjects: Subject | None = None,
    ) -> Generated: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        watch: Watch | None = None,
        *,
        documents: Sequence[Documents] | None = None,
        subjects: Sequence[Subject] | None = None,
    ) -> list[Generated]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: GenerationOptions,
        watch: Watch | None = None,
        *,
        documents: Any = None,
        subjects: Any = None,
    ) -> Generated | list[Generated]:
        """Answer each prompt from its own documents, a mixture of prompts by a mixture of mixtures.

        `documents` holds those of each prompt, if they are known; then no policy decides. `subjects` holds what each
        prompt asks about, for a policy. One prompt instead of a list gives one answer, and takes its documents and its
        subject. Raises what `decide` raises.
        """
        if isinstance(prompts, str | Mixture):
            own = [None if given is None else [given] for given in (documents, subjects)]
            return self.generate([prompts], options, watch, documents=own[0], subjects=own[1])[0]
        mixtures = as_mixtures(prompts)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if self._policy is not None and documents is None and len(texts) == len(prompts):
            return self.follow(texts, options, self.decide(texts, options, subjects))
        found = iter(self._documents([text for mixture in mixtures for text in mixture.prompts], documents))
        asked = [self._mixture(mixture, [next(found) for _ in mixture.prompts]) for mixture in mixtures]
        return self._lm.generate(asked, options, watch)

    def sample(self, prompts: Texts, options: GenerationOptions) -> list[list[Generated]]:
        """Draw from the mixture of each prompt's documents: one generation for each sample."""
        samples = []
        for prompt, found in zip(prompts, self._documents(prompts, None), strict=True):
            asked = [self._mixture(Mixture([prompt], [1.0]), [found])]
            samples.append([self._lm.generate(asked, own)[0] for own in options.draws(prompt)])
        return samples

    def stream(
        self,
        prompt: str,
        options: GenerationOptions,
        documents: Documents | None = None,
        subject: Subject | None = None,
    ) -> Iterator[str]:
        """Yield the text that `generate` gives for the prompt, in pieces as they come.

        No piece holds a part of a stop, nor half a character, unless the answer itself ends in one. Local weights give
        what is new after each token; a pool, a cache and a server show no answer before its end, and give one piece.
        Raises what `generate` raises, before the first piece.
        """
        require_texts([prompt], "prompts")
        if self._policy is not None and documents is None:
            [decision] = self.decide([prompt], options, None if subject is None else [subject])
            if decision.closed_answer is not None:
                return _in_one_piece(decision.closed_answer)
            documents = decision.documents
        found = self._documents([prompt], None if documents is None else [documents])
        asked = self._mixture(Mixture([prompt], [1.0]), found)
        if isinstance(self._lm, StreamingLM):
            return self._lm.stream(asked, options)
        return _in_one_piece(self._lm.generate([asked], options)[0])

    def decide(
        self,
        prompts: Sequence[str],
        options: GenerationOptions,
        subjects: Sequence[Subject] | None = None,
        queries: Sequence[str] | None = None,
    ) -> list[Decision]:
        """Decide which prompts the policy answers from documents, and find these by `queries`.

        By default these are as in fitting, of the question in each prompt; the prompts where the policy says no form.
        Costs what the signal costs: nothing for what is given, a call of the LM for each prompt, or a search. Raises
        UserError where a signal must be given and is not, or cannot be seen.
        """
        policy = self._policy
        require_texts(prompts, "prompts")
        if policy is None:
            raise ValueError("no policy was given to decide by; expected ReplugLM(policy=...)")
        subjects = [Subject() for _ in prompts] if subjects is None else subjects
        if len(subjects) != len(prompts):
            raise ValueError(f"{len(subjects)} subjects, but {len(prompts)} prompts")
        questions = [
            policy.require_prompt(prompt, self._template.fill(DOCUMENT, prompt), subject.relation)
            for prompt, subject in zip(prompts, subjects, strict=True)
        ]
        queries = [policy.query(question) for question in questions] if queries is None else queries
        if len(queries) != len(prompts):
            raise ValueError(f"{len(queries)} queries, but {len(prompts)} prompts")
        seen = self._see(policy, prompts, queries, options, subjects)
        does = [
            policy.retrieves(value, subject.relation) for (value, _, _), subject in zip(seen, subjects, strict=True)
        ]
        wanted = [queries[row] for row, (_, found, _) in enumerate(seen) if does[row] and found is None]
        searched = iter(self._search(wanted, self._k))
        return [
            Decision(True, value, next(searched) if found is None else found)
            if retrieves
            else Decision(False, value, (), closed)
            for (value, found, closed), retrieves in zip(seen, does, strict=True)
        ]

    def _see(
        self,
        policy: Policy,
        prompts: Sequence[str],
        queries: Sequence[str],
        options: GenerationOptions,
        subjects: Sequence[Subject],
    ) -> list[tuple[float | None, Documents | None, Generated | None]]:
        """Return the signal of each prompt, with the documents or the closed-book answer that it took to see it."""
        if policy.decides_by.known_from is KnownFrom.question:
            return [(policy.value_given(subject), None, None) for subject in subjects]
        if policy.decides_by.known_from is KnownFrom.closed_answer:
            answers = self.generate(prompts, options, documents=[[] for _ in prompts])
            return [(policy.value_of_answer(answer), None, answer) for answer in answers]
        found = self._search(queries, self._k)
        similarities = [[document.similarity for document in documents] for documents in found]
        values = [policy.value_of_search(own) for own in similarities]
        return [(value, documents, None) for value, documents in zip(values, found, strict=True)]

    def follow(self, prompts: Texts, options: GenerationOptions, decisions: Sequence[Decision]) -> list[Generated]:
        """Answer as it was decided; no answer that is there already is asked for again."""
        rows = [row for row, decision in enumerate(decisions) if decision.closed_answer is None]
        documents = [decisions[row].documents for row in rows]
        asked = self.generate([prompts[row] for row in rows], options, documents=documents)
        by_row = dict(zip(rows, asked, strict=True))
        return [decision.closed_answer or by_row[row] for row, decision in enumerate(decisions)]

    def _search(self, queries: Texts, k: int) -> list[list[Retrieved]]:
        if not k:
            return [[] for _ in queries]
        once = list(dict.fromkeys(queries))
        found = dict(zip(once, self._retriever.retrieve(once, k), strict=True)) if once else {}
        return [found[query] for query in queries]

    def _documents(self, texts: Texts, documents: Sequence[Documents] | None) -> Sequence[Documents]:
        if documents is None:
            if self._policy is not None:
                raise UserError(
                    "a policy decides what `generate` retrieves for a text; expected documents for `score`, and a "
                    "ReplugLM without a policy for `sample` and for mixtures of prompts"
                )
            return self.retrieve(texts)
        if len(documents) != len(texts):
            raise ValueError(f"documents of {len(documents)} texts, but {len(texts)} texts; expected as many")
        return documents

    def _prompts(self, text: str, continuation: str, documents: Documents) -> list[str]:
        """Return a prompt for each document, and the text alone where it is a member or there is no document."""
        texts: list[str | None] = [document.text for document in documents]
        texts += [None] * (self.weighting.alone > 0 or not documents)
        return [self._template.prefix(document, text, continuation) for document in texts]

    def _mixture(self, mixture: Mixture, documents: Sequence[Documents]) -> Mixture:
        """Return the prompts with the documents of each; a prompt's weight is divided among its members."""
        prompts: list[str] = []
        weights: list[float] = []
        for prompt, weight, found in zip(mixture.prompts, mixture.weights, documents, strict=True):
            prompts += self._prompts(prompt, "", found)
            similarities = [document.similarity for document in found]
            shares = document_weights(similarities, self.temperature, self.weighting.alone) if found else [1.0]
            weights += [weight * float(share) for share in shares]
        if not any(documents):
            return replace(mixture, prompts=prompts)
        return Mixture(prompts, weights, self.weighting.share, self.weighting.prune, self.weighting.read)

    def _score(self, contexts: Texts, prompts: list[list[str]], continuations: Texts) -> list[list[ContinuationScore]]:
        """Return the scores of each continuation after each of its prompts.

        Local weights get all in one call. An LM that works for several callers at once gets a call for each context:
        enough to fill a replica, and never so divided that the scores of one mixture come from two calls.
        """
        calls = [list(range(len(contexts)))]
        if isinstance(self._lm, AsyncLM):
            calls = [
                [row for row, other in enumerate(contexts) if other == context] for context in dict.fromkeys(contexts)
            ]
        asked = [
            (
                [prompt for row in rows for prompt in prompts[row]],
                [continuations[row] for row in rows for _ in prompts[row]],
            )
            for rows in calls
        ]
        also = reading(self.weighting.read if self.weighting.share < 1 else 0)
        if isinstance(self._lm, AsyncLM):
            futures = [self._lm.submit(*pairs, **also) for pairs in asked]
            answers = [future.result() for future in futures]
        else:
            answers = [self._lm.score(*pairs, **also) for pairs in asked]
        scores: list[list[ContinuationScore]] = [[] for _ in contexts]
        for rows, answer in zip(calls, answers, strict=True):
            given = iter(answer)
            for row in rows:
                scores[row] = [next(given) for _ in prompts[row]]
        return scores


def _in_one_piece(answer: Generated) -> Iterator[str]:
    return iter([answer.text] if answer.text else [])
