"""Every command that README, docs, comments of configurations and help texts print is one that a configuration allows.

Nothing runs: a command's configuration is composed as the command does it, and its rules are checked. Words in capitals
stand for what the reader has.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from replug.commands.command import with_short_keys
from replug.config.load import (
    load_ask_config,
    load_config,
    load_evaluation_config,
    names_evaluation,
)
from replug.config.paths import find_config
from replug.evals.kinds import check_evaluation

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
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


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
HELP = sorted((ROOT / "replug/commands").rglob("*.py"))
SHORT = ("--source", "--retriever", "--lm")
TAKES_CONFIG = ("train", "evaluate", "prepare", "plan", "slurm")


def of_comments(path: Path) -> Iterator[list[str]]:
    """Whole commands, and keys that a comment tells to give, which are given with the file's own command."""
    lines = [line.removeprefix("#").rstrip() for line in path.read_text().splitlines() if line.startswith("#")]
    text = re.sub(r"\n {3,}(?! *replug )", " ", "\n".join(lines).replace("\\\n", " "))
    own: list[str] = []
    for line in text.splitlines():
        words = [word.rstrip(".,") for word in shlex.split(line.replace("'s ", "s "))]
        keys = [word for word in words if OVERRIDE.fullmatch(word)]
        if match := re.search(r"\breplug ([a-z]+ \S.*)$", line):
            command = shlex.split(match[1])
            own = own or overrides_of(command)
            yield command
        elif keys:
            yield ["evaluate", str(path.relative_to(ROOT)), *_unless_given(own, keys), *keys]


def _unless_given(own: list[str], keys: list[str]) -> list[str]:
    given = {key.partition("=")[0] for key in keys}
    return [word for word in own if word.partition("=")[0] not in given]


def of_help(path: Path) -> Iterator[list[str]]:
    for line in path.read_text().splitlines():
        if line.startswith("    replug "):
            yield shlex.split(line)[1:]


def documented() -> Iterator[tuple[str, list[str]]]:
    for read, paths in ((of_page, PAGES), (of_comments, CONFIGS), (of_help, HELP)):
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
