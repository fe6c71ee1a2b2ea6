"""Answer a question for `replug ask`: find evidence, fit prompts, answer by the ensemble, show.

Evidence comes from an index with its own encoder, or from a search engine. A long prompt is cut as in an evaluation:
the earliest shots go first, then the end of the evidence. Texts of others are printed as plain text, never as markup.
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from replug.answering.prompts import LINE_ENDS, OWN_SHOTS, STOP, AnswerPrompts, FittingPrompts, read_shots
from replug.commands.ask import weighting_of
from replug.config.errors import UserError
from replug.config.evaluation_schema import AskConfig
from replug.config.plain_text import plain_line, plain_text
from replug.config.schema import LMConfig
from replug.data.rows import one_line, question_prompt
from replug.evals.tables import Table, print_blocks
from replug.index_workers.local_index import RunRetriever
from replug.models.black_box_lm import Mixture
from replug.models.build import counting_template, limited_template, lm_source
from replug.models.ensemble import REPLUG_WEIGHTS
from replug.models.ensemble_temperature import own_temperature
from replug.models.generation import GenerationOptions
from replug.models.lm_source import LMSource
from replug.train.run_dir import RunDirectory
from replug.web import require_web
from replug.web.passages import MAX_PASSAGES, FoundEvidence, Passage, first_passages, passages_of_documents

log = logging.getLogger(__name__)

FOLDER = Path("runs/ask")  # of engines' answers, if no index is searched
Reply = dict[str, Any]  # printed by --json: the answer and its evidence


def reply_to(question: str, config: AskConfig, index: Path | None, k: int, max_new_tokens: int) -> Reply:
    """Answer a question: each token is chosen for all passages at once; without passages the LM answers alone.

    A server is contacted before the search; local weights are loaded after it. A passage's weight is `prior` before the
    answer and `weight` after it. `sum_logprob` is in nats.
    """
    folder = index or FOLDER
    if index is None and k > MAX_PASSAGES:
        raise UserError(f"--k is {k}, but {MAX_PASSAGES} passages are kept; expected at most as many")
    files, searched = RunDirectory(folder), f"index {index}" if index else config.web.engine
    source = lm_source(config.lm, files.budget_file, files.scores)
    evidence = find_evidence(question, k, index, config, folder)
    log.info(f"the LM reads {len(evidence.passages)} passages from {searched}")
    weighing = [passage for passage in evidence.passages if passage.probability > 0]  # others change nothing
    prompts, opening = ensemble_prompts(question, weighing, source, config.lm, max_new_tokens)
    decoding = GenerationOptions(max_new_tokens, None if config.lm.chat else STOP, opening=opening)
    weighting = weighting_of(config) if weighing else REPLUG_WEIGHTS
    mixture = Mixture(prompts, [passage.probability for passage in weighing] or [1.0], weighting)
    with closing(source.open_here()) as lm:
        generated = mixture.answer(mixture.submit(lm, decoding).result())
    after = iter(generated.weights.tolist())
    rows = [
        {"id": passage.doc_id}
        | {name: getattr(passage, name) for name in ("title", "url", "fetched", "rank", "text")}
        | {"similarity": passage.cosine, "prior": passage.probability}
        | {"weight": next(after) if passage.probability > 0 else 0.0}
        for passage in evidence.passages
    ]
    return {
        "question": question,
        "answer": generated.text.strip(),
        "lm": lm.identity,
        "searched": searched,
        "sum_logprob": generated.sum_logprob,
        "failures": dict(evidence.failures),
        "evidence": rows,
    }


def find_evidence(question: str, k: int, index: Path | None, config: AskConfig, folder: Path) -> FoundEvidence:
    """Find the `k` passages nearest to the question, with weights that sum to 1. k=0 searches nothing."""
    if not k:
        return FoundEvidence((), {})
    if index is not None:
        retriever = RunRetriever(index)
        [documents] = retriever.retrieve([question], k)
        given = config.ensemble.temperature
        temperature = own_temperature(retriever).value if given is None else float(given)
        return FoundEvidence(tuple(passages_of_documents(documents, temperature)), {})
    require_web("--engine")
    from replug.web.evidence import EvidenceFinder

    with closing(EvidenceFinder(config.web, folder / "snapshot")) as finder:
        evidence = finder.find(question)
    return replace(evidence, passages=tuple(first_passages(evidence.passages, k)))


# Prompts that fit ----------------------------------------------------------------------------------------------------


def ensemble_prompts(
    question: str, passages: Sequence[Passage], source: LMSource, lm: LMConfig, num_new: int
) -> tuple[list[str], str]:
    """Return a prompt for each passage, or the one prompt without evidence, and their common opening.

    With `lm.chat` or `lm.prompt` each document stands before the question, as REPLUG puts them (section 3.2). Raises
    UnscorableText if the question alone does not fit.
    """
    texts: list[str | None] = [passage.text for passage in passages] or [None]
    if lm.chat or lm.prompt is not None:
        if source.max_tokens is not None and source.max_tokens <= num_new:
            raise UserError(f"--max-new-tokens is {num_new}; the LM holds {source.max_tokens} tokens in all")
        joining = limited_template(lm, source, None if source.max_tokens is None else source.max_tokens - num_new)
        return [joining.prefix(text, question_prompt(question), "") for text in texts], ""
    counting, bare = counting_template(source), AnswerPrompts(())

    def prompt(text: str | None) -> str:
        return bare.ask(question, text or "")

    for number, passage in enumerate(passages):
        text = one_line(passage.text)
        texts[number] = counting.fit_document(text, prompt, num_new + LINE_ENDS, name=repr(question)) or ""
    if counting.num_truncated:
        log.warning(f"{counting.num_truncated} of {len(passages)} passages were cut at their end to fit the LM")
    prompts = FittingPrompts(AnswerPrompts(read_shots(OWN_SHOTS)), counting, num_new).of(question, texts)
    return [prompts.ask(question, text) for text in texts], prompts.opening(has_evidence=bool(passages))


# Showing -------------------------------------------------------------------------------------------------------------

SHOWN_CHARACTERS = 160  # of a passage; --json has everything


def print_reply(reply: Reply) -> None:
    """Print the answer, its LM and source, and its evidence."""
    console = Console(highlight=False)
    console.print(Text(plain_text(reply["answer"]), "bold") if reply["answer"] else Text("no answer", "red"))
    lines = [f"{reply['lm']}; {reply['searched']}; log p {reply['sum_logprob']:.2f}"]
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
