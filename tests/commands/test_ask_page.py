"""What a reply shows on a terminal and as a page: all of it, and nothing that others wrote is more than text."""

import re

import pytest

from replug.commands.asking.reply import Reply, page_of, print_reply
from replug.web.records import Passage

ESCAPE = "\x1b[31m"
HOSTILE = f"[bold]<script>alert(1)</script>{ESCAPE}[/bold]\\"
FACTORS = {
    "answer_given_question": -1.5,
    "question_given_answer": -20.25,
    "answer_alone": -3.0,
    "question_alone": -22.0,
    "passage": -float("inf"),
}


def reply(**changes: object) -> Reply:
    passages = (
        Passage(f"A text. {HOSTILE}", 'https://example.org/?a="><script>', HOSTILE, "2026-11-24", 1, 0.5, 0.75),
        Passage("Another.", f"javascript:alert(1){ESCAPE}", "", None, 2, 0.2, 0.25),
    )
    whole = {
        "question": f"who? {HOSTILE}",
        "answer": f"Nobody {HOSTILE}",
        "method": "poe",
        "lm": "tiny",
        "searched": "searxng",
        "passages": passages,
        "failures": {"timeout": 2},
        "scores": {f"Nobody {HOSTILE}": -46.75, "Someone": -float("inf")},
        "candidates": (
            {"answer": f"Nobody {HOSTILE}", "passage": 1, "factors": FACTORS},
            {"answer": f"Nobody {HOSTILE}", "passage": 2, "factors": {**FACTORS, "answer_given_question": -0.5}},
            {"answer": "Someone", "passage": 2, "factors": FACTORS},
        ),
        **changes,
    }
    return Reply(**whole)


def test_the_page_runs_nothing_and_loads_nothing():
    page = page_of(reply())
    assert "<script" not in page and ESCAPE not in page and "[bold]&lt;script&gt;" in page
    assert set(re.findall(r'href="([^"]*)"', page)) == {"https://example.org/?a=&quot;&gt;&lt;script&gt;"}
    assert "javascript:alert(1)" in page and "default-src 'none'" in page and "no-referrer" in page
    assert page_of(reply(question="{code} {x}")).count("{code} {x}") == 2


def test_the_page_has_the_whole_evidence_and_all_candidates():
    long = Passage("word " * 100 + "end", "u", "", None, 1, 0.5, 1.0)
    page = page_of(reply(passages=(long,), scores={f"answer {number}": -1.0 for number in range(30)}))
    assert page.index("Evidence") < page.index("end") < page.index("Candidates") < page.index("answer 29")
    assert page_of(reply(passages=(), candidates=(), scores={})).count("Evidence") == 0


def test_a_terminal_is_told_the_same(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    print_reply(reply())
    shown = capsys.readouterr().out
    assert shown.startswith("Nobody [bold]<script>alert(1)</script>\\x1b[31m[/bold]\\\n") and ESCAPE not in shown
    parts = (
        "75.0%",
        "2026-11-24",
        "https://example.org",
        "missing: timeout 2",
        "1, 2",
        "-46.75",
        "-0.50",
        "–",
        "p(q|a,p)",
    )
    assert all(part in shown for part in parts)


def test_json_holds_no_number_that_is_none():
    row = reply().as_json()
    assert row["scores"][1]["score"] is None and row["candidates"][0]["passage"] == 1
    assert row["candidates"][0]["factors"]["question_given_answer"] == -20.25 and row["policy"] is None


def test_an_empty_answer_is_said_to_be_none(capsys: pytest.CaptureFixture):
    print_reply(reply(answer=""))
    assert capsys.readouterr().out.startswith("no answer") and "no answer" in page_of(reply(answer=""))
