"""`replug serve`: serve a tuned retriever and its LM over HTTP to OpenAI's clients, in this process and without Ray."""

from pathlib import Path
from typing import Annotated

import typer

from replug.commands.ask import config_of, weighting_of
from replug.commands.command import Overrides
from replug.config.errors import UserError, require_extra

# Keys of an LM that matter only to Ray or a cache, or are set by the server.
UNUSED_LM_KEYS = ("cache", "too_long")


def serve(
    directory: Annotated[Path, typer.Argument(help="Run or index directory to serve.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Other than loopback needs $REPLUG_SERVE_TOKEN.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port. 0: any free port.", min=0, max=65535)] = 8080,
    k: Annotated[
        int, typer.Option("--k", "-k", help="Number of documents per answer. 0: the LM answers alone.", min=0)
    ] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens per answer.", min=1)] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens of prompt, document and answer together.", min=2)
    ] = 4096,
    max_batch: Annotated[int, typer.Option(help="Number of answers decoded in one batch.", min=1)] = 16,
    timeout: Annotated[float, typer.Option(help="Time limit per request, in seconds.", min=0.1, max=86400)] = 300.0,
) -> None:
    """Serve embeddings, search and answers over an OpenAI-compatible HTTP API.

    The run's LM answers, or the LM of lm.path=DIR, or a server (lm.url=URL lm.model=NAME).

    replug serve runs/quickstart

    replug serve runs/quickstart --port 9000 --k 5 lm.path=DIR
    """
    require_extra("serve", "fastapi", "uvicorn", what="replug serve")
    from replug.serving import app as serving
    from replug.serving.access import token_for
    from replug.serving.openai_api import MAX_DOCUMENTS, ServingLimits

    limits = ServingLimits(max_prompt_tokens, max_new_tokens, max_batch, timeout)
    if k > MAX_DOCUMENTS:
        raise UserError(f"--k is {k}; expected at most {MAX_DOCUMENTS}")
    token = token_for(host)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a folder; expected a run directory or index (`replug prepare --index`)")
    for name in (override.partition("=")[0] for override in overrides or []):
        if not name.startswith(("lm.", "ensemble.")) or name.removeprefix("lm.") in UNUSED_LM_KEYS:
            unused = " and ".join(UNUSED_LM_KEYS)
            raise UserError(f"{name} has no effect here; expected keys of ensemble, or of lm except {unused}")
    config = config_of(directory, overrides or [])
    from replug.index_workers.build_plan import index_folder, missing_index, version_numbers
    from replug.models.build import lm_source
    from replug.serving.service import load_service
    from replug.train.run_dir import RunDirectory

    if not version_numbers(index_folder(directory)):
        raise missing_index(index_folder(directory))
    files, lm, temperature = RunDirectory(directory), config.lm, config.ensemble.temperature
    source = lm_source(lm, files.budget_file, files.scores)
    own = None if temperature is None else float(temperature)
    with serving.listen(host, port) as listener:
        service = load_service(directory, source, lm, k, limits, own, weighting_of(config))
        serving.run_server(serving.create_app(service, token), listener, service)
