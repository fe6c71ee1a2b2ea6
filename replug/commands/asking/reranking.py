"""Reranked candidates as a way to answer: sampled from each passage, ordered by what an LM says of them."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from replug.answering.answerer import Answerer, AnsweringOptions
from replug.answering.rerankers import Weights, WeightsFile
from replug.commands.asking.options import AskOptions, Decoding
from replug.commands.asking.prompts import Fitting, chosen_shots
from replug.commands.asking.reply import CLOSED_BOOK, Reply, best_first, scored_candidates
from replug.models.black_box_lm import AsyncLM
from replug.models.lm_source import LMSource
from replug.web.records import FoundEvidence, Passage


def answering_options(options: AskOptions, decoding: Decoding) -> AnsweringOptions:
    """Of a reranker; by default the paper's sampling."""
    chosen = AnsweringOptions(rerankers=(options.way,), seed=decoding.seed)
    if decoding.max_new_tokens is not None:
        chosen = replace(chosen, max_new_tokens=decoding.max_new_tokens)
    if decoding.temperature is not None:
        chosen = replace(chosen, temperature=decoding.temperature)
    return chosen if decoding.top_p is None else replace(chosen, top_p=decoding.top_p)


class Reranking:
    """LMs that are not at work yet: `source` samples, `rerank_source`, which may be the same, says the factors."""

    def __init__(
        self, source: LMSource, rerank_source: LMSource, options: AskOptions, decoding: Decoding, num_passages: int
    ) -> None:
        self._source, self._rerank_source, self._options = source, rerank_source, options
        self._num_passages = num_passages  # asked for, which a search may not find
        self._answering, self._shots = answering_options(options, decoding), chosen_shots(options)

    def answer(self, question: str, found: FoundEvidence) -> Reply:
        """The best of the candidates that were sampled from each passage; closed book the likeliest sample."""
        fitting, rerank_fitting = self._fitting(self._source), self._fitting(self._rerank_source)
        passages = rerank_fitting.cut(question, fitting.cut(question, found.passages))
        prompts = fitting.prompts(self._shots, question, passages)
        rerank_prompts = rerank_fitting.prompts(self._shots, question, passages)
        with self._opened() as (lm, rerank_lm):
            weights = self._weights(lm.identity, rerank_lm.identity)
            answerer = Answerer(lm, prompts, self._answering, rerank_lm, rerank_prompts, weights)
            searched = self._options.searched
            reply = Reply(question, "", self._options.way, lm.identity, searched, None, found.passages, found.failures)
            return _with_candidates(reply, answerer, passages) if passages else _closed_book(reply, answerer)

    def _weights(self, lm: str, reranker: str) -> dict[str, Weights] | None:
        """Those that were fitted for this reranker with as many passages; None leaves the defaults."""
        if self._options.weights is None:
            return None
        way = self._options.way
        return {way: WeightsFile(self._options.weights, lm, reranker).read(f"{way}@{self._num_passages}")}

    def _fitting(self, source: LMSource) -> Fitting:
        return Fitting(source, self._answering.max_new_tokens)

    @contextmanager
    def _opened(self) -> Iterator[tuple[AsyncLM, AsyncLM]]:
        with closing(self._source.open_here()) as lm:
            if self._rerank_source is self._source:
                yield lm, lm
                return
            with closing(self._rerank_source.open_here()) as rerank_lm:
                yield lm, rerank_lm


def _with_candidates(reply: Reply, answerer: Answerer, passages: Sequence[Passage]) -> Reply:
    answered = answerer.answer(reply.question, passages)
    return replace(
        reply,
        answer=answered.best(reply.way),
        scores=best_first(answered.scores[reply.way]),
        candidates=scored_candidates(answered.factors),
    )


def _closed_book(reply: Reply, answerer: Answerer) -> Reply:
    alone = answerer.submit_alone(reply.question, None)()
    return replace(
        reply,
        answer=alone.answer,
        way=CLOSED_BOOK,
        sum_logprob=alone.logprobs.get(alone.answer),
        scores=best_first(alone.logprobs),
    )
