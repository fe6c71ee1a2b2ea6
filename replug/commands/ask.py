"""`replug ask`: answer a question from an index or a search engine, in this process and without Ray.

The options are checked here, before anything heavy is imported; `ask_reply` answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Overrides
from replug.config.choices import EnsembleWeights
from replug.config.errors import UserError
from replug.config.evaluation_schema import AskConfig
from replug.config.load import load_ask_config, names_lm
from replug.config.methods import WEB_ENGINES
from replug.config.plain_text import plain_json
from replug.data.folder import require_checksums

if TYPE_CHECKING:  # brings numpy
    from replug.models.ensemble import Weighting

CONFIG = "config.yaml"  # of a run directory
QUICKSTART = Path("runs/quickstart")  # searched by default


def ask(
    question: Annotated[str, typer.Argument(help="Question.")],
    overrides: Overrides = None,
    index: Annotated[
        Path | None,
        typer.Option(help="Run or index to search. Default: runs/quickstart."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Search engine: searxng or brave.")] = None,
    k: Annotated[int, typer.Option(help="Number of passages. 0: the LM answers alone.", min=0)] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of generated tokens.", min=1)] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer a question from the documents of an index or the results of a search engine.

    The run's LM answers, or the LM of lm.path=DIR.

    replug ask "what does the keyword yield do in python" --index runs/quickstart

    replug ask "who wrote the art of war" --engine searxng web.url=http://127.0.0.1:8888 lm.path=DIR
    """
    if index is None and engine is None and QUICKSTART.is_dir():
        index = QUICKSTART
    for problem in _problems(index, engine, k, overrides or []):
        raise UserError(problem)
    config = config_of(index, [*(overrides or []), f"web.engine={engine or 'local'}"])
    from replug.commands.ask_reply import print_reply, reply_to

    reply = reply_to(question, config, index, k, max_new_tokens)
    if as_json:
        print(plain_json(reply))
    else:
        print_reply(reply)


def config_of(directory: Path | None, overrides: list[str]) -> AskConfig:
    """Load the configuration of the overrides, with the LM of the directory's run unless they name one."""
    if directory is None or names_lm(overrides) or not (directory / CONFIG).is_file():
        return load_ask_config(overrides)
    require_checksums(directory, "bring it back, or give lm.path=DIR", [CONFIG])
    return load_ask_config(overrides, directory / CONFIG)


def weighting_of(config: AskConfig) -> "Weighting":
    """Return the configured weighting: posterior, by similarity, or by vote."""
    from replug.models.build import posterior_weighting
    from replug.models.ensemble import REPLUG_WEIGHTS

    if config.ensemble.weights == EnsembleWeights.posterior:
        return posterior_weighting(config.ensemble, config.lm, is_asked=True)
    return replace(REPLUG_WEIGHTS, votes=config.ensemble.weights == EnsembleWeights.vote)


def _problems(index: Path | None, engine: str | None, k: int, overrides: Sequence[str]) -> Iterator[str]:
    """Yield errors for missing or conflicting sources, keys without effect, and web.engine, which has an option."""
    if engine not in (None, *WEB_ENGINES):
        yield f"--engine is {engine}; expected one of {', '.join(WEB_ENGINES)}"
    if index is not None and not index.exists():
        yield f"--index: {index} does not exist"
    if index is not None and engine is not None:
        yield "--index and --engine are both given; expected one of them"
    if index is None and engine is None and k:
        yield f"there is nothing to search, and no {QUICKSTART}; expected --index RUN_DIR or --engine NAME"
    reads = {  # section or key: (whether it is read, its condition)
        "web": (engine is not None, "--engine, since an index has its own documents"),
        "ensemble": (k != 0, "passages, and --k 0 reads none"),
        "ensemble.temperature": (engine is None, "the similarities of an index"),
    }
    for name in (one.partition("=")[0] for one in overrides):
        for is_read, needed in (reads[key] for key in (name.partition(".")[0], name) if key in reads):
            if not is_read:
                yield f"{name} has no effect here; it is for {needed}"
        if name == "web.engine":
            yield f"{name} is set as a key; expected --engine"
