"""From a question to the reply of `replug ask`: find evidence, fit prompts, answer by the ensemble or a reranker, show.

Evidence comes from an index with its own encoder, or from a search engine. Too long a prompt is cut as in an
evaluation: the earliest shots go, then the end of the evidence. Texts of others are shown as text, never as markup.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from replug.answering.answerer import FACTORS, PASSAGE, QUESTION_ALONE, Answerer, AnsweringOptions, Factors, best_answer
from replug.answering.prompts import LINE_ENDS, OWN_SHOTS, STOP, AnswerPrompts, FittingPrompts, Shot, read_shots
from replug.commands.ask import QUESTION, AskOptions, weighting_of
from replug.config.errors import UserError
from replug.config.evaluation_schema import AskConfig
from replug.config.methods import REPLUG
from replug.config.plain_text import plain_line, plain_text
from replug.config.rules import has_rerank_lm
from replug.config.schema import LMConfig
from replug.data.rows import one_line
from replug.evals.tables import Block, Table, print_blocks
from replug.index_workers.local_index import RunRetriever
from replug.models.black_box_lm import AsyncLM, Mixture
from replug.models.build import counting_template, limited_template, lm_source
from replug.models.ensemble import REPLUG_WEIGHTS
from replug.models.ensemble_temperature import own_temperature
from replug.models.generation import GenerationOptions
from replug.models.lm_source import LMSource
from replug.train.run_dir import RunDirectory
from replug.web import require_web
from replug.web.records import FoundEvidence, Passage, first_passages, passages_of_documents

log = logging.getLogger(__name__)

NUM_PASSAGES = 10  # by default
NEW_TOKENS, NEW_TOKENS_OF_TEMPLATE = 32, 64
FOLDER = Path("runs/ask")  # of engines' answers, if no index is searched
CLOSED_BOOK = "closed book"
TITLES = dict(zip(FACTORS, ("p(a|q,p)", "p(q|a,p)", "p(a|p)", "p(q|p)", "p(p|q)"), strict=True))

Reply = dict[str, Any]  # what --json prints: an answer and what it is from
Candidates = list[dict[str, Any]]


def reply_of(
    question: str,
    answer: str,
    method: str,
    lm: str,
    options: AskOptions,
    evidence: FoundEvidence,
    sum_logprob: float | None = None,
    weights: Sequence[float] = (),
    scores: Mapping[str, float] | None = None,
    candidates: Candidates | None = None,
) -> Reply:
    """Return a reply in JSON's own types; a logarithm of 0 is null.

    Weights of the passages begin as their `probability`; `weights` are those after the answer, where they move.
    `method` is replug, a reranker, or closed book. `sum_logprob` (nats) belongs to an answer of an ensemble or without
    evidence. `scores` has distinct answers with logarithms of any scale. `candidates` are rows of answer, passage
    (from 1), and the logarithm of each factor.
    """
    priors = [passage.probability for passage in evidence.passages]
    rows = [
        {"id": passage.doc_id}
        | {name: getattr(passage, name) for name in ("title", "url", "fetched", "rank", "text")}
        | {"similarity": passage.cosine, "weight": weight, "prior": passage.probability}
        for passage, weight in zip(evidence.passages, weights or priors, strict=True)
    ]
    best_first = sorted((scores or {}).items(), key=lambda item: -item[1])  # equal ones keep their order
    return {
        "question": question,
        "answer": answer,
        "method": method,
        "lm": lm,
        "searched": options.searched,
        "sum_logprob": sum_logprob,
        "failures": dict(evidence.failures),
        "scores": [{"answer": text, "score": _finite(score)} for text, score in best_first],
        "candidates": candidates or [],
        "evidence": rows,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


# Evidence ------------------------------------------------------------------------------------------------------------


def reply_to(question: str, options: AskOptions, config: AskConfig) -> Reply:
    """Answer a question. LMs are reached before the search, and read after it."""
    folder = options.index or FOLDER
    source = _source(config.lm, folder)
    reranker, most = source, config.web.max_passages if options.engine is not None else None
    k = min(NUM_PASSAGES, most or NUM_PASSAGES) if options.k is None else options.k
    if most is not None and k > most:
        raise UserError(f"--k is {k}, and web.max_passages={most} are kept; raise that too")
    if options.reranks and has_rerank_lm(config):
        reranker = _source(config.rerank_lm, folder, "rerank_")
    evidence = find_evidence(question, k, options, config, folder)
    log.info(f"the LM reads {len(evidence.passages)} passages from {options.searched}")
    if options.reranks:
        return _rerank(question, evidence, source, reranker, options)
    with closing(source.open_here()) as lm:
        return _answer_by_ensemble(lm, question, evidence, source, options, config)


def _source(lm: LMConfig, folder: Path, prefix: str = "") -> LMSource:
    """Return the LM with its files named as those of a run."""
    files = RunDirectory(folder)
    budget_file, scores = (path.with_name(prefix + path.name) for path in (files.budget_file, files.scores))
    return lm_source(lm, budget_file, scores)


def find_evidence(question: str, k: int, options: AskOptions, config: AskConfig, folder: Path) -> FoundEvidence:
    """Find the `k` passages nearest to the question, with weights that sum to 1. With k=0 none is searched for."""
    if not k:
        return FoundEvidence((), {})
    if options.index is not None:
        retriever = RunRetriever(options.index)
        [documents] = retriever.retrieve([question], k)
        given = config.ensemble.temperature
        temperature = own_temperature(retriever).value if given is None else float(given)
        return FoundEvidence(tuple(passages_of_documents(documents, temperature)), {})
    require_web("--engine")
    from replug.web.evidence import evidence_finder

    with closing(evidence_finder(config.web, folder / "snapshot")) as finder:
        evidence = finder.find(question)
    return replace(evidence, passages=tuple(first_passages(evidence.passages, k)))


# Prompts that fit ----------------------------------------------------------------------------------------------------


def fit_passages(source: LMSource, question: str, passages: Sequence[Passage], max_new_tokens: int) -> list[Passage]:
    """Cut evidence to what a prompt without shots holds. Raises UnscorableText for a question that fits no prompt."""
    counting, bare = counting_template(source), AnswerPrompts(())
    fitted = []
    for passage in passages:
        text, num_after = one_line(passage.text), max_new_tokens + LINE_ENDS
        kept = counting.fit_document(text, lambda text: bare.ask(question, text or ""), num_after, name=repr(question))
        fitted.append(replace(passage, text=kept or ""))
    if counting.num_truncated:
        log.warning(f"{counting.num_truncated} of {len(passages)} passages were cut at their end to fit the LM")
    return fitted


def prompts_that_fit(
    source: LMSource, shots: Sequence[Shot], question: str, passages: Sequence[Passage], max_new_tokens: int
) -> AnswerPrompts:
    """Return prompts with as many shots as fit the longest one."""
    fitting = FittingPrompts(AnswerPrompts(shots), counting_template(source), max_new_tokens)
    fitted = fitting.of(question, [None, *(passage.text for passage in passages)])
    if len(fitted.shots) < len(shots):
        log.info(f"the prompts have room for {len(fitted.shots)} of {len(shots)} shots")
    return fitted


def _shots(options: AskOptions) -> Sequence[Shot]:
    return read_shots(options.shots or OWN_SHOTS)


def ensemble_prompts(
    question: str,
    passages: Sequence[Passage],
    source: LMSource,
    options: AskOptions,
    lm: LMConfig,
    num_new: int,
) -> tuple[list[str], str]:
    """Return a prompt for each passage, or the one prompt without evidence, and the opening they share.

    With a template each document stands before it, as REPLUG puts them (section 3.2).
    """
    if options.template is None:
        passages = fit_passages(source, question, passages, num_new)
    texts: Sequence[str | None] = [passage.text for passage in passages] or [None]
    if options.template is None:
        prompts = prompts_that_fit(source, _shots(options), question, passages, num_new)
        return [prompts.ask(question, text) for text in texts], prompts.opening(has_evidence=bool(passages))
    if source.max_tokens is not None and source.max_tokens <= num_new:
        raise UserError(f"--max-new-tokens is {num_new}; the LM holds {source.max_tokens} tokens in all")
    joining = limited_template(lm, source, None if source.max_tokens is None else source.max_tokens - num_new)
    context = options.template.replace(QUESTION, question)
    return [joining.prefix(text, context, "") for text in texts], ""


# REPLUG's ensemble ---------------------------------------------------------------------------------------------------


def generation_options(options: AskOptions) -> GenerationOptions:
    """Return how the ensemble decodes: greedily; answers to shots end with their line."""
    is_template = options.template is not None
    return GenerationOptions(
        options.max_new_tokens or (NEW_TOKENS_OF_TEMPLATE if is_template else NEW_TOKENS),
        options.stop or (None if is_template else STOP),
    )


def _answer_by_ensemble(
    lm: AsyncLM,
    question: str,
    evidence: FoundEvidence,
    source: LMSource,
    options: AskOptions,
    config: AskConfig,
) -> Reply:
    """Choose each token for all passages at once; without passages the LM answers alone."""
    weighing = [passage for passage in evidence.passages if passage.probability > 0]  # others change nothing
    decoding = generation_options(options)
    prompts, opening = ensemble_prompts(question, weighing, source, options, config.lm, decoding.max_new_tokens)
    weighting = weighting_of(config) if weighing else REPLUG_WEIGHTS
    mixture = Mixture(prompts, [passage.probability for passage in weighing] or [1.0], weighting)
    generated = mixture.answer(mixture.submit(lm, replace(decoding, opening=opening)).result())
    after = iter(generated.weights.tolist())
    weights = [next(after) if passage.probability > 0 else 0.0 for passage in evidence.passages]
    answer = generated.text if options.template is not None else generated.text.strip()
    method = REPLUG if evidence.passages else CLOSED_BOOK
    return reply_of(question, answer, method, lm.identity, options, evidence, generated.sum_logprob, weights)


# Rerankers -----------------------------------------------------------------------------------------------------------


def _rerank(
    question: str, evidence: FoundEvidence, source: LMSource, rerank_source: LMSource, options: AskOptions
) -> Reply:
    """Return the best candidate of those sampled from each passage; without passages the likeliest sample."""
    method, shots = options.method, _shots(options)
    answering = AnsweringOptions(rerankers=(method,))  # as in the paper
    if options.max_new_tokens is not None:
        answering = replace(answering, max_new_tokens=options.max_new_tokens)
    num_new = answering.max_new_tokens
    passages = fit_passages(source, question, evidence.passages, num_new)
    passages = fit_passages(rerank_source, question, passages, num_new)
    prompts, rerank_prompts = (
        prompts_that_fit(one, shots, question, passages, num_new) for one in (source, rerank_source)
    )
    with ExitStack() as opened:
        lm = opened.enter_context(closing(source.open_here()))
        rerank_lm = lm if rerank_source is source else opened.enter_context(closing(rerank_source.open_here()))
        answerer = Answerer(lm, prompts, answering, rerank_lm, rerank_prompts)
        if passages:
            answered = answerer.answer(question, passages)
            candidates, scores = scored_candidates(answered.factors), answered.scores[method]
            best = answered.best(method)
            return reply_of(
                question, best, method, lm.identity, options, evidence, scores=scores, candidates=candidates
            )
        logprobs = answerer.submit_alone(question, None)()
        best = best_answer(logprobs)
        return reply_of(
            question, best, CLOSED_BOOK, lm.identity, options, evidence, logprobs.get(best), scores=logprobs
        )


def scored_candidates(factors: Factors) -> Candidates:
    """Return each candidate with its factors and those of its passage, numbered from 1."""
    by_name = {name: getattr(factors, name) for name in TITLES}
    return [
        {
            "answer": answer,
            "passage": passage + 1,
            "factors": {
                name: _finite(float(values[passage if name in (QUESTION_ALONE, PASSAGE) else row]))
                for name, values in by_name.items()
            },
        }
        for row, (answer, passage) in enumerate(zip(factors.answers, factors.passages.tolist(), strict=True))
    ]


# Showing -------------------------------------------------------------------------------------------------------------

SHOWN_CHARACTERS, SHOWN_CANDIDATES = 160, 10  # --json has everything


def print_reply(reply: Reply) -> None:
    """Print the answer, how it came about, its evidence and its candidates."""
    console = Console(highlight=False)
    console.print(Text(plain_text(reply["answer"]), "bold") if reply["answer"] else Text("no answer", "red"))
    logprob = "" if reply["sum_logprob"] is None else f"; log p {reply['sum_logprob']:.2f}"
    lines = [f"{reply['method']}; {reply['lm']}; {reply['searched']}{logprob}"]
    if not reply["evidence"]:
        lines.append("no evidence: the LM answers alone")
    if reply["failures"]:
        lines.append("missing: " + ", ".join(f"{name} {count}" for name, count in reply["failures"].items()))
    for line in lines:
        console.print(Text(plain_line(line), "dim"), soft_wrap=True)
    if reply["evidence"]:
        rows = []
        for place, one in enumerate(reply["evidence"], start=1):
            text = one["text"] if len(one["text"]) <= SHOWN_CHARACTERS else f"{one['text'][:SHOWN_CHARACTERS]}…"
            shown = " · ".join(filter(None, (one["title"], one["url"], text)))
            rows.append([str(place), f"{one['weight']:.1%}", f"{one['prior']:.1%}", shown, one["fetched"] or ""])
        print_blocks([Table(["", "weight", "before", "Evidence", "date"], rows)], console.width)
    if reply["scores"]:
        print_blocks(_candidates(reply), console.width)


def _candidates(reply: Reply) -> list[Block]:
    """Show the best answers with the factors of each candidate's passages, numbered from 1."""
    rows = []
    for one in reply["scores"][:SHOWN_CANDIDATES]:
        own = [candidate for candidate in reply["candidates"] if candidate["answer"] == one["answer"]]
        places = ", ".join(str(candidate["passage"]) for candidate in own)
        factors = (", ".join(_number(candidate["factors"][name]) for candidate in own) for name in TITLES)
        rows.append([_number(one["score"]), one["answer"], *([places, *factors] if own else [])])
    heads = ["from", *TITLES.values()] if reply["candidates"] else []
    table = Table(["score", "Candidates", *heads], rows)
    return [table, "Natural logarithms; a: answer, q: question, p: passage. --json has all candidates."]


def _number(value: float | None) -> str:
    """Return a logarithm; that of 0 is a dash."""
    return "–" if value is None else f"{value:.2f}"
