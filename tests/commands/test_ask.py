"""`replug ask` as a user types it, on stand-ins: an index, a corpus, an engine on loopback, all ways to answer."""

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from replug.answering.prompts import LINE_ENDS, OWN_SHOTS, AnswerPrompts, read_shots
from replug.commands.ask_reply import ensemble_prompts, print_reply
from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.data.records import Document
from replug.data.sources.built_in_texts import stand_in_vocabulary
from replug.models.black_box_lm import Mixture, UnscorableText
from replug.models.build import lm_source
from replug.models.ensemble import Weighting, document_weights
from replug.models.generation import GenerationOptions
from replug.models.lm_source import LMSource
from replug.models.local.stand_in_lm import StandInLM
from replug.web import evidence as build
from replug.web.passages import Passage
from tests.support.command_line import CommandLine
from tests.support.lm_answers import texts_of
from tests.support.real_models import real_encoder, real_lm
from tests.support.small_index import write_small_index
from tests.support.tiny_lms import MAX_TOKENS, write_llama, write_tokenizer
from tests.support.web_site import QUICK, WebSite, answer, article, searxng, web_site

TEXTS = [
    "The Loire flows through Nantes and Tours.",
    "The Rhine flows through Basel and Cologne.",
    "The Rhone flows through Geneva and Lyon.",
    "Granite is a hard rock that cools slowly.",
]
QUESTION = "which river flows through Basel"
LM = "lm.path=stand_in"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a question is kept under the folder that a command is typed in."""
    monkeypatch.chdir(tmp_path)


KNOWN = [" ".join(topic[:6]) for topic in stand_in_vocabulary()[:4]]  # texts of words that the encoder knows


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_index(tmp_path_factory.mktemp("index"), KNOWN)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebSite]:
    """Pages of the same texts with a search before them, on loopback, which these tests may fetch from."""
    with web_site() as made:
        long = [f"{text} It was told by many people in many books." for text in TEXTS]
        for row, text in enumerate(long):
            made.routes[f"/{row}"] = answer(article(f"Page <b>{row}</b>", text))
        made.routes["/search"] = searxng(made, [Document(f"/{row}", text, "", "") for row, text in enumerate(long)])
        allowed = partial(build.EvidenceFinder, limits=QUICK, exempt=made.exempt)
        monkeypatch.setattr("replug.web.evidence.EvidenceFinder", allowed)
        yield made


def asked(replug: CommandLine, *typed: object, question: str = QUESTION) -> dict:
    done = replug("ask", question, *typed, "--json")
    assert done.status == 0, done.printed
    return json.loads(done.output.splitlines()[-1], parse_constant=pytest.fail)  # no NaN, which is no JSON


# The ensemble of an index -----------------------------------------------------------------------------------------


def test_an_index_answers_by_the_ensemble_of_its_documents(replug, index):
    row = asked(replug, "--index", index, LM, "--k", "3", "--max-new-tokens", "4")
    evidence = row["evidence"]
    similarities, priors = ([one[key] for one in evidence] for key in ("similarity", "prior"))
    assert len(evidence) == 3 and similarities == sorted(similarities, reverse=True)
    assert priors == pytest.approx(document_weights(similarities))
    prompts = AnswerPrompts(read_shots(OWN_SHOTS))
    mixture = Mixture([prompts.ask(QUESTION, one["text"]) for one in evidence], priors, Weighting(0.05, read=64))
    [expected] = StandInLM().generate([mixture], GenerationOptions(4, "\n"))
    assert row["answer"] == expected.text and row["sum_logprob"] == pytest.approx(expected.sum_logprob)
    assert [one["weight"] for one in evidence] == pytest.approx(expected.weights)
    fixed = asked(replug, "--index", index, LM, "--k", "3", "ensemble.weights=similarity")
    assert [one["weight"] for one in fixed["evidence"]] == pytest.approx(priors)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["ensemble.weights=similarity", "ensemble.prune=0.1"], "ensemble.prune is 0.1, but weights=similarity"),
        (["ensemble.prune=0.1", "--k", "0"], "ensemble.prune has no effect here; it is for passages, and --k 0"),
        (["ensemble.prune=1.5"], "ensemble.prune is 1.5"),
        (["ensemble.share=0.1"], "ensemble.share"),
        (["ensemble.weights=similarity", "ensemble.read=8"], "ensemble.read is 8, but weights=similarity"),
    ],
)
def test_keys_of_weights_without_effect_are_refused(replug, index, typed, message):
    done = replug("ask", QUESTION, "--index", index, LM, *typed)
    assert done.status == 2 and message in " ".join(done.printed.split())


def test_a_prompt_of_the_lm_has_the_documents_before_the_question(replug, index):
    prompt = 'lm.prompt="{document}\\n{context}"'
    row = asked(replug, "--index", index, LM, prompt, "--k", "2", "--max-new-tokens", "5")
    prompts = [f"{one['text']}\nQuestion: {QUESTION}\nAnswer:" for one in row["evidence"]]
    mixture = Mixture(prompts, [one["prior"] for one in row["evidence"]], Weighting(0.05, read=64))
    [expected] = StandInLM().generate([mixture], GenerationOptions(5, "\n"))
    assert row["answer"] == expected.text.strip()


def test_without_passages_the_lm_answers_alone_and_says_so(replug):
    typed = [LM, "--k", "0", "--max-new-tokens", "4"]
    row = asked(replug, *typed)
    prompt = AnswerPrompts(read_shots(OWN_SHOTS)).ask(QUESTION, None)
    assert row["answer"] == texts_of(StandInLM(), [prompt], 4, "\n")[0] and row["evidence"] == []
    assert "no evidence: the LM answers alone" in replug("ask", QUESTION, *typed).output


def test_the_lm_is_that_of_the_run_unless_one_is_named(replug, quiet_run):
    typed = ["--index", quiet_run, "--k", "3", "--max-new-tokens", "4"]
    row = asked(replug, *typed, question="some words")
    assert len(row["evidence"]) == 3 and row["answer"]
    assert sum(one["weight"] for one in row["evidence"]) == pytest.approx(1)
    assert asked(replug, *typed, LM, question="some words") == row


def test_pages_of_a_search_engine_are_the_evidence_with_their_date(replug, site):
    typed = ["--engine", "searxng", f"web.url={site.url}", LM, "--max-new-tokens", "3"]
    row = asked(replug, *typed)
    first = row["evidence"][0]
    assert first["url"] == f"{site.url}/1" and "Basel" in first["text"] and first["fetched"]
    requests = site.requests.total()
    assert asked(replug, *typed) == row and site.requests.total() == requests
    shown = replug("ask", QUESTION, *typed).output
    assert shown.startswith(row["answer"]) and "Evidence" in shown


ENGINE = ["--engine", "searxng", "web.url=http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], "there is nothing to search, and no runs/quickstart; expected --index RUN_DIR"),
        (["--index", "gone"], "--index: gone does not exist"),
        (["--index", "."], "lm.path is missing; expected lm.path=DIR for local weights"),
        (["--engine", "altavista"], "--engine is altavista; expected one of brave, searxng"),
        (["--engine", "searxng", "--index", "."], "--index and --engine are both given; expected one of them"),
        ([*ENGINE, "--k", "60"], "--k is 60, but 50 passages are kept"),
        (["--index", ".", "web.url=x"], "web.url has no effect here"),
        ([*ENGINE, "ensemble.temperature=2"], "ensemble.temperature has no effect here"),
        ([*ENGINE, "retrieve.k=3"], "retrieve: unknown key"),
    ],
)
def test_a_mistake_is_one_line(replug: CommandLine, typed, message):
    lm = [] if message.startswith("lm.path") else [LM]
    done = replug("ask", QUESTION, *typed, *lm)
    assert done.status == 2 and message in done.errors, done.printed
    assert len(done.errors.strip().splitlines()) == 1 and done.output == ""


@pytest.mark.slow
def test_a_real_lm_answers_from_the_passage_that_says_it(replug: CommandLine, tmp_path):
    index = write_small_index(tmp_path, TEXTS, real_encoder())
    row = asked(replug, "--index", index, f"lm.path={real_lm()}", "--k", "2", "--max-new-tokens", "8")
    assert "Basel" in row["evidence"][0]["text"] and "Rhine" in row["answer"]


# Prompts that do not fit, and what a reply shows ----------------------------------------------------------------------


SHORT, NEW_TOKENS = "who?", 8


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
        prompts, opening = ensemble_prompts(SHORT, [short, long], source, LMConfig(), NEW_TOKENS)
    assert "1 of 2 passages were cut at their end" in caplog.text and opening == ""
    assert prompts[0] == AnswerPrompts(()).ask(SHORT, short.text) and len(prompts[1]) > 100
    assert all(length(source, prompt) <= MAX_TOKENS - NEW_TOKENS - LINE_ENDS for prompt in prompts)


def test_a_question_that_fits_no_prompt_is_refused(source):
    with pytest.raises(UnscorableText, match=r"its prompt is \d+ tokens too long .* the LM holds 128, 10 of them"):
        ensemble_prompts("who? " * 100, [passage("x")], source, LMConfig(), NEW_TOKENS)


def test_a_prompt_of_the_lm_cuts_its_documents(source):
    lm, long = LMConfig(prompt="{document} {context}"), passage("the cat sat " * 100)
    [prompt], opening = ensemble_prompts(SHORT, [long], source, lm, NEW_TOKENS)
    assert prompt.startswith("the cat sat") and SHORT in prompt and opening == ""
    assert length(source, prompt) <= MAX_TOKENS - NEW_TOKENS
    with pytest.raises(UserError, match="--max-new-tokens is 128; the LM holds 128 tokens in all"):
        ensemble_prompts(SHORT, [long], source, lm, MAX_TOKENS)


ESCAPE = "\x1b[31m"
HOSTILE = f"[bold]<script>alert(1)</script>{ESCAPE}[/bold]\\"


def test_a_terminal_is_told_all_of_it_as_text(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Nothing that others wrote is more than text."""
    monkeypatch.setenv("COLUMNS", "200")
    found = {"weight": 0.75, "prior": 0.5, "fetched": "2026-11-24", "text": f"A text. {HOSTILE}"}
    pages = [
        {"url": 'https://example.org/?a="><script>', "title": HOSTILE},
        {"url": f"javascript:1{ESCAPE}", "title": ""},
    ]
    reply = {"answer": f"Nobody {HOSTILE}", "lm": "tiny", "searched": "searxng", "sum_logprob": -46.75}
    print_reply({**reply, "failures": {"timeout": 2}, "evidence": [{**found, **page} for page in pages]})
    shown = capsys.readouterr().out
    assert shown.startswith("Nobody [bold]<script>alert(1)</script>\\x1b[31m[/bold]\\\n") and ESCAPE not in shown
    assert all(part in shown for part in ("75.0%", "2026-11-24", "https://example.org", "missing: timeout 2", "-46.75"))
