"""From a question to its reply: what is searched, which LM is asked, and by which way to answer.

Where the evidence of `replug ask` comes from: an index with its own encoder, or a search engine and its pages.

REPLUG's ensemble as a way to answer: one token is chosen for all passages, which a policy may do without.

Reranked candidates as a way to answer: sampled from each passage, ordered by what an LM says of them.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from replug.answering.answerer import Answerer, AnsweringOptions
from replug.answering.prompts import STOP
from replug.answering.rerankers import Weights, WeightsFile
from replug.commands.asking.options import LOCAL, AskOptions, Decoding, Followed
from replug.commands.asking.prompts import EnsemblePrompts, Fitting, FormPrompts, chosen_shots, template_prompts
from replug.commands.asking.reply import CLOSED_BOOK, FollowedPolicy, Reply, best_first, scored_candidates
from replug.config.errors import UserError
from replug.config.evaluation_schema import AskConfig
from replug.config.rules import has_rerank_lm
from replug.config.schema import LMConfig
from replug.data.rows import read_documents
from replug.index_workers.build_plan import index_folder
from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.black_box_lm import AsyncLM, Mixture
from replug.models.build import lm_source, load_encoder
from replug.models.ensemble_temperature import own_temperature
from replug.models.generation import Generated, GenerationOptions
from replug.models.hardware import available_cores
from replug.models.lm_source import LMSource
from replug.models.replug_lm import ReplugLM
from replug.train.run_dir import RunDirectory
from replug.web import require_web
from replug.web.engines import BM25Retriever, LocalEngine
from replug.web.passages import first_passages, passages_of_documents, rank_densely
from replug.web.records import FoundEvidence, Passage, SearchEngine

log = logging.getLogger(__name__)


def open_index(directory: Path) -> IndexRetriever:
    """The newest version of a run's or an index's folder, with the encoder that it was made by."""
    return IndexRetriever(LocalIndex(index_folder(directory), available_cores()))


def find_evidence(question: str, k: int, options: AskOptions, config: AskConfig, folder: Path) -> FoundEvidence:
    """The `k` passages nearest to the question, whose weights sum to 1. Without `k` nobody is asked."""
    if not k:
        return FoundEvidence(question, (), {})
    if options.engine is None:
        assert options.index is not None  # `checked`
        retriever = open_index(options.index)
        [documents] = retriever.retrieve([question], k)
        return FoundEvidence(question, tuple(passages_of_documents(documents, temperature_of(config, retriever))), {})
    require_web(f"--engine {options.engine}")
    from replug.web.evidence import evidence_finder

    with closing(evidence_finder(config.web, folder / "snapshot", _local_engine(options))) as finder:
        found = finder.find(question)
    if found.failures:
        log.info(f"the search gave less: {', '.join(f'{name} {count}' for name, count in found.failures.items())}")
    return FoundEvidence(question, tuple(_nearest(question, k, found.passages, config)), found.failures)


def temperature_of(config: AskConfig, owner: object) -> float:
    """Of the ensemble: what is asked for, else what was saved with the retriever or encoder, else the paper's."""
    asked = config.ensemble.temperature
    return own_temperature(owner).value if asked is None else float(asked)


def _local_engine(options: AskOptions) -> SearchEngine | None:
    """Dense over an index, or BM25 over a file of documents."""
    if options.engine != LOCAL:
        return None
    if options.index is not None:
        return LocalEngine(open_index(options.index))
    assert options.corpus is not None  # `checked`
    return LocalEngine(BM25Retriever(read_documents(options.corpus)))


def _nearest(question: str, k: int, passages: Sequence[Passage], config: AskConfig) -> list[Passage]:
    """Order passages by TF-IDF as they come, or by the retriever that reranks them."""
    if config.retriever.path:
        encoder = load_encoder(config.retriever)
        passages = rank_densely(encoder, question, passages, temperature_of(config, encoder))
    return first_passages(passages, k)


NEW_TOKENS, NEW_TOKENS_OF_TEMPLATE = 32, 64


def generation_options(options: AskOptions, decoding: Decoding) -> GenerationOptions:
    """Of the ensemble: greedy by default. A template's answer ends where the user says, others with their line."""
    is_template = options.template is not None
    return GenerationOptions(
        decoding.max_new_tokens or (NEW_TOKENS_OF_TEMPLATE if is_template else NEW_TOKENS),
        decoding.stop or (None if is_template else STOP),
        0.0 if decoding.temperature is None else decoding.temperature,
        1.0 if decoding.top_p is None else decoding.top_p,
        decoding.seed,
    )


