"""`replug ask`: answer a question from an index or a search engine, in this process and without Ray.

The options are checked here, before anything heavy is imported; `ask_reply` answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replug.commands.command import Overrides
from replug.config.choices import EnsembleWeights
from replug.config.errors import UserError
from replug.config.evaluation_schema import AskConfig
from replug.config.load import load_ask_config, names_lm
from replug.config.methods import REPLUG, RERANKERS, WEB_ENGINES
from replug.config.plain_text import plain_json
from replug.data.folder import require_checksums
from replug.data.rows import question_prompt

if TYPE_CHECKING:  # brings numpy
    from replug.models.ensemble import Weighting

CONFIG = "config.yaml"  # of a run directory
TEMPERATURE = "ensemble.temperature"
QUESTION = "{question}"  # stands for the question in --template
STOP = "\n"  # ends an answer that is no message of a chat
QUICKSTART = Path("runs/quickstart")  # searched by default


@dataclass(frozen=True, slots=True)
class AskOptions:
    """The options of the command; None means the default. One of `index` and `engine` is searched."""

    index: Path | None = None
    engine: str | None = None
    method: str = REPLUG
    k: int | None = None
    template: str | None = None
    shots: Path | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def reranks(self) -> bool:
        return self.method != REPLUG

    @property
    def searched(self) -> str:
        """Name the source of the evidence for a reader."""
        return self.engine or (f"index {self.index}" if self.index else "index")


def ask(
    question: Annotated[str, typer.Argument(help="Question, or the text for --template.")],
    overrides: Overrides = None,
    index: Annotated[
        Path | None,
        typer.Option(help="Run or index to search. Default: runs/quickstart."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Search engine: searxng or brave.")] = None,
    rerank: Annotated[
        str, typer.Option(help="replug (ensemble of every token), direct, rag, noisy_channel or poe.")
    ] = REPLUG,
    k: Annotated[
        int | None, typer.Option(help="Number of passages. 0: the LM answers alone. Default: 10.", min=0)
    ] = None,
    shots: Annotated[
        Path | None, typer.Option(help="JSONL of demonstrations (question, answer, evidence). Default: built in.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Prompt without demonstrations, such as '{question}'. Documents precede it.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Largest number of generated tokens. Default: 32; 64 with --template.", min=1)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the answer, such as \\n; repeatable. Default: \\n."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer a question from the documents of an index or the results of a search engine.

    The run's LM answers, or the LM of lm.path=DIR. rerank_lm.path=DIR sets a second LM that reranks.

    replug ask "what does the keyword yield do in python" --index runs/quickstart

    replug ask "who wrote the art of war" --engine searxng web.url=http://127.0.0.1:8888 --rerank poe lm.path=DIR

    replug ask "The Python keyword yield" --template "{question}" --index runs/quickstart
    """
    stops = tuple(text.replace("\\n", "\n") for text in stop or ())
    if index is None and engine is None and QUICKSTART.is_dir():
        index = QUICKSTART
    options = AskOptions(index, engine, rerank, k, template, shots, max_new_tokens, stops)
    for problem in _problems(options, overrides or []):
        raise UserError(problem)
    config = config_of(options.index, [*(overrides or []), f"web.engine={engine or 'local'}"])
    options = _with_template(options, config)
    from replug.commands.ask_reply import print_reply, reply_to

    reply = reply_to(question, options, config)
    if as_json:
        print(plain_json(reply))
    else:
        print_reply(reply)


def _with_template(options: AskOptions, config: AskConfig) -> AskOptions:
    """Return the options with a prompt without demonstrations where `lm.prompt` or `lm.chat` asks for another form.

    Raises UserError for prompts of another form.
    """
    for lm, section in ((config.lm, "lm"), (config.rerank_lm, "rerank_lm")):
        if lm.prompt is None and not lm.chat:
            continue
        key = f"{section}.{'chat' if lm.chat else 'prompt'}"
        if options.reranks or options.shots is not None:
            option = f"--rerank {options.method}" if options.reranks else "--shots"
            yields = f"{key} is set, and {option} has prompts of its own; expected {section}.prompt=null"
            raise UserError(f"{yields} {section}.chat=false")
        if options.template is None:
            stop = options.stop or (() if lm.chat else (STOP,))
            return replace(options, template=question_prompt(QUESTION), stop=stop)
    return options


