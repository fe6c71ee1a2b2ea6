"""From a question to a ranked answer: factors equal direct scoring, nothing is asked twice, and prompts to the byte."""

import json
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.answering.answerer import (
    RERANKERS,
    Answerer,
    AnsweringOptions,
    Candidate,
    logprobs_of_samples,
    sampled_candidates,
    submit_factors,
)
from replug.answering.prompts import AnswerPrompts, FittingPrompts, Shot, read_shots
from replug.config.errors import UserError
from replug.models.black_box_lm import AsyncLM, Call, ScoreCall
from replug.models.generation import Generated
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import CachingLM
from replug.web.records import Passage
from tests.support.tiny_lms import load, random_lms_need_make_no_sense, write_llama  # noqa: F401
from tests.support.tokenizers import letters_tokenizer

SHOTS = [
    Shot("who wrote Faust?", "Goethe", "Goethe wrote\n Faust  in Weimar."),
    Shot("which river flows through Nantes?", "the Loire", "The Loire flows through Nantes."),
]
QUESTION = "which river flows through Basel?"
TEXTS = ["The Rhine flows through Basel.", "Basel lies on a river,\nthe Rhine.", "The Rhone flows through Lyon."]
PROBABILITIES = [0.5, 0.3, 0.2]
PASSAGES = [
    Passage(text, f"https://example.org/{number}", "a page", "2026-11-24", number + 1, share, share)
    for number, (text, share) in enumerate(zip(TEXTS, PROBABILITIES, strict=True))
]
PROMPTS = AnswerPrompts(SHOTS)


class CountingLM(InProcessLM):
    """The stand-in; counts every pair and every prompt that it is asked about."""

    def __init__(self) -> None:
        super().__init__(StandInLM())
        self.asked: Counter[tuple] = Counter()
        self.openings: list[str | None] = []

    def submit_call(self, call: Call) -> "Future[list]":
        if isinstance(call, ScoreCall):
            self.asked.update(zip(call.prefixes, call.continuations, strict=True))
            self.openings.append(call.opening)
        elif call.draws:
            self.asked.update((prompt, call.options.num_samples) for prompt in call.prompts)
        return super().submit_call(call)


# From a question to a ranked answer -----------------------------------------------------------------------------------


OPTIONS = AnsweringOptions(rerankers=tuple(RERANKERS), max_new_tokens=5)
LABELS = replace(OPTIONS, labels=("true", "false", "the Rhine"))
CANDIDATES = [Candidate("the Rhine", 0), Candidate("Basel", 0), Candidate("the Rhine", 1), Candidate("Lyon", 2)]


