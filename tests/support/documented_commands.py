"""The `replug` commands that pages print, as words, with the variables of their shell blocks."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^```(?:bash)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
        text = re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], found[0]), line.strip())
        if assigned := ASSIGNED.match(text):
            known[assigned[1]] = "".join(shlex.split(assigned[2]))
        elif loop := LOOP.match(text):
            known[loop[1]] = loop[2]
        elif text.startswith("replug "):
            yield shlex.split(text, comments=True)[1:]


def of_page(path: Path) -> Iterator[list[str]]:
    text = path.read_text()
    yield from of_shell("".join(FENCE.findall(text)))  # a page's blocks are typed one after the other
    for code in INLINE.findall(FENCE.sub("", text)):
        yield shlex.split(" ".join(code.split()))[1:]
