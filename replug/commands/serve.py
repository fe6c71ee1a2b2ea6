"""`replug serve`: a tuned retriever and its LM behind HTTP, for OpenAI's clients; in this process and without Ray."""

from pathlib import Path
from typing import Annotated

import typer

from replug.commands.ask import config_of
from replug.commands.command import Command, Group, Overrides
from replug.config.errors import UserError, require_extra

# Keys of an LM that are of Ray, of a cache, or of what the server does in its own way.
NOT_HERE = ("num_replicas", "cache", "too_long")


def serve(
    directory: Annotated[Path, typer.Argument(help="A run directory or an index directory.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback $REPLUG_SERVE_TOKEN is needed.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8080,
    k: Annotated[int, typer.Option("--k", "-k", help="Documents of an answer; 0 asks the LM alone.", min=0)] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.", min=1)] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Of a prompt with a document and the answer; at most what the LM holds.", min=2)
    ] = 4096,
    max_texts: Annotated[int, typer.Option(help="Texts of one request.", min=1)] = 256,
    max_documents: Annotated[int, typer.Option(help="Documents of one request.", min=1)] = 100,
    max_body_bytes: Annotated[int, typer.Option(help="Bytes of one request.", min=1)] = 1_000_000,
    max_concurrency: Annotated[int, typer.Option(help="Requests at once; others are told to come again.", min=1)] = 64,
    max_batch: Annotated[int, typer.Option(help="Answers that are decoded together.", min=1)] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.", min=0.1, max=86400)] = 300.0,
) -> None:
    """Serve embeddings, searches and answers from documents to any OpenAI client.

    The LM is that of the run, or lm.path=DIR, or a server by lm.url=URL and lm.model=NAME.

    replug serve runs/quickstart

    replug serve runs/quickstart --port 9000 --k 5 lm.path=DIR
    """
    require_extra("serve", "fastapi", "uvicorn", "prometheus_client", what="replug serve")
    from replug.serving.requests import ServingLimits

    limits = ServingLimits(
        *(max_body_bytes, max_texts, max_documents, max_prompt_tokens, max_new_tokens),
        *(max_concurrency, max_batch, timeout),
    )
    if k > max_documents:
        raise UserError(f"--k is {k}, and --max-documents={max_documents} are the most of a request; raise that too")
    from replug.serving.guard import token_for

    token = token_for(host)
    _require_known(directory, overrides or [])
    config = config_of(directory, overrides or [])
    from replug.index_workers.build_plan import index_folder  # after a mistake could be told
    from replug.models.build import lm_source
    from replug.serving import run as serving
    from replug.serving.index_holder import state_of
    from replug.train.run_dir import RunDirectory

    state_of(index_folder(directory))
    files, lm, temperature = RunDirectory(directory), config.lm, config.ensemble.temperature
    source = lm_source(lm, files.budget_file, files.scores)
    spread = (lm.gpus_per_replica or 0) > 1
    own = None if temperature is None else float(temperature)
    serving.serve(serving.Served(directory, source, lm.separator, k, own, spread), host, port, token, limits)


def _require_known(directory: Path, overrides: list[str]) -> None:
    if not directory.is_dir():
        raise UserError(f"{directory} is no folder; expected a run directory or what `replug prepare --index` wrote")
    for override in overrides:
        name = override.partition("=")[0]
        if not name.startswith("lm.") and name != "ensemble.temperature":
            raise UserError(f"{name} plays no part here; expected keys of lm, or ensemble.temperature")
        if name.removeprefix("lm.") in NOT_HERE:
            raise UserError(
                f"{name} plays no part here: the LM is in this process, its answers are not kept, and a document that "
                "is too long is cut, which the answer says; leave it out"
            )


COMMAND = Command(serve, Group.use, place=5)
