"""What a reply shows on a terminal and as JSON; nothing that others wrote is more than text."""

import pytest

from replug.commands.asking.reply import Reply, print_reply
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
PASSAGES = (
    Passage(f"A text. {HOSTILE}", 'https://example.org/?a="><script>', HOSTILE, "2026-11-24", 1, 0.5, 0.75),
    Passage("Another.", f"javascript:alert(1){ESCAPE}", "", None, 2, 0.2, 0.25),
)
CANDIDATES = (
    {"answer": f"Nobody {HOSTILE}", "passage": 1, "factors": FACTORS},
    {"answer": f"Nobody {HOSTILE}", "passage": 2, "factors": {**FACTORS, "answer_given_question": -0.5}},
    {"answer": "Someone", "passage": 2, "factors": FACTORS},
)
REPLY = Reply(
    question=f"who? {HOSTILE}",
    answer=f"Nobody {HOSTILE}",
    method="poe",
    lm="tiny",
    searched="searxng",
    passages=PASSAGES,
    failures={"timeout": 2},
    scores={f"Nobody {HOSTILE}": -46.75, "Someone": -float("inf")},
    candidates=CANDIDATES,
)


def test_a_terminal_is_told_all_of_it_as_text(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    print_reply(REPLY)
    shown = capsys.readouterr().out
    assert shown.startswith("Nobody [bold]<script>alert(1)</script>\\x1b[31m[/bold]\\\n") and ESCAPE not in shown
    parts = ("75.0%", "2026-11-24", "https://example.org", "missing: timeout 2", "1, 2", "-46.75", "-0.50", "p(q|a,p)")
    assert all(part in shown for part in parts) and "–" in shown


def test_json_has_null_for_the_logarithm_of_0():
    row = REPLY.as_json()
    assert row["scores"][1]["score"] is None and row["candidates"][0]["passage"] == 1
    assert row["candidates"][0]["factors"]["question_given_answer"] == -20.25 and row["policy"] is None
