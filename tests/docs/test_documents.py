"""README, CONTRIBUTING and docs/ against what is there: links, paths, commands with their options, keys, and examples.

Commands of comments and help texts are looked at too. Nothing runs: a command's configuration is composed as the
command does it, and its rules are checked. Words in capitals stand for what the reader has.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

import replug
from replug.commands.cli import command_line
from replug.commands.command import with_short_keys
from replug.config.evaluation_schema import AskConfig, EvaluationConfig
from replug.config.load import load_ask_config, load_config, load_evaluation_config, names_evaluation
from replug.config.paths import find_config
from replug.config.schema import Config
from replug.evals.kinds import check_evaluation

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|\s)replug ([a-z]+)(.*)")
KEY = re.compile(r"(?<![\w./-])([a-z_]+\.[a-z_]\w*)(?==)")
BARE_KEY = re.compile(r"([a-z_]+)\.([a-z_]+)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/(?:[\w.-]+\.(?:py|md|yaml|sbatch|svg|png))?")
OF_FILES = ("json", "jsonl", "sqlite", "sbatch", "md", "py", "yaml")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def _inline_code(text: str) -> Iterator[str]:
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        yield " ".join(code.split())


def _shown(text: str) -> Iterator[str]:
    """Yield what a reader may type: shell lines, joined and without their comments, and inline code."""
    for language, block in FENCE.findall(text):
        if language in ("", "bash"):
            yield from (re.sub(r"\s#\s.*", "", line) for line in block.replace("\\\n", " ").splitlines())
    yield from _inline_code(text)


def _keys() -> tuple[set[str], set[str]]:
    """Return every key of every kind of configuration, and the tables of names that users choose."""
    keys: set[str] = set()
    tables: set[str] = set()
    for schema in (Config, EvaluationConfig, AskConfig):
        for name, value_type in _fields(schema):
            (tables if "dict" in str(value_type) else keys).add(name)
    return keys, tables


def _fields(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    types = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(types[field.name]):
            yield from _fields(types[field.name], f"{name}.")
        else:
            yield name, types[field.name]


KEYS, TABLES = _keys()


def _is_known(key: str) -> bool:
    return key in KEYS or key in TABLES or key.split(".")[0] in TABLES


@every_document
def test_every_relative_link_and_every_path_named_exists(document: Path) -> None:
    """Paths that begin with a folder of the repository; what a run writes is not there."""
    text = document.read_text()
    targets = [target for target in LINK.findall(FENCE.sub("", text)) if "://" not in target]
    assert not [target for target in targets if not (document.parent / target).exists()]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs"}
    words = [word.rstrip(":,;") for code in _shown(text) for word in code.split()]
    named = [word for word in words if PATH.fullmatch(word) and word.split("/")[0] in folders]
    assert not [name for name in named if not (ROOT / name).exists()]


@every_document
def test_every_command_named_exists_and_takes_the_options_shown(document: Path) -> None:
    commands, wrong = dict(typer.main.get_command(command_line()).commands), []  # type: ignore[attr-defined]
    for name, rest in (match for shown in _shown(document.read_text()) for match in COMMAND.findall(shown)):
        if name not in commands:
            wrong.append(f"replug {name}")
            continue
        words = shlex.split(rest.replace("…", ""), comments=True)
        inner = getattr(commands[name], "commands", {})
        if inner and words and words[0] not in inner:
            wrong.append(f"replug {name} {words[0]}")
        command = inner.get(words[0] if words else "", commands[name])
        options = {option for param in command.params for option in param.opts}
        given = [word for word in words if word.startswith("--")]
        wrong += [f"replug {name} {word}" for word in given if word.split("=")[0] not in options]
    assert not wrong


@every_document
def test_every_key_shown_is_known(document: Path) -> None:
    """With a value, and alone in inline code: `section.key` of a section that there is."""
    text, sections = document.read_text(), {key.split(".")[0] for key in KEYS if "." in key}
    shown = [key for code in _shown(text) for key in KEY.findall(code)]
    named = [match for code in _inline_code(text) if (match := BARE_KEY.fullmatch(code))]
    shown += [match[0] for match in named if match[1] in sections and match[2] not in OF_FILES]
    assert not [key for key in shown if not _is_known(key)]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_in_a_comment_of_a_configuration_is_known(path: Path) -> None:
    comments = "\n".join(re.findall(r"#(.*)", path.read_text()))
    assert not [key for key in KEY.findall(comments) if not _is_known(key)]


@every_document
def test_python_imports_only_what_there_is(document: Path) -> None:
    for language, block in FENCE.findall(document.read_text()):
        if language == "python":
            compile(block, str(document), "exec")
            for names in re.findall(r"^from replug import (.*)$", block, re.MULTILINE):
                assert set(names.split(", ")) <= set(replug.__all__)
            for line in re.findall(r"^from replug\..*$", block, re.MULTILINE):
                exec(line, {})


# Whole commands ------------------------------------------------------------------------------------------------------

INLINE = re.compile(r"`(replug [a-z]+ [^`]*)`")
ASSIGNED = re.compile(r"^([A-Z_]+)=(.*)$")
LOOP = re.compile(r"^for (\w+) in (\S+)")
OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-zA-Z_][\w-]*)*=.*", re.DOTALL)


def overrides_of(words: list[str]) -> list[str]:
    """Without what belongs to an option."""
    return [word for word in words if OVERRIDE.fullmatch(word) and not word.startswith("-")]


def of_shell(block: str) -> Iterator[list[str]]:
    """The words of each command, with variables as they were set before."""
    known: dict[str, str] = {}
    for line in block.replace("\\\n", "").splitlines():
        text = re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], match[0]), line.strip())
        if assigned := ASSIGNED.match(text):
            known[assigned[1]] = "".join(shlex.split(assigned[2]))
        elif loop := LOOP.match(text):
            known[loop[1]] = loop[2]
        elif text.startswith("replug "):
            yield shlex.split(text, comments=True)[1:]


def of_page(path: Path) -> Iterator[list[str]]:
    text = path.read_text()
    blocks = [block for language, block in FENCE.findall(text) if language in ("", "bash")]
    yield from of_shell("".join(blocks))  # a page's blocks are typed one after the other
    for code in INLINE.findall(FENCE.sub("", text)):
        if "=" in code or " --" in code:  # a whole command, not the name of one
            yield shlex.split(" ".join(code.split()))[1:]


HELP = sorted((ROOT / "replug/commands").rglob("*.py"))
SHORT = ("--source", "--retriever", "--lm")
TAKES_CONFIG = ("train", "evaluate", "prepare", "plan", "slurm")


def of_help(path: Path) -> Iterator[list[str]]:
    for line in path.read_text().splitlines():
        if line.startswith("    replug "):
            yield shlex.split(line)[1:]


def documented() -> Iterator[tuple[str, list[str]]]:
    for read, paths in ((of_page, DOCUMENTS), (of_help, HELP)):
        for path in paths:
            for words in read(path):
                yield f"{path.name}: {' '.join(words)}", words


COMMANDS = dict(documented())


def compose(words: list[str]) -> None:
    """Raises UserError where the configuration of a command is refused."""
    short = [words[words.index(option) + 1] if option in words else None for option in SHORT]
    name, overrides = words[0], with_short_keys(overrides_of(words[1:]), *short)
    if name == "ask" and not any(word.startswith("--index") for word in words):
        engines = [f"web.engine={words[place + 1]}" for place, word in enumerate(words) if word == "--engine"]
        load_ask_config([*overrides, *engines])
    elif name in TAKES_CONFIG and len(words) > 1 and (path := ROOT / find_config(words[1])).is_file():
        compose_file(words, path, overrides)


def compose_file(words: list[str], path: Path, overrides: list[str]) -> None:
    if names_evaluation(path):
        check_evaluation(load_evaluation_config(path, overrides))
        return
    needs_lm = words[0] != "prepare" or "--labels" in words  # as the commands have it
    load_config(path, overrides, needs_lm=needs_lm, needs_retriever=needs_lm or "--index" in words)


@pytest.mark.parametrize("where", COMMANDS, ids=range(len(COMMANDS)))
def test_a_documented_command_has_a_configuration_that_is_not_refused(where: str) -> None:
    compose(COMMANDS[where])
