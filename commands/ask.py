"""`replug generate`: an answer from the documents of a run's or an index's retriever, in this process, without Ray."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Command, Group, Overrides
from replug.configs.errors import UserError
from replug.configs.load import load_config, load_score_config
from replug.configs.schema import LMConfig

if TYPE_CHECKING:
    from replug.models.generation import Generated, GenerationOptions
    from replug.models.lm_source import LMSource
    from replug.models.policy import Policy, Subject
    from replug.models.prompt import PromptTemplate
    from replug.models.replug_lm import Decision, ReplugLM

SHOWN_CHARACTERS = 120
DOCUMENTS = 10  # of the ensemble, where neither an option nor a policy says


@dataclass(frozen=True, slots=True)
class Followed:
    """A policy, and what the prompt asks about."""

    policy: "Policy"
    subject: "Subject"


def generate(
    prompt: Annotated[str, typer.Argument(help="What is to be continued.")],
    overrides: Overrides = None,
    index: Annotated[Path, typer.Option(help="A run directory or an index directory.")] = Path("runs/quickstart"),
    k: Annotated[
        int | None, typer.Option(help="Documents in the ensemble; 0 asks the LM alone. [default: 10]", min=0)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer in tokens.", min=1)] = 64,
    stop: Annotated[str | None, typer.Option(help="The answer ends before this text; \\n is a newline.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token at each step.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this mass.", min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling.", min=0)] = 0,
    policy: Annotated[
        Path | None, typer.Option(help="Decides whether documents are used; `replug adapt fit` writes it.")
    ] = None,
    relation: Annotated[str | None, typer.Option(help="What is asked about the subject, for the policy.")] = None,
    popularity: Annotated[
        float | None, typer.Option(help="Of the subject, for the policy: page views, or documents that name it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Continue a prompt with the LM and what the retriever finds for it: one token is chosen for all documents.

    The LM is that of the run, or lm.path=DIR. A server's answers, one from each document, are weighed as wholes.

    replug generate "The Python keyword yield" --k 10 --index runs/quickstart

    replug generate "Q: What is the capital of Peru? A:" --policy policy.json --relation capital --popularity 61000
    """
    from replug.models.generation import GenerationOptions
    from replug.models.policy import Subject

    end = None if stop is None else stop.replace("\\n", "\n")
    options = GenerationOptions(max_new_tokens, end, temperature, top_p, seed)
    followed = policy_of(policy, Subject(relation, popularity))
    run_generate(prompt, index, k, options, overrides or [], as_json, followed)


def policy_of(path: Path | None, subject: "Subject") -> Followed | None:
    """The policy of a file, and what the prompt asks about; raises UserError for what the policy has no use for."""
    from replug.models.policy import KnownFrom, load_policy

    if path is None:
        for option, value in (("--relation", subject.relation), ("--popularity", subject.popularity)):
            if value is not None:
                raise UserError(f"{option} is for a policy; expected --policy too")
        return None
    policy = load_policy(path)
    if subject.popularity is None and policy.decides_by.known_from is KnownFrom.question:
        raise UserError(f"--popularity is missing: the policy decides by {policy.signal} ({policy.decides_by.title})")
    if subject.popularity is not None and policy.decides_by.known_from is not KnownFrom.question:
        raise UserError(f"--popularity: the policy decides by {policy.signal}; leave it out")
    return Followed(policy, subject)


def run_generate(
    prompt: str,
    directory: Path,
    k: int | None,
    options: "GenerationOptions",
    overrides: list[str],
    as_json: bool,
    followed: Followed | None = None,
) -> None:
    """Print the answer, then the documents that it is from, with their weights."""
    from replug.index_workers.local_index import IndexRetriever, LocalIndex
    from replug.index_workers.version_store import index_folder
    from replug.models.build import lm_source
    from replug.models.ensemble import document_weights
    from replug.models.hardware import available_cores
    from replug.models.replug_lm import ReplugLM
    from replug.train.run_dir import RunDirectory

    lm_config = lm_of(directory, overrides)
    retriever = IndexRetriever(LocalIndex(index_folder(directory), available_cores()))
    run = RunDirectory(directory)
    source = lm_source(lm_config, run.budget_file, run.scores)
    if k is None:
        k = (followed.policy.ensemble_size if followed else None) or DOCUMENTS
    with closing(source.open_here()) as lm:
        template = _template(lm_config, source, options.max_new_tokens)
        replug = ReplugLM(lm, retriever, k, template, followed.policy if followed else None)
        decision = _decide(replug, prompt, options, followed)
        [answer] = replug.follow([prompt], options, [decision])
    similarities = [found.similarity for found in decision.documents]
    weights = document_weights(similarities).tolist() if similarities else []
    (_print_json if as_json else _print)(prompt, answer, decision, weights, followed)


def _decide(replug: "ReplugLM", prompt: str, options: "GenerationOptions", followed: Followed | None) -> "Decision":
    """By the policy; without one, what is found."""
    from replug.models.replug_lm import Decision

    if followed is not None:
        return replug.decide([prompt], options, [followed.subject])[0]
    return Decision(True, None, replug.retrieve([prompt])[0])


def lm_of(directory: Path, overrides: list[str]) -> LMConfig:
    """The LM of the overrides, else of the run that the directory is of."""
    if any(override.startswith(("lm.path=", "lm.url=")) for override in overrides):
        return load_score_config(overrides).lm
    if not (directory / "config.yaml").is_file():
        raise UserError(f"lm.path is missing, and {directory} is no run directory that names one; give lm.path=DIR")
    return load_config(directory / "config.yaml", overrides).lm


def _template(lm: LMConfig, source: "LMSource", max_new_tokens: int) -> "PromptTemplate":
    """Cuts documents so that the answer finds room, where the LM's limit and its tokenizer are known."""
    from replug.models.prompt import PromptTemplate

    if source.max_tokens is None or (tokenizer := source.tokenizer()) is None:
        return PromptTemplate(lm.separator)
    if source.max_tokens <= max_new_tokens:
        raise UserError(f"--max-new-tokens is {max_new_tokens}; the LM holds {source.max_tokens} tokens in all")
    return PromptTemplate(lm.separator, tokenizer, source.max_tokens - max_new_tokens)


def _print(
    prompt: str, answer: "Generated", decision: "Decision", weights: Sequence[float], followed: Followed | None
) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    console.print(f"[dim]{escape(prompt)}[/dim]{escape(answer.text)}", highlight=False)
    if followed is not None:
        reason = followed.policy.reason(decision.value, followed.subject.relation)
        console.print(f"[dim]{escape(reason)}[/dim]", highlight=False, soft_wrap=True)
    for found, weight in zip(decision.documents, weights, strict=True):
        text = " ".join(found.text.split())
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
        console.print(f"{weight:6.1%}  {escape(found.id)}  [dim]{escape(shown)}[/dim]", highlight=False, soft_wrap=True)


def _print_json(
    prompt: str, answer: "Generated", decision: "Decision", weights: Sequence[float], followed: Followed | None
) -> None:
    found = [
        {**asdict(document), "weight": weight} for document, weight in zip(decision.documents, weights, strict=True)
    ]
    row = {"prompt": prompt, "answer": answer.text, "sum_logprob": answer.sum_logprob, "documents": found}
    if followed is not None:
        threshold = followed.policy.threshold(followed.subject.relation)
        of_policy = {"signal": followed.policy.signal, "value": decision.value, "threshold": threshold}
        row["policy"] = {**of_policy, "retrieves": decision.retrieves}
    print(json.dumps(row, ensure_ascii=False))


COMMAND = Command(generate, Group.use, place=2)
