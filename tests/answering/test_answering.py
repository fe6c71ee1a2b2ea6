"""From a question to a ranked answer: factors equal direct scoring, nothing is asked twice, and prompts to the byte."""

from collections import Counter
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replug.answering.answerer import (
    Answerer,
    Factors,
    logprobs_of_samples,
    submit_factors,
)
from replug.answering.prompts import SCORED, AnswerPrompts, FittingPrompts, Shot
from replug.config.errors import UserError
from replug.models.black_box_lm import AsyncLM, Call, ScoreCall
from replug.models.generation import Generated
from replug.models.lm_source import InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import CachingLM
from replug.web.passages import Passage
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


LABELS = ("true", "false", "the Rhine")
CANDIDATES = [("the Rhine", 0, None), ("Basel", 0, None), ("the Rhine", 1, None), ("Lyon", 2, None)]


def direct(lm: AsyncLM, prefix: str, continuation: str) -> float:
    return lm.score([prefix], [continuation])[0].sum_logprob


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> InProcessLM:
    return InProcessLM(load(write_llama, tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("kind", ["stand_in", "llama"])
def test_factors_equal_direct_scoring(kind: str, llama: InProcessLM) -> None:
    lm: AsyncLM = InProcessLM(StandInLM()) if kind == "stand_in" else llama
    prompts = AnswerPrompts(SHOTS if kind == "stand_in" else ())
    passages = [replace(passage, text=passage.text[:30]) for passage in PASSAGES]
    question = QUESTION[:20]
    factors = submit_factors((lm, prompts), (lm, prompts), question, passages, CANDIDATES)()
    shots, answer_first = (
        "".join(
            "\n".join(f"{label}: {' '.join(getattr(shot, label.lower()).split())}" for label in order.split()) + "\n\n"
            for shot in prompts.shots
        )
        for order in ("Evidence Question Answer", "Evidence Answer Question")
    )
    tolerance = {"rtol": 0, "atol": 1e-3}
    for row, candidate in enumerate(CANDIDATES):
        evidence, answer = " ".join(passages[candidate[1]].text.split()), candidate[0]
        block = f"{shots}Evidence: {evidence}\nQuestion: {question}\nAnswer:"
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
    submit_factors((lm, PROMPTS), (lm, PROMPTS), QUESTION, passages, [("a", 9, -1.0)])()
    first, second = PROMPTS.openings(has_evidence=True)
    assert lm.openings == [first, first, second]
    assert sum(lm.asked.values()) == len(lm.asked) == 10 + 2, "the log-prob of a sample is known"


def answered(lm: AsyncLM, prompts: AnswerPrompts, passages: list[Passage], **options: Any) -> Factors:
    answerer = Answerer(lm, lm, **{"max_new_tokens": 5, **options})
    return answerer.submit(QUESTION[:20], passages, prompts, prompts)()()


@pytest.mark.parametrize("labels", [(), LABELS], ids=["sampled", "labels"])
def test_a_question_without_passages_has_no_answer(labels: tuple[str, ...]) -> None:
    lm = CountingLM()
    assert answered(lm, PROMPTS, [], labels=labels).answers == () and not lm.asked


@pytest.mark.parametrize("kind", ["stand_in", "llama"])
def test_the_same_seed_gives_the_same_answers(kind: str, llama: InProcessLM, tmp_path: Path) -> None:
    lm: AsyncLM = InProcessLM(StandInLM()) if kind == "stand_in" else llama
    prompts = PROMPTS if kind == "stand_in" else AnswerPrompts(())
    passages = [replace(passage, text=passage.text[:30]) for passage in PASSAGES]
    cached = CachingLM(lm, tmp_path / "scores.sqlite")
    first, *others = (answered(one, prompts, passages, max_new_tokens=3) for one in (lm, lm, cached, cached))
    cached.close()
    for other in others:
        np.testing.assert_equal(asdict(other), asdict(first))
    assert answered(lm, prompts, passages, max_new_tokens=3, seed=1).answers != first.answers


# Candidates --------------------------------------------------------------------------------------------------------


def drawn(text: str, *logprobs: float) -> Generated:
    return Generated(text, np.array(logprobs, np.float32))


def test_equal_answers_are_one_with_the_largest_log_prob_and_empty_ones_none() -> None:
    samples = [drawn(" New\t York", -2, -1), drawn("  ", -0.1), drawn(" Paris", -2), drawn(" New York ", -0.5, -0.5)]
    assert logprobs_of_samples(samples, 3) == {"New York": -1.0, "Paris": -2.0}
    assert logprobs_of_samples(samples, 2) == {"New York": None, "Paris": -2.0}, "two tokens may have no end"


@pytest.mark.parametrize("passages", [PASSAGES[:2], []])
def test_a_sample_that_was_cut_is_scored_with_its_end(llama: InProcessLM, passages: list[Passage]) -> None:
    """Sum naively over the tokens of the answer and the line's end."""
    prompts = AnswerPrompts(())
    short = [replace(passage, text=passage.text[:20]) for passage in passages]
    if short:
        factors = answered(llama, prompts, short, max_new_tokens=2)
        found = list(zip(factors.answers, factors.passages, factors.answer_given_question, strict=True))
    else:
        logprobs = Answerer(llama, llama, 2).submit_alone(QUESTION[:20], None, prompts)()
        found = [(answer, None, logprob) for answer, logprob in logprobs.items()]
    assert found
    for answer, number, logprob in found:
        prompt = prompts.ask(QUESTION[:20], None if number is None else short[number].text)
        [score] = llama.score([prompt], [f" {answer}\n"])
        assert logprob == pytest.approx(float(score.token_logprobs.sum()), abs=1e-4)


# Prompts, to the byte, and how many shots fit -------------------------------------------------------------------------


GOLDEN = Path(__file__).parent / "golden"
BORDER = "█"  # between a prefix and its continuation


def texts() -> dict[str, str]:
    evidence = TEXTS[1]
    parts = {factor: PROMPTS.part(factor, QUESTION, "the  Rhine", evidence) for factor in SCORED}
    parts["closed_book"] = PROMPTS.part("answer_given_question", QUESTION, "the Rhine", None)
    return {name: f"{prefix}{BORDER}{continuation}" for name, (_, prefix, continuation) in parts.items()}


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
    return PromptTemplate(letters_tokenizer(), max_tokens)


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