class Ensemble:
    """An LM that is not at work yet, and how it is asked."""

    def __init__(self, source: LMSource, lm: LMConfig, options: AskOptions, decoding: Decoding) -> None:
        self._source, self._lm, self._options = source, lm, options
        self._generation, self._shots = generation_options(options, decoding), chosen_shots(options)

    def answer(self, question: str, found: FoundEvidence) -> Reply:
        """From the passages; the LM alone answers where there are none."""
        prompts = self._prompts(question, found.passages)
        with closing(self._source.open_here()) as lm:
            generated = self._generate(lm, prompts, question, found.passages)
            return self._reply(question, generated, found, lm.identity)

    def follow(self, question: str, k: int, config: AskConfig, followed: Followed) -> Reply:
        """From the index's documents or closed book, as the policy says. No answer that is there is asked for again.

        Raises UserError for a policy that was fitted to another LM, index, number of documents or temperature.
        """
        assert self._options.index is not None  # `options.checked`
        policy, alone = followed.policy, self._prompts(question, ())
        with closing(self._source.open_here()) as lm:
            retriever = open_index(self._options.index)
            temperature = temperature_of(config, retriever)
            replug = ReplugLM(lm, retriever, k, policy=policy, temperature=temperature)
            [decision] = replug.decide([alone.closed(question)], self._generation, [followed.subject], [question])
            found = FoundEvidence(question, tuple(passages_of_documents(decision.documents, temperature)), {})
            generated = decision.closed_answer
            if generated is None:
                generated = self._generate(lm, self._prompts(question, found.passages), question, found.passages)
            reply = self._reply(question, generated, found, lm.identity)
        relation = followed.subject.relation
        told = FollowedPolicy(
            policy.signal,
            decision.value,
            policy.threshold(relation),
            decision.retrieves,
            policy.reason(decision.value, relation),
        )
        return replace(reply, policy=told)

    def _prompts(self, question: str, passages: Sequence[Passage]) -> EnsemblePrompts:
        num_new = self._generation.max_new_tokens
        if self._options.template is not None:
            return template_prompts(self._options.template, self._lm, self._source, num_new)
        return FormPrompts.fitted(Fitting(self._source, num_new), self._shots, question, passages)

    def _generate(self, lm: AsyncLM, prompts: EnsemblePrompts, question: str, passages: Sequence[Passage]) -> Generated:
        """A passage of weight 0 changes nothing and is not read."""
        weighing = [passage for passage in passages if passage.probability > 0]
        options = replace(self._generation, opening=prompts.opening(bool(weighing)))
        if not weighing:
            return lm.generate([prompts.closed(question)], options)[0]
        weights = [passage.probability for passage in weighing]
        mixture = Mixture([prompts.of(question, passage) for passage in weighing], weights)
        return lm.generate([mixture], options)[0]

    def _reply(self, question: str, generated: Generated, found: FoundEvidence, lm: str) -> Reply:
        return Reply(
            question,
            generated.text.strip() if self._options.template is None else generated.text,
            self._options.way if found.passages else CLOSED_BOOK,
            lm,
            self._options.searched,
            sum_logprob=generated.sum_logprob,
            passages=found.passages,
            failures=found.failures,
        )


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
        num_new = self._answering.max_new_tokens
        fitting, rerank_fitting = Fitting(self._source, num_new), Fitting(self._rerank_source, num_new)
        passages = rerank_fitting.cut(question, fitting.cut(question, found.passages))
        prompts = fitting.prompts(self._shots, question, passages)
        rerank_prompts = rerank_fitting.prompts(self._shots, question, passages)
        with self._opened() as (lm, rerank_lm):
            weights = self._weights(lm.identity, rerank_lm.identity)
            answerer = Answerer(lm, prompts, self._answering, rerank_lm, rerank_prompts, weights)
            searched = self._options.searched
            reply = Reply(question, "", self._options.way, lm.identity, searched, None, found.passages, found.failures)
            if passages:
                answered = answerer.answer(question, passages)
                return replace(
                    reply,
                    answer=answered.best(reply.way),
                    scores=best_first(answered.scores[reply.way]),
                    candidates=scored_candidates(answered.factors),
                )
            alone = answerer.submit_alone(question, None)()
            return replace(
                reply,
                answer=alone.answer,
                way=CLOSED_BOOK,
                sum_logprob=alone.logprobs.get(alone.answer),
                scores=best_first(alone.logprobs),
            )

    def _weights(self, lm: str, reranker: str) -> dict[str, Weights] | None:
        """Those that were fitted for this reranker with as many passages; None leaves the defaults."""
        if self._options.weights is None:
            return None
        way = self._options.way
        return {way: WeightsFile(self._options.weights, lm, reranker).read(f"{way}@{self._num_passages}")}

    @contextmanager
    def _opened(self) -> Iterator[tuple[AsyncLM, AsyncLM]]:
        with closing(self._source.open_here()) as lm:
            if self._rerank_source is self._source:
                yield lm, lm
                return
            with closing(self._rerank_source.open_here()) as rerank_lm:
                yield lm, rerank_lm


NUM_PASSAGES = 10  # where neither an option nor a policy says
FOLDER = Path("runs/ask")  # of what engines answered, where no index is searched


def reply_to(
    question: str, options: AskOptions, decoding: Decoding, config: AskConfig, followed: Followed | None
) -> Reply:
    """LMs are reached before anything is searched for, and read after it, unless a policy asks them first."""
    folder, k = options.index or FOLDER, _num_passages(options, config, followed)
    source = _source(config.lm, folder)
    if followed is not None:
        return Ensemble(source, config.lm, options, decoding).follow(question, k, config, followed)
    way: Ensemble | Reranking = Ensemble(source, config.lm, options, decoding)
    if options.reranks:
        other = _source(config.rerank_lm, folder, "rerank_") if has_rerank_lm(config) else source
        way = Reranking(source, other, options, decoding, k)
    found = find_evidence(question, k, options, config, folder)
    log.info(f"{len(found.passages)} passages from {options.searched}; the LM reads them")
    return way.answer(question, found)


def _num_passages(options: AskOptions, config: AskConfig, followed: Followed | None) -> int:
    if options.k is None:
        size = followed.policy.ensemble_size if followed else None
        return size or (NUM_PASSAGES if options.engine is None else min(NUM_PASSAGES, config.web.max_passages))
    if options.engine is not None and options.k > config.web.max_passages:
        raise UserError(f"--k is {options.k}, and web.max_passages={config.web.max_passages} are kept; raise that too")
    return options.k


def _source(lm: LMConfig, folder: Path, prefix: str = "") -> LMSource:
    """With its files named as those of a run."""
    files = RunDirectory(folder)
    budget_file, scores = (path.with_name(prefix + path.name) for path in (files.budget_file, files.scores))
    return lm_source(lm, budget_file, scores)
