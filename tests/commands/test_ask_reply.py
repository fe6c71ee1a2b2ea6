"""Prompts that do not fit the LM of `replug ask` are cut, and replies are shown."""

import logging

import pytest

from replug.answering.prompts import LINE_ENDS, Shot
from replug.commands.ask import AskOptions
from replug.commands.ask_reply import Reply, ensemble_prompts, fit_passages, print_reply, prompts_that_fit
from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.models.black_box_lm import UnscorableText
from replug.models.build import lm_source
from replug.models.lm_source import LMSource
from replug.web.records import Passage
from tests.support.tiny_lms import MAX_TOKENS, write_llama, write_tokenizer

QUESTION, NEW_TOKENS = "who?", 8
SHOTS = [Shot("w?", "A", "A x.")] * 3


def passage(text: str) -> Passage:
    return Passage(text, "u", "", None, 1, 0.5, 0.5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LMSource:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    write_tokenizer(folder)
    return lm_source(LMConfig(path=str(folder)), folder / "spent.json", folder / "cache.sqlite")


def length(source: LMSource, text: str) -> int:
    return len(source.tokenizer()(text)["input_ids"])


def test_the_earliest_shots_go_and_then_the_end_of_the_evidence(source, caplog):
    long, short = passage("the cat sat " * 100), passage("the cat sat")
    with caplog.at_level(logging.INFO, logger="replug"):
        fitted = fit_passages(source, QUESTION, [short, long], NEW_TOKENS)
        prompts = prompts_that_fit(source, SHOTS, QUESTION, fitted, NEW_TOKENS)
    assert "1 of 2 passages were cut at their end" in caplog.text and "room for 0 of 3 shots" in caplog.text
    for one in fitted:
        assert length(source, prompts.ask(QUESTION, one.text)) <= MAX_TOKENS - NEW_TOKENS - LINE_ENDS
    assert fitted[0] == short
    assert long.text.startswith(fitted[1].text) and len(fitted[1].text) > 100
    assert prompts_that_fit(source, SHOTS[:1], QUESTION, [short], NEW_TOKENS).shots == tuple(SHOTS[:1])


def test_a_question_that_fits_no_prompt_is_refused(source):
    with pytest.raises(UnscorableText, match=r"its prompt is \d+ tokens too long .* the LM holds 128, 10 of them"):
        fit_passages(source, "who? " * 100, [passage("x")], NEW_TOKENS)


def test_a_template_cuts_its_documents(source):
    options, long = AskOptions(template="{question}"), passage("the cat sat " * 100)
    [prompt], opening = ensemble_prompts(QUESTION, [long], source, options, LMConfig(), NEW_TOKENS)
    assert prompt.startswith("the cat sat") and prompt.endswith(QUESTION) and opening == ""
    assert length(source, prompt) <= MAX_TOKENS - NEW_TOKENS
    with pytest.raises(UserError, match="--max-new-tokens is 128; the LM holds 128 tokens in all"):
        ensemble_prompts(QUESTION, [long], source, options, LMConfig(), MAX_TOKENS)


# Showing: nothing that others wrote is more than text -----------------------------------------------------------

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
    assert row["candidates"][0]["factors"]["question_given_answer"] == -20.25
