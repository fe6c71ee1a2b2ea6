"""Texts of others are shown as text: by a terminal, by rich, in Markdown."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest

from replug import Retrieved, library
from replug.commands.run import search
from replug.config.plain_text import plain_line, plain_text
from replug.evals.tables import Table, print_blocks
from replug.messages import StandardError

HOSTILE = {
    "a closing tag": "[/INST] and [/]",
    "a link": "[link=https://example.com]here[/link]",
    "a colour": "\x1b[31mred\x1b[0m",
    "backwards": "abc\u202edcba\u2066",
    "backspace": "ok\x08\x08no",
    "emoji names": ":smile: :skull:",
}


def test_plain_text_is_left_as_it_is():
    for text in ("a plain line", "Zürich, 日本語, 🙂", "👩\u200d🔬 and \u0646\u0645\u06cc\u200c\u062e", "a\n\tb"):
        assert plain_text(text) == text
    assert plain_line("a\n  b\u00a0c\td") == "a b c d"
    assert plain_text("\x1b[2J\x9b\u202e\ud800") == "\\x1b[2J\\x9b\\u202e\\ud800"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_document_is_shown_by_search_as_it_is_written(name, monkeypatch, capsys):
    documents = [Retrieved(f"begin {HOSTILE[name]} end", 0.5, HOSTILE[name], "s")]
    monkeypatch.setattr(library, "search", lambda *_: documents)
    search(Path("a[/b]"), "q", 1)
    shown = capsys.readouterr().out
    assert f"begin {plain_text(HOSTILE[name])} end" in shown and plain_text(shown) == shown
    search(Path("i"), "q", 1, as_json=True)
    line = capsys.readouterr().out.rstrip("\n")
    assert line.isprintable() and json.loads(line)["found"] == [asdict(document) for document in documents]


MARKDOWN = ("a | b | c", "<script>alert(1)</script>", "[here](https://example.com)", "![x](http://a.b/p.png)")
MARKDOWN += ("**bold** and _italic_ and `code`", "a &lt; b", "back\\slash \\| pipe", "line\n| 9.9999 | 9.9999 |")


@pytest.mark.parametrize("cell", [*MARKDOWN, *HOSTILE.values()])
def test_a_group_is_one_cell_of_table_md_and_nothing_else(cell, capsys):
    print_blocks([Table(["group", "value"], [[cell, "1.0000"]])], width=200)
    shown = capsys.readouterr().out
    last = next(line for line in shown.splitlines() if "1.0000" in line)
    assert plain_text(shown) == shown
    assert " ".join(last.replace("1.0000", "").split()) == plain_line(cell)


def test_messages_reach_the_terminal_as_plain_text(capsys):
    StandardError().emit(logging.LogRecord("replug", logging.INFO, "", 0, "row %s", ("\x1b[2J\nnext",), None))
    assert capsys.readouterr().err == "row \\x1b[2J\nnext\n"