def config_of(directory: Path | None, overrides: list[str]) -> AskConfig:
    """Load the configuration of the overrides, with the LM of the directory's run unless they name one."""
    if directory is None or names_lm(overrides) or not (directory / CONFIG).is_file():
        return load_ask_config(overrides)
    require_checksums(directory, "bring it back, or give lm.path=DIR", [CONFIG])
    return load_ask_config(overrides, directory / CONFIG)


def weighting_of(config: AskConfig) -> "Weighting":
    """Return how the configured weights move, and whether the documents' own answers vote."""
    from replug.models.build import posterior_weighting
    from replug.models.ensemble import REPLUG_WEIGHTS

    if config.ensemble.weights == EnsembleWeights.posterior:
        return posterior_weighting(config.ensemble, config.lm, is_asked=True)
    return replace(REPLUG_WEIGHTS, votes=config.ensemble.weights == EnsembleWeights.vote)


def _problems(options: AskOptions, overrides: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the options, the first thing first."""
    if options.method not in (REPLUG, *RERANKERS):
        yield f"--rerank is {options.method}; expected one of {', '.join((REPLUG, *RERANKERS))}"
    if options.engine not in (None, *WEB_ENGINES):
        yield f"--engine is {options.engine}; expected one of {', '.join(WEB_ENGINES)}"
    if options.index is not None and not options.index.exists():
        yield f"--index: {options.index} does not exist"
    if options.index is not None and options.engine is not None:
        yield "--index and --engine are both given; expected one of them"
    if options.index is None and options.engine is None and options.k != 0:
        yield f"there is nothing to search, and no {QUICKSTART}; expected --index RUN_DIR or --engine NAME"
    yield from _override_problems(options, overrides)
    yield from _prompt_problems(options)


def _override_problems(options: AskOptions, overrides: Sequence[str]) -> Iterator[str]:
    """Yield keys that nothing reads, and keys that have an option."""
    reads = {  # by section or key: whether it is read, and with what
        "web": (options.engine is not None, "--engine, since an index has its own documents"),
        "rerank_lm": (options.reranks, "a reranker, such as --rerank poe"),
        "ensemble": (options.k != 0, "passages, and --k 0 reads none"),
        TEMPERATURE: (options.engine is None, "the similarities of an index"),
    }
    for name in (one.partition("=")[0] for one in overrides):
        section = name.partition(".")[0]
        for is_read, needed in (reads[key] for key in (section, name) if key in reads):
            if not is_read:
                yield f"{name} has no effect here; it is for {needed}"
        if section == "ensemble" and options.reranks and name != TEMPERATURE:
            yield f"{name} is for the ensemble of every token; expected it without --rerank {options.method}"
        if name == "web.engine":
            yield f"{name} is set as a key; expected --engine"


def _prompt_problems(options: AskOptions) -> Iterator[str]:
    if options.template is not None and QUESTION not in options.template:
        yield f"--template is {options.template!r}; expected a text with {QUESTION} in it"
    if options.template is not None and options.shots is not None:
        yield "--shots and --template are both given; expected one of them, or the shots in the template"
    if options.reranks and options.template is not None:
        yield f"--template is for the ensemble; --rerank {options.method} has prompts of its own: leave one out"
    if options.reranks and options.stop:
        yield f"--stop is for the ensemble; candidates of --rerank {options.method} end with their line: leave one out"
    if "" in options.stop:
        yield "--stop is empty; expected a text, such as \\n for the end of a line"
