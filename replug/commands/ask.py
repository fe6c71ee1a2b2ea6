"""`replug ask`: an answer with its evidence, from an index or a search engine, in this process and without Ray."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.asking.options import LOCAL, QUICKSTART, AskOptions, Decoding, checked
from replug.commands.command import Command, Group, Overrides
from replug.config.errors import UserError
from replug.config.evaluation_schema import AskConfig
from replug.config.load import load_ask_config, names_lm
from replug.config.methods import REPLUG
from replug.config.plain_text import plain_json
from replug.data.folder import require_checksums

if TYPE_CHECKING:
    from replug.commands.asking.reply import Reply

CONFIG = "config.yaml"  # of a run directory


def ask(
    question: Annotated[str, typer.Argument(help="What is asked, or continued by a --template.")],
    overrides: Overrides = None,
    index: Annotated[
        Path | None, typer.Option(help="A run directory or an index directory. [default: runs/quickstart]")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="A search engine: local, searxng, brave, google or ddgs; keys are under web.")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="JSONL of id and text, which --engine local searches by BM25.")
    ] = None,
    rerank: Annotated[
        str, typer.Option(help="replug: one token for all passages; or direct, rag, rag_full, noisy_channel, poe.")
    ] = REPLUG,
    retriever: Annotated[
        str | None, typer.Option(help="An encoder, such as RUN_DIR/retriever, that re-ranks an engine's passages.")
    ] = None,
    k: Annotated[
        int | None, typer.Option(help="Passages that are used; 0 asks the LM alone. [default: 10]", min=0)
    ] = None,
    shots: Annotated[Path | None, typer.Option(help="JSONL of question, answer and evidence. [default: ours]")] = None,
    template: Annotated[
        str | None, typer.Option(help="The prompt instead of shots, such as '{question}': documents stand before it.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Length of an answer in tokens. [default: 32; with --template 64]", min=1)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="The answer ends before this text; several may be given. \\n is a newline, and the default."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token. [default: 0; candidates 1]", min=0)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this mass. [default: 1; candidates 0.8]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.", min=0)] = 0,
    weights: Annotated[
        Path | None, typer.Option(help="Of --rerank's factors: the weights.json of an evaluation. [default: all 1]")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Decides whether documents are used; `replug report --policies` writes it.")
    ] = None,
    relation: Annotated[str | None, typer.Option(help="What is asked about the subject, for the policy.")] = None,
    popularity: Annotated[
        float | None, typer.Option(help="Of the subject, for the policy: page views, or documents that name it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the answer and all it is from.")] = None,
) -> None:
    """Answer a question from the documents of an index, or from what a search engine finds.

    The LM is that of the run, or lm.path=DIR. rerank_lm.path=DIR is another one, which reranks.

    replug ask "what does the keyword yield do in python" --index runs/quickstart

    replug ask "who wrote the art of war" --engine searxng web.url=http://127.0.0.1:8888 --rerank poe lm.path=DIR

    replug ask "The Python keyword yield" --template "{question}" --index runs/quickstart
    """
    typed = AskOptions(index, corpus, engine, retriever, rerank, k, template, shots, policy, weights)
    stops = tuple(one.replace("\\n", "\n") for one in stop or ())
    decoding = Decoding(max_new_tokens, stops, temperature, top_p, seed)
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise UserError(f"--html: {html} cannot be written; expected a file in a folder that exists")
    options, config = read(typed, decoding, overrides or [])
    from replug.commands.asking.options import policy_of
    from replug.models.policy import Subject

    followed = policy_of(options.policy, Subject(relation, popularity))
    from replug.commands.asking.ways import reply_to  # after a mistake could be told

    show(reply_to(question, options, decoding, config, followed), as_json, html)


def read(typed: AskOptions, decoding: Decoding, overrides: list[str]) -> tuple[AskOptions, AskConfig]:
    """What is meant, checked, with the configuration of it. Nothing heavy is imported."""
    by_default = typed.index is None and typed.engine is None and QUICKSTART.is_dir()
    options = replace(typed, index=QUICKSTART) if by_default else typed
    checked(options, decoding, overrides)
    chosen = [f"web.engine={options.engine or LOCAL}"]
    if options.retriever is not None:
        chosen.append(f"retriever.path={options.retriever}")
    return options, config_of(options.index, [*overrides, *chosen])


def config_of(directory: Path | None, overrides: list[str]) -> AskConfig:
    """By the overrides, with the LM of the run that the directory is of where they name none."""
    if directory is None or names_lm(overrides) or not (directory / CONFIG).is_file():
        return load_ask_config(overrides)
    require_checksums(directory, "bring it back, or give lm.path=DIR", [CONFIG])
    return load_ask_config(overrides, directory / CONFIG)


def show(reply: "Reply", as_json: bool, html: Path | None) -> None:
    """On standard output, as a table or as JSON; the page goes to its file."""
    from replug.commands.asking.reply import print_reply, write_page

    if html is not None:
        write_page(html, reply)
    if as_json:
        print(plain_json(reply.as_json()))
    else:
        print_reply(reply)


COMMAND = Command(ask, Group.use, place=2)
