"""From a question to a ranked answer: factors, prompts to the byte, rerankers by hand, and the fitting of weights."""

import math
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replug.answering.answerer import (
    GRID,
    RERANKERS,
    Answerer,
    Factors,
    GradedQuestion,
    best_answer,
    fit_weights,
    logprobs_of_samples,
    normalized_over_labels,
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


class RecordingLM(InProcessLM):
    """The stand-in; keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__(StandInLM())
        self.calls: list[Call] = []

    def submit_call(self, call: Call) -> "Future[list]":
        self.calls.append(call)
        return super().submit_call(call)


CANDIDATES = [("the Rhine", 0, None), ("Basel", 0, None), ("the Rhine", 1, None), ("Lyon", 2, None)]


def direct(lm: AsyncLM, prefix: str, continuation: str) -> float:
    return lm.score([prefix], [continuation])[0].sum_logprob


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> InProcessLM:
    return InProcessLM(load(write_llama, tmp_path_factory.mktemp("llama")))


def shown(order: str) -> str:
    """Both shots, their parts in this order."""
    labels = order.split()
    blocks = [[f"{label}: {' '.join(getattr(shot, label.lower()).split())}\n" for label in labels] for shot in SHOTS]
    return "".join("".join(block) + "\n" for block in blocks)


@pytest.mark.parametrize("kind", ["stand_in", "llama"])
def test_factors_equal_direct_scoring(kind: str, llama: InProcessLM) -> None:
    """With shots by the stand-in; the tiny LM has no room for them."""
    lm: AsyncLM = InProcessLM(StandInLM()) if kind == "stand_in" else llama
    prompts, question = AnswerPrompts(SHOTS if kind == "stand_in" else ()), QUESTION[:20]
    passages = [replace(passage, text=passage.text[:30]) for passage in PASSAGES]
    factors = submit_factors((lm, prompts), (lm, prompts), question, passages, CANDIDATES)()
    orders = ("Evidence Question Answer", "Evidence Answer Question")
    shots, answer_first = map(shown, orders) if prompts.shots else ("", "")
    evidence = [f"Evidence: {' '.join(passage.text.split())}\n" for passage in passages]
    asked, near = f" {question}\n", {"rtol": 0, "atol": 1e-3}
    for row, (answer, number, _) in enumerate(CANDIDATES):
        expected = [
            (factors.answer_given_question, f"{shots}{evidence[number]}Question:{asked}Answer:", f" {answer}\n"),
            (factors.question_given_answer, f"{answer_first}{evidence[number]}Answer: {answer}\nQuestion:", asked),
            (factors.answer_alone, f"{answer_first}{evidence[number]}Answer:", f" {answer}\n"),
        ]
        for found, prefix, continuation in expected:
            np.testing.assert_allclose(found[row], direct(lm, prefix, continuation), **near)
    alone = [direct(lm, f"{shots}{block}Question:", asked) for block in evidence]
    np.testing.assert_allclose(factors.question_alone, alone, **near)
    np.testing.assert_allclose(np.exp(factors.passage), [0.5, 0.3, 0.2])
    assert factors.passages.tolist() == [0, 0, 1, 2]


def test_every_call_names_its_opening_and_many_passages_are_several_calls() -> None:
    lm = RecordingLM()
    passages = [replace(PASSAGES[0], text=f"text {number}", probability=0.1) for number in range(10)]
    submit_factors((lm, PROMPTS), (lm, PROMPTS), QUESTION, passages, [("a", 9, -1.0)])()
    first, second = PROMPTS.openings(has_evidence=True)
    assert [call.opening for call in lm.calls] == [first, first, second]
    asked = [pair for call in lm.calls for pair in zip(call.prefixes, call.continuations, strict=True)]
    assert len(asked) == len(set(asked)) == 10 + 2, "the log-prob of a sample is known"


def answered(lm: AsyncLM, prompts: AnswerPrompts, passages: list[Passage], **options: Any) -> Factors:
    answerer = Answerer(lm, lm, **{"max_new_tokens": 5, **options})
    return answerer.submit(QUESTION[:20], passages, prompts, prompts)()()


@pytest.mark.parametrize("labels", [(), ("true", "false")])
def test_a_question_without_passages_has_no_answer(labels: tuple[str, ...]) -> None:
    lm = RecordingLM()
    answers = answered(lm, PROMPTS, [], labels=labels).answers
    asked = [text for call in lm.calls for text in (call.prefixes if isinstance(call, ScoreCall) else call.prompts)]
    assert answers == () and not asked


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


@pytest.mark.parametrize("name", [*SCORED, "closed_book"])
def test_prompts_equal_golden_files(name: str) -> None:
    given = {"closed_book": ("answer_given_question", QUESTION, "the Rhine", None)}
    _, prefix, continuation = PROMPTS.part(*given.get(name, (name, QUESTION, "the  Rhine", TEXTS[1])))
    assert f"{prefix}█{continuation}" == (GOLDEN / f"{name}.txt").read_text()


def test_a_shot_without_evidence_is_for_closed_books_only() -> None:
    prompts = AnswerPrompts([Shot("a?", "b")])
    assert prompts.ask("c?", None) == "Question: a?\nAnswer: b\n\nQuestion: c?\nAnswer:"
    with pytest.raises(UserError, match=r"the shot 'a\?' has no evidence"):
        prompts.ask("c?", "evidence")


def holding(max_tokens: int | None) -> PromptTemplate:
    return PromptTemplate(letters_tokenizer(), max_tokens)  # a token is a letter


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


# Every reranker against an example that is computed by hand -----------------------------------------------------------

# Two passages; "a" was given by both, "b" by the first, "c" by the second.
A_GIVEN_QP = [0.5, 0.25, 0.125, 0.5]  # a of the first, b, a of the second, c
Q_GIVEN_AP = [0.1, 0.4, 0.2, 0.1]
A_GIVEN_P = [0.2, 0.1, 0.3, 0.4]
Q_GIVEN_P = [0.05, 0.02]
P_GIVEN_Q = [0.75, 0.25]


def factors_of() -> Factors:
    return Factors(
        ("a", "b", "a", "c"),
        np.array([0, 0, 1, 1]),
        *(np.log(some) for some in (A_GIVEN_QP, Q_GIVEN_AP, A_GIVEN_P, Q_GIVEN_P, P_GIVEN_Q)),
    )


BY_HAND = {  # of a, b and c
    "direct": [0.5, 0.25, 0.5],
    "rag": [0.75 * 0.5 + 0.25 * 0.125, 0.75 * 0.25, 0.25 * 0.5],
    # a: the better of 0.1 * 0.2 * 0.5 / 0.05 = 0.2 and 0.2 * 0.3 * 0.125 / 0.02 = 0.375
    "noisy_channel": [0.375, 0.4 * 0.1 * 0.25 / 0.05, 0.1 * 0.4 * 0.5 / 0.02],
    # a: the better of 0.75 * 0.2 and 0.25 * 0.375
    "poe": [0.15, 0.75 * 0.4 * 0.1 * 0.25 / 0.05, 0.25 * 0.1 * 0.4 * 0.5 / 0.02],
}


@pytest.mark.parametrize("name", list(RERANKERS))
def test_scores_equal_those_computed_by_hand(name: str) -> None:
    scores = RERANKERS[name].score(factors_of(), RERANKERS[name].default_weights)
    assert list(scores) == ["a", "b", "c"]
    assert [math.exp(score) for score in scores.values()] == pytest.approx(BY_HAND[name])


def test_weights_are_exponents() -> None:
    weights = {"question_given_answer": 2.0, "answer_alone": 0.5, "answer_given_question": 0.0, "question_alone": 1.0}
    scores = RERANKERS["noisy_channel"].score(factors_of(), weights)
    assert math.exp(scores["b"]) == pytest.approx(0.4**2 * 0.1**0.5 / 0.05)
    scores = RERANKERS["poe"].score(factors_of(), weights | {"passage": 3.0})
    assert math.exp(scores["b"]) == pytest.approx(0.75**3 * 0.4**2 * 0.1**0.5 / 0.05)
    scores = RERANKERS["rag"].score(factors_of(), {"passage": 2.0, "answer_given_question": 0.5})
    assert math.exp(scores["a"]) == pytest.approx(0.75**2 * 0.5**0.5 + 0.25**2 * 0.125**0.5)


def test_a_passage_of_no_probability_gives_its_answers_none_unless_it_weighs_nothing() -> None:
    factors = replace(factors_of(), passage=np.array([0.0, -np.inf]))
    for name in ("rag", "poe"):
        weights = RERANKERS[name].default_weights
        scores = RERANKERS[name].score(factors, weights)
        assert not any(math.isnan(score) for score in scores.values())
        assert best_answer(scores) in ("a", "b")
        assert all(map(math.isfinite, RERANKERS[name].score(factors, weights | {"passage": 0.0}).values()))
    assert RERANKERS["rag"].score(factors, {"passage": 1.0, "answer_given_question": 1.0})["c"] == -math.inf


def test_the_factors_of_fewer_passages_are_those_of_what_these_gave() -> None:
    first = factors_of().of_first(1)
    assert (first.answers, first.distinct) == (("a", "b"), ("a", "b"))
    np.testing.assert_allclose(np.exp(first.answer_given_question), [0.5, 0.25])
    np.testing.assert_allclose(np.exp(first.question_alone), [0.05])
    np.testing.assert_allclose(first.passage, [0.0])  # its share of the first
    assert factors_of().of_first(2).passage == pytest.approx(factors_of().passage)
    none = factors_of().of_first(0)
    assert (none.answers, len(none.passage)) == ((), 0)


def test_labels_probabilities_are_shares_within_each_passage() -> None:
    shares = [0.3, 0.1, 0.2, 0.2], [0.5] * 4, [0.1, 0.4, 0.3, 0.1], [0.1] * 2, [0.6, 0.4]
    factors = Factors(("yes", "no", "yes", "no"), np.array([0, 0, 1, 1]), *map(np.log, shares))
    shared = normalized_over_labels(factors)
    np.testing.assert_allclose(np.exp(shared.answer_given_question), [0.75, 0.25, 0.5, 0.5])
    np.testing.assert_allclose(np.exp(shared.answer_alone), [0.2, 0.8, 0.75, 0.25])
    np.testing.assert_array_equal(shared.question_given_answer, factors.question_given_answer)


def test_a_factor_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="answer_given_question holds"):
        replace(factors_of(), answer_given_question=np.array([np.nan, -1, -1, -1]))


# Fitted weights --------------------------------------------------------------------------------------------------

POE = RERANKERS["poe"]


def question(rng: np.random.Generator, right_by: str) -> GradedQuestion:
    """Three answers of one passage; the right one is the best by one factor, all others are noise."""
    logprobs = {name: -5 * rng.random(3) for name in ("answer_given_question", "question_given_answer", "answer_alone")}
    factors = Factors(("a", "b", "c"), np.zeros(3, int), **logprobs, question_alone=-np.ones(1), passage=np.zeros(1))
    right = int(np.argmax(logprobs[right_by]))
    return factors, {answer: float(number == right) for number, answer in enumerate("abc")}


def questions(num: int, right_by: str = "question_given_answer", seed: int = 0) -> list[GradedQuestion]:
    rng = np.random.default_rng(seed)
    return [question(rng, right_by) for _ in range(num)]


def test_the_factor_that_knows_the_answer_gets_the_weight() -> None:
    weights, gain, default_gain = fit_weights(POE, questions(60))
    assert gain > 0.95 > default_gain + 0.2
    assert weights["question_given_answer"] > 4 * weights["answer_alone"]
    assert weights["question_alone"] == weights["passage"] == 1.0  # change nothing, so stay
    assert set(weights.values()) <= set(GRID)


def test_without_questions_or_without_a_gain_the_defaults_stay() -> None:
    assert fit_weights(POE, []) == (POE.default_weights, 0.0, 0.0)
    flat = [(factors, dict.fromkeys("abc", 1.0)) for factors, _ in questions(10)]
    assert fit_weights(POE, flat) == (POE.default_weights, 1.0, 1.0)


def test_a_question_without_candidates_counts_and_gains_nothing() -> None:
    empty = Factors((), np.empty(0, int), *(np.empty(0) for _ in range(3)), -np.ones(1), np.zeros(1))
    assert fit_weights(POE, [(empty, {})])[1] == 0.0