def direct(lm: AsyncLM, prefix: str, continuation: str) -> float:
    return lm.score([prefix], [continuation])[0].sum_logprob


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> InProcessLM:
    return InProcessLM(load(write_llama, tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("question_first", [False, True])
@pytest.mark.parametrize("kind", ["stand_in", "llama"])
def test_factors_equal_direct_scoring(kind: str, question_first: bool, llama: InProcessLM) -> None:
    lm: AsyncLM = InProcessLM(StandInLM()) if kind == "stand_in" else llama
    prompts = AnswerPrompts(SHOTS if kind == "stand_in" else (), question_first)
    passages = [replace(passage, text=passage.text[:30]) for passage in PASSAGES]
    question = QUESTION[:20]
    factors = submit_factors((lm, prompts), (lm, prompts), question, passages, CANDIDATES)()
    shots, answer_first, asked = (
        "".join(
            "\n".join(f"{label}: {' '.join(getattr(shot, label.lower()).split())}" for label in order.split()) + "\n\n"
            for shot in prompts.shots
        )
        for order in ("Evidence Question Answer", "Evidence Answer Question", "Question Evidence Answer")
    )
    tolerance = {"rtol": 0, "atol": 1e-3}
    for row, candidate in enumerate(CANDIDATES):
        evidence, answer = " ".join(passages[candidate.passage].text.split()), candidate.text
        block = f"{shots}Evidence: {evidence}\nQuestion: {question}\nAnswer:"
        if question_first:
            block = f"{asked}Question: {question}\nEvidence: {evidence}\nAnswer:"
        expected = [
            (factors.answer_given_question, block, f" {answer}\n"),
            (
                factors.question_given_answer,
                f"{answer_first}Evidence: {evidence}\nAnswer: {answer}\nQuestion:",
                f" {question}\n",
            ),
            (factors.answer_alone, f"{answer_first}Evidence: {evidence}\nAnswer:", f" {answer}\n"),
        ]
        for found, prefix, continuation in expected:
            np.testing.assert_allclose(found[row], direct(lm, prefix, continuation), **tolerance)
    for number, passage in enumerate(passages):
        prefix = f"{shots}Evidence: {' '.join(passage.text.split())}\nQuestion:"
        np.testing.assert_allclose(factors.question_alone[number], direct(lm, prefix, f" {question}\n"), **tolerance)
    np.testing.assert_allclose(np.exp(factors.passage), [0.5, 0.3, 0.2])
    assert factors.passages.tolist() == [0, 0, 1, 2]


def test_every_call_names_its_opening_and_many_passages_are_several_calls() -> None:
    lm = CountingLM()
    passages = [replace(PASSAGES[0], text=f"text {number}", probability=0.1) for number in range(10)]
    submit_factors((lm, PROMPTS), (lm, PROMPTS), QUESTION, passages, [Candidate("a", 9, -1.0)])()
    first, second = PROMPTS.openings(has_evidence=True)
    assert lm.openings == [first, first, second]
    assert sum(lm.asked.values()) == len(lm.asked) == 10 + 2, "the log-prob of a sample is known"


def test_a_smaller_lm_may_score() -> None:
    lm, scorer = CountingLM(), CountingLM()
    prompts = AnswerPrompts(SHOTS[1:])
    answered = Answerer(lm, PROMPTS, OPTIONS, scorer, prompts).answer(QUESTION, PASSAGES)
    cut = [one for one in answered.candidates if one.logprob is None]
    asked = {(PROMPTS.ask(QUESTION, text), 4) for text in TEXTS}
    asked |= {(PROMPTS.ask(QUESTION, TEXTS[one.passage]), f" {one.text}\n") for one in cut}
    assert set(lm.asked) == asked, "it samples, and scores samples that were cut alone"
    given = zip(answered.factors.answer_given_question, answered.candidates, strict=True)
    assert all(one.logprob in (None, logprob) for logprob, one in given), "p(a|q,p) is the LM's that answers"
    assert all(prefix.startswith(tuple(prompts.openings(has_evidence=True))) for prefix, _ in scorer.asked)


def test_labels_are_scored_and_not_sampled() -> None:
    lm = CountingLM()
    answered = Answerer(lm, PROMPTS, LABELS).answer(QUESTION, PASSAGES)
    assert not [asked for asked in lm.asked if asked[1] == 4]
    assert answered.factors.distinct == LABELS.labels
    assert answered.best("rag") == "the Rhine"
    for passage in range(3):
        mine = answered.factors.passages == passage
        assert np.exp(answered.factors.answer_given_question[mine]).sum() == pytest.approx(1)


@pytest.mark.parametrize("options", [OPTIONS, LABELS], ids=["sampled", "labels"])
def test_a_question_without_passages_has_no_answer(options: AnsweringOptions) -> None:
    lm = CountingLM()
    answered = Answerer(lm, PROMPTS, options).answer(QUESTION, [])
    assert {name: answered.best(name) for name in RERANKERS} == dict.fromkeys(RERANKERS, "")
    assert not lm.asked


@pytest.mark.parametrize("kind", ["stand_in", "llama"])
def test_the_same_seed_gives_the_same_answers(kind: str, llama: InProcessLM, tmp_path: Path) -> None:
    lm: AsyncLM = InProcessLM(StandInLM()) if kind == "stand_in" else llama
    prompts = PROMPTS if kind == "stand_in" else AnswerPrompts(())
    options = replace(OPTIONS, max_new_tokens=3)
    passages = [replace(passage, text=passage.text[:30]) for passage in PASSAGES]
    first, again = (Answerer(lm, prompts, options).answer(QUESTION[:20], passages) for _ in range(2))
    assert (first.candidates, first.scores) == (again.candidates, again.scores)
    cached = CachingLM(lm, tmp_path / "scores.sqlite")
    for _ in range(2):
        behind = Answerer(cached, prompts, options).answer(QUESTION[:20], passages)
        assert (behind.candidates, behind.scores) == (first.candidates, first.scores)
    cached.close()
    other = Answerer(lm, prompts, replace(options, seed=1)).answer(QUESTION[:20], passages)
    assert other.candidates != first.candidates


# Candidates --------------------------------------------------------------------------------------------------------


def drawn(text: str, *logprobs: float) -> Generated:
    return Generated(text, np.array(logprobs, np.float32))


def test_equal_answers_of_a_passage_are_one_and_empty_ones_none() -> None:
    samples = [[drawn(" Paris"), drawn("  "), drawn(" Rome"), drawn(" Paris ")], [drawn("")], [drawn(" New\t York")]]
    assert [(one.text, one.passage) for one in sampled_candidates(samples, 9)] == [
        ("Paris", 0),
        ("Rome", 0),
        ("New York", 2),
    ]


def test_an_answer_that_was_drawn_in_several_ways_has_its_largest_log_prob() -> None:
    samples = [drawn(" Rome", -2, -1), drawn("", -0.1), drawn(" Paris", -2), drawn(" Rome ", -0.5, -0.5)]
    assert logprobs_of_samples(samples, 3) == {"Rome": -1.0, "Paris": -2.0}
    assert logprobs_of_samples(samples, 2) == {"Rome": None, "Paris": -2.0}, "two tokens may have no end"


@pytest.mark.parametrize("passages", [PASSAGES[:2], []])
def test_a_sample_that_was_cut_is_scored_with_its_end(llama: InProcessLM, passages: list[Passage]) -> None:
    """Sum naively over the tokens of the answer and the line's end."""
    prompts, options = AnswerPrompts(()), replace(OPTIONS, max_new_tokens=2, num_samples_alone=4)
    short = [replace(passage, text=passage.text[:20]) for passage in passages]
    answerer = Answerer(llama, prompts, options)
    if short:
        factors = answerer.answer(QUESTION[:20], short).factors
        found = list(zip(factors.answers, factors.passages, factors.answer_given_question, strict=True))
    else:
        logprobs = answerer.submit_alone(QUESTION[:20], None)()
        found = [(answer, None, logprob) for answer, logprob in logprobs.items()]
    assert found
    for answer, number, logprob in found:
        prompt = prompts.ask(QUESTION[:20], None if number is None else short[number].text)
        [score] = llama.score([prompt], [f" {answer}\n"])
        assert logprob == pytest.approx(float(score.token_logprobs.sum()), abs=1e-4)


# Prompts, to the byte, and how many shots fit -------------------------------------------------------------------------


GOLDEN = Path(__file__).parent / "golden"
SWAPPED = AnswerPrompts(SHOTS, question_first=True)
BORDER = "█"  # between a prefix and its continuation


def texts() -> dict[str, str]:
    parts = {
        "answer_given_question": PROMPTS.answer_given_question("the  Rhine", QUESTION, TEXTS[1]),
        "question_given_answer": PROMPTS.question_given_answer(QUESTION, "the Rhine", TEXTS[1]),
        "answer_alone": PROMPTS.answer_alone("the Rhine", TEXTS[1]),
        "question_alone": PROMPTS.question_alone(QUESTION, TEXTS[1]),
        "closed_book": PROMPTS.answer_given_question("the Rhine", QUESTION, None),
        "question_first": SWAPPED.answer_given_question("the Rhine", QUESTION, TEXTS[1]),
    }
    return {name: f"{part.prefix}{BORDER}{part.continuation}" for name, part in parts.items()}


@pytest.mark.parametrize("name", list(texts()))
def test_prompts_equal_golden_files(name: str) -> None:
    assert texts()[name] == (GOLDEN / f"{name}.txt").read_text()


def test_a_shot_without_evidence_is_for_closed_books_only() -> None:
    prompts = AnswerPrompts([Shot("a?", "b")])
    assert prompts.ask("c?", None) == "Question: a?\nAnswer: b\n\nQuestion: c?\nAnswer:"
    with pytest.raises(UserError, match=r"the shot 'a\?' has no evidence"):
        prompts.ask("c?", "evidence")


# Shots that fit; a token is a letter -------------------------------------------------------------------------------


def holding(max_tokens: int | None) -> PromptTemplate:
    return PromptTemplate("", letters_tokenizer(), max_tokens)


def longest(prompts: AnswerPrompts, texts: list[str | None]) -> int:
    return max(len(prompts.ask(QUESTION, text)) for text in texts)


def test_the_earliest_shots_go_until_every_prompt_fits_and_all_have_the_same() -> None:
    texts = [*TEXTS, None]

    def fitted(max_tokens: int | None, texts: list[str | None] = texts) -> AnswerPrompts:
        return FittingPrompts(PROMPTS, holding(max_tokens), 10).of(QUESTION, texts)

    whole, alone = longest(PROMPTS, texts), longest(AnswerPrompts(()), texts)
    assert fitted(whole + 10 + 2).shots == tuple(SHOTS)
    assert fitted(whole + 10 + 1).shots == tuple(SHOTS[1:])
    assert fitted(alone + 12).shots == ()
    assert fitted(None) is PROMPTS and fitted(1, []) is PROMPTS
    with pytest.raises(UserError, match=r"has \d+ tokens without shots, and the LM holds .* shorter evidence"):
        fitted(alone + 11)


def test_a_long_passage_takes_the_earliest_shots_of_its_own_question_alone() -> None:
    fitting = FittingPrompts(PROMPTS, holding(longest(PROMPTS, ["short"]) + 12), 10)
    dropped = [fitting.num_dropped(fitting.of(QUESTION, texts)) for texts in ([None], ["short", "x" * 60], ["short"])]
    assert dropped[0] == dropped[2] == 0 < dropped[1]
    assert fitting.of(QUESTION, ["short"]) is fitting.of(f"{QUESTION[:-1]}!", ["short"]), "openings are shared"


# Shots of a file, and ours ---------------------------------------------------------------------------------------

ROW = {"question": "q", "answer": "a", "evidence": "e"}


def test_rows_are_shots_in_their_order(tmp_path):
    path = tmp_path / "shots.jsonl"
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps({**ROW, "question": "r", "id": 3}) + "\n")
    assert read_shots(path) == [Shot("q", "a", "e"), Shot("r", "a", "e")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "evidence": None}, "shots.jsonl:1: field 'evidence' must be a text, found None"),
        (None, "shots.jsonl holds no shots; expected rows of question, answer, evidence"),
    ],
)
def test_what_is_no_shot_is_refused(tmp_path, row, message):
    path = tmp_path / "shots.jsonl"
    path.write_text("" if row is None else json.dumps(row))
    with pytest.raises(UserError, match=message):
        read_shots(path)
