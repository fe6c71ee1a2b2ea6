"""A language model with a retriever plugged in front of it: REPLUG at inference, as a library (section 3.2).

The documents of a text are retrieved by the text itself and stand before it, one to a prompt. The LM's predictions are
mixed by softmax(similarities / temperature), with the temperature that was saved with the retriever, or another. It is
a `BlackBoxLM` as the one that it wraps is, which may be local weights, a pool or a server. Whoever wants to show the
sources retrieves first and hands in what was found.

With a policy (`models.policy`) each prompt is answered from its documents or without any. `decide` says which, and
`follow` answers; `answer` does both.
"""

import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from replug.config.errors import UserError
from replug.models.black_box_lm import (
    AsyncLM,
    BlackBoxLM,
    ContinuationScore,
    MixingLM,
    Mixture,
    answer_mixtures,
    check_ensemble,
    check_pairs,
    require_texts,
)
from replug.models.ensemble import Documents, Found, Retrieved, Retriever, document_weights, mix_token_logprobs
from replug.models.ensemble_temperature import own_temperature
from replug.models.generation import Generated, GenerationOptions, Sampled, SamplingOptions, Stop
from replug.models.policy import KnownFrom, Policy, Subject
from replug.models.prompt import PromptTemplate

Texts = Sequence[str]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy makes of a prompt: its documents, none for an answer of the LM alone, and why.

    `value` is the signal's, None where there is none, as of an empty answer. `closed_answer` is the LM's own, where it
    was asked for it and retrieval is not used.
    """

    retrieves: bool
    value: float | None
    documents: Sequence[Retrieved] = ()
    closed_answer: Generated | None = None


class ReplugLM:
    """`lm` with up to `k` documents before every text; with k=0, or where nothing is found, `lm` alone.

    `template` joins them, and cuts what is too long where it was given the LM's tokenizer. For generation, give it the
    LM's `max_tokens` less those that will be generated. `policy` decides which answers of `generate` and `answer`
    have documents, and nothing of `score`, `generate_ensemble` and `sample`; one that was fitted to another LM,
    retriever, number of documents, or temperature is refused with a UserError. `temperature` divides similarities in
    the ensemble's softmax; by default it is the one that the retriever was saved with, else 1 as in the paper.

    >>> texts = ["The Loire flows through Nantes.", "The Rhine flows through Basel."]
    >>> lm = ReplugLM(StandInLM(), EncoderRetriever(Encoder("package:minilm"), texts), k=1)
    >>> lm.score("Basel lies on the", " Rhine").sum_logprob > lm.score("Basel lies on the", " Loire").sum_logprob
    True
    >>> lm.generate(["Basel Basel lies on the", "Nantes Nantes lies on the"], max_new_tokens=1)
    ['Basel', 'Nantes']
    """

    def __init__(
        self,
        lm: BlackBoxLM,
        retriever: Retriever,
        k: int = 10,
        template: PromptTemplate | None = None,
        policy: Policy | None = None,
        temperature: float | None = None,
    ) -> None:
        if k < 0:
            raise ValueError(f"k is {k}; expected 0 (no documents) or more")
        self.temperature = own_temperature(retriever).value if temperature is None else temperature
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {temperature}; expected a finite number above 0")
        if policy is not None:
            policy.require_lm(lm.identity)
            policy.require_retriever(getattr(retriever, "identity", None))
            policy.require_ensemble(k, self.temperature)
        self._lm, self._retriever, self._k, self._policy = lm, retriever, k, policy
        self._template = template or PromptTemplate("\n")
        self.max_tokens = lm.max_tokens
        # Each object's own, since nothing tells that two retrievers find the same.
        self.identity = f"replug:{lm.identity}:{uuid.uuid4().hex}"

    def retrieve(self, queries: Sequence[str]) -> list[list[Retrieved]]:
        """The documents of each query, found once for queries that are equal."""
        require_texts(queries, "queries")
        return self._search(queries, self._k)

    def _search(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        if not k:
            return [[] for _ in queries]
        once = list(dict.fromkeys(queries))
        found = dict(zip(once, self._retriever.retrieve(once, k), strict=True)) if once else {}
        return [found[query] for query in queries]

    @overload
    def score(  # type: ignore[overload-overlap]  # a string is a sequence of strings, but one text here
        self, contexts: str, continuations: str, documents: Found | None = None, *, opening: str | None = None
    ) -> ContinuationScore: ...

    @overload
    def score(
        self, contexts: Texts, continuations: Texts, documents: Documents | None = None, *, opening: str | None = None
    ) -> list[ContinuationScore]: ...

    def score(
        self, contexts: str | Texts, continuations: str | Texts, documents: Any = None, *, opening: str | None = None
    ) -> ContinuationScore | list[ContinuationScore]:
        """Log-probs (nats) of each continuation's tokens under the mixture; of two strings, one score.

        `documents`: those of each context. An `opening` saves nothing here: documents stand before it.
        """
        if isinstance(contexts, str) and isinstance(continuations, str):
            return self._score_all([contexts], [continuations], None if documents is None else [documents])[0]
        return self._score_all(contexts, continuations, documents)

    def _score_all(self, contexts: Texts, continuations: Texts, documents: Documents | None) -> list[ContinuationScore]:
        check_pairs(contexts, continuations)
        documents = self._documents(contexts, documents)
        prompts = [
            self._prompts(context, continuation, found)
            for context, continuation, found in zip(contexts, continuations, documents, strict=True)
        ]
        scores = self._score(contexts, prompts, continuations)
        mixed = []
        for given, found in zip(scores, documents, strict=True):
            if not found:
                mixed.append(given[0])
                continue
            logprobs = np.stack([score.token_logprobs for score in given])
            similarities = np.array([one.similarity for one in found])
            mixture = mix_token_logprobs(logprobs, similarities, self.temperature)
            mixed.append(ContinuationScore(mixture.astype(np.float32)))
        return mixed

    @overload
    def generate(self, prompts: str, max_new_tokens: int, stop: Stop = None) -> str: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompts: Texts, max_new_tokens: int, stop: Stop = None) -> list[str]: ...

    def generate(self, prompts: str | Texts, max_new_tokens: int, stop: Stop = None) -> str | list[str]:
        """Greedy answers, each from its own documents, of one string its answer; local weights decode them together."""
        asked = [prompts] if isinstance(prompts, str) else prompts
        answers = [one.text for one in self.answer(asked, GenerationOptions(max_new_tokens, stop or None))]
        return answers[0] if isinstance(prompts, str) else answers

    def answer(
        self,
        prompts: Sequence[str],
        options: GenerationOptions,
        documents: Documents | None = None,
        subjects: Sequence[Subject] | None = None,
    ) -> list[Generated]:
        """As `generate`, with all options and log-probs.

        `documents`: those of each prompt, if they are known; then no policy decides. `subjects`: what each asks about,
        for a policy; raises what `decide` does.
        """
        require_texts(prompts, "prompts")
        if self._policy is not None and documents is None:
            return self.follow(prompts, options, self.decide(prompts, options, subjects))
        return self._answer(prompts, options, self._documents(prompts, documents))

    def decide(
        self,
        prompts: Sequence[str],
        options: GenerationOptions,
        subjects: Sequence[Subject] | None = None,
        queries: Sequence[str] | None = None,
    ) -> list[Decision]:
        """Which prompts the policy answers from documents, and these; `queries` find them, by default the prompts.

        Costs what the signal costs: nothing for what is given, a call of the LM for each prompt, or a search. Raises
        UserError where a signal must be given and is not, or cannot be seen.
        """
        policy = self._policy
        require_texts(prompts, "prompts")
        if policy is None:
            raise ValueError("there is no policy to decide by; expected ReplugLM(policy=...)")
        subjects = [Subject() for _ in prompts] if subjects is None else subjects
        if len(subjects) != len(prompts):
            raise ValueError(f"{len(subjects)} subjects, but {len(prompts)} prompts")
        queries = prompts if queries is None else queries
        if len(queries) != len(prompts):
            raise ValueError(f"{len(queries)} queries, but {len(prompts)} prompts")
        seen = self._see(policy, prompts, queries, options, subjects)
        does = [policy.retrieves(value, of.relation) for (value, _, _), of in zip(seen, subjects, strict=True)]
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
    ) -> list[tuple[float | None, Found | None, Generated | None]]:
        """Return the signal of each prompt, with the documents or the closed-book answer that it took to see it."""
        if policy.decides_by.known_from is KnownFrom.question:
            return [(policy.value_given(subject), None, None) for subject in subjects]
        if policy.decides_by.known_from is KnownFrom.closed_answer:
            answers = self._answer(prompts, options, [[] for _ in prompts])
            return [(policy.value_of_answer(answer), None, answer) for answer in answers]
        found = self._search(queries, max(self._k, 2))  # a margin is of two
        return [(policy.value_of_search([one.similarity for one in some]), some[: self._k], None) for some in found]

    def follow(
        self, prompts: Sequence[str], options: GenerationOptions, decisions: Sequence[Decision]
    ) -> list[Generated]:
        """Answers as they were decided; no answer that is there already is asked for again."""
        rows = [row for row, decision in enumerate(decisions) if decision.closed_answer is None]
        asked = self._answer([prompts[row] for row in rows], options, [decisions[row].documents for row in rows])
        by_row = dict(zip(rows, asked, strict=True))
        return [decision.closed_answer or by_row[row] for row, decision in enumerate(decisions)]

    def _answer(self, prompts: Sequence[str], options: GenerationOptions, documents: Documents) -> list[Generated]:
        asked = [self._mixture(prompt, found) for prompt, found in zip(prompts, documents, strict=True)]
        return answer_mixtures(self._lm, asked, options)

    def stream(
        self,
        prompt: str,
        options: GenerationOptions,
        documents: Sequence[Retrieved] | None = None,
        subject: Subject | None = None,
    ) -> Iterator[str]:
        """The text that `answer` gives for the prompt, in pieces as they come: joined they are that text.

        No piece holds a part of a stop, nor half a character, unless the answer itself ends in one. Local weights give
        what is new after each token; a pool, a cache and a server show no answer before its end, and give one piece.
        Raises what `answer` raises, before the first piece.
        """
        require_texts([prompt], "prompts")
        if self._policy is not None and documents is None:
            [decision] = self.decide([prompt], options, None if subject is None else [subject])
            if decision.closed_answer is not None:
                return _in_one_piece(decision.closed_answer)
            documents = decision.documents
        [found] = self._documents([prompt], None if documents is None else [documents])
        asked = self._mixture(prompt, found)
        if isinstance(self._lm, MixingLM):
            return self._lm.stream_ensemble(asked.prompts, asked.weights, options)
        return _in_one_piece(self._lm.generate_ensemble(asked.prompts, asked.weights, options))

    def _mixture(self, prompt: str, found: Sequence[Retrieved]) -> Mixture:
        return Mixture(self._prompts(prompt, "", found), self._weights(found))

    def generate_ensemble(
        self, prompts: Sequence[str], weights: Sequence[float], options: GenerationOptions
    ) -> Generated:
        """One answer from several prompts, each with its own documents: a mixture of mixtures."""
        check_ensemble(prompts, weights)
        self._require_no_policy()
        whole: list[str] = []
        shares: list[float] = []
        for prompt, weight, found in zip(prompts, weights, self.retrieve(prompts), strict=True):
            whole += self._prompts(prompt, "", found)
            shares += [weight * share for share in self._weights(found)]
        return self._lm.generate_ensemble(whole, shares, options)

    def sample(self, prompts: Sequence[str], options: SamplingOptions) -> list[list[Sampled]]:
        """Draws from the mixture of each prompt's documents: one generation for each sample."""
        self._require_no_policy()
        documents = self.retrieve(prompts)
        samples: list[list[Sampled]] = []
        for prompt, found in zip(prompts, documents, strict=True):
            asked = self._mixture(prompt, found)
            seeds = [options.draw_seed(prompt, number) for number in range(options.num_samples)]
            drawn = [
                self._lm.generate_ensemble(asked.prompts, asked.weights, options.of_one_answer(seed)) for seed in seeds
            ]
            samples.append([Sampled(one.text, one.token_logprobs) for one in drawn])
        return samples

    def _documents(self, texts: Sequence[str], documents: Documents | None) -> Documents:
        if documents is None:
            self._require_no_policy()
            return self.retrieve(texts)
        if len(documents) != len(texts):
            raise ValueError(f"documents of {len(documents)} texts, but {len(texts)} texts")
        return documents

    def _require_no_policy(self) -> None:
        if self._policy is not None:
            raise UserError(
                "a policy decides what `answer` and `generate` retrieve; expected documents for `score`, and a "
                "ReplugLM without a policy for `generate_ensemble` and `sample`"
            )

    def _prompts(self, text: str, continuation: str, documents: Sequence[Retrieved]) -> list[str]:
        """One for each document, or the text alone."""
        if not documents:
            return [self._template.prefix(None, text, continuation)]
        return [self._template.prefix(found.text, text, continuation) for found in documents]

    def _weights(self, documents: Sequence[Retrieved]) -> list[float]:
        """Of each prompt; of the text alone, 1."""
        if not documents:
            return [1.0]
        return document_weights([found.similarity for found in documents], self.temperature).tolist()

    def _score(
        self, contexts: Sequence[str], prompts: list[list[str]], continuations: Sequence[str]
    ) -> list[list[ContinuationScore]]:
        """Return the scores of each continuation after each of its prompts.

        Local weights get all in one call. An LM that works for several callers at once gets a call for each context:
        enough to fill a replica, and never so divided that the scores of one mixture come from two calls.
        """
        rows = [list(range(len(contexts)))]
        if isinstance(self._lm, AsyncLM):
            rows = [[row for row, one in enumerate(contexts) if one == context] for context in dict.fromkeys(contexts)]
        calls = [
            (
                [prompt for row in some for prompt in prompts[row]],
                [continuations[row] for row in some for _ in prompts[row]],
            )
            for some in rows
        ]
        if isinstance(self._lm, AsyncLM):
            futures = [self._lm.submit(*call) for call in calls]
            answers = [future.result() for future in futures]
        else:
            answers = [self._lm.score(*call) for call in calls]
        scores: list[list[ContinuationScore]] = [[] for _ in contexts]
        for some, answer in zip(rows, answers, strict=True):
            given = iter(answer)
            for row in some:
                scores[row] = [next(given) for _ in prompts[row]]
        return scores


def _in_one_piece(answer: Generated) -> Iterator[str]:
    return iter([answer.text] if answer.text else [])
