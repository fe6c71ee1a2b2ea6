"""The stand-in LM's scores, worked out by hand."""

import math

import numpy as np
import pytest

from replug.models.generation import GenerationOptions
from replug.models.local.stand_in_lm import StandInLM
from tests.support.lm_answers import mixed, texts_of

LM = StandInLM()


def test_a_continuation_of_two_words_has_the_score_computed_by_hand() -> None:
    score = LM.score(["red blue red"], [" red blue"])[0]
    red = 0.5 * 2 / 3 + 0.5 / 256**4  # two of three words; four bytes with its space
    blue = 0.5 * 1 / 4 + 0.5 / 256**5  # one of four words by now
    np.testing.assert_allclose(score.token_logprobs, [math.log(red), math.log(blue)], rtol=1e-6)
    assert score.num_tokens == 2
    assert score.sum_logprob == pytest.approx(math.log(red) + math.log(blue))


def test_a_word_that_was_not_seen_is_as_likely_as_its_bytes() -> None:
    score = LM.score([""], ["日"])[0]
    assert score.sum_logprob == pytest.approx(math.log(0.5) - 3 * math.log(256))


def test_a_very_long_word_has_a_finite_score() -> None:
    score = LM.score(["a prefix"], [" " + "long" * 100])[0]  # 401 bytes without white space, such as a URL
    assert score.sum_logprob == pytest.approx(math.log(0.5) - 401 * math.log(256))


def test_generation_repeats_the_most_frequent_word_until_the_stop() -> None:
    assert texts_of(LM, ["b a b", ""], 3) == ["b b b", ""]
    assert texts_of(LM, ["b a b"], 3, stop=" ") == ["b"]
    assert texts_of(LM, ["b a b"], 3, stop="b b") == [""]
    assert texts_of(LM, ["b a b"], 3, stop=["x", " "]) == ["b"]


def test_the_entropies_of_an_answer_are_those_of_the_words_that_it_chooses_from() -> None:
    found = mixed(LM, ["aa bb aa", "bb"], [0.75, 0.25], GenerationOptions(2))
    words, counts, expected = ["aa", "bb"], [["aa", "bb", "aa"], ["bb"]], []
    for chosen in found.text.split():
        masses = [
            sum(
                weight * (0.5 * known.count(word) / len(known) + 0.5 / 256**3)
                for weight, known in zip([0.75, 0.25], counts, strict=True)
            )
            for word in words
        ]
        shares = [mass / sum(masses) for mass in masses]
        expected.append(-sum(share * math.log(share) for share in shares))
        counts = [[*known, chosen] for known in counts]
    np.testing.assert_allclose(found.token_entropies, expected, rtol=1e-6)
    assert (found.num_prompts, found.prompt_tokens, found.num_tokens) == (2, 4, 2)
    nothing = mixed(LM, [""], [1.0], GenerationOptions(2))
    assert (nothing.prompt_tokens, nothing.num_tokens, nothing.mean_entropy) == (0, 0, None)


def test_the_answer_of_several_prompts_is_the_mixtures() -> None:
    # A word of three bytes with its space: 0.5 * its share + 0.5 / 256**3.
    prompts = ["aa aa bb", "bb bb bb"]
    tiny = 0.5 / 256**3
    heavy = mixed(LM, prompts, [0.9, 0.1], GenerationOptions(1))
    assert heavy.text == "aa"
    assert heavy.sum_logprob == pytest.approx(math.log(0.9 * (0.5 * 2 / 3 + tiny) + 0.1 * tiny))
    light = mixed(LM, prompts, [0.5, 0.5], GenerationOptions(2))
    assert light.text == "bb bb"
    first = 0.5 * (0.5 / 3 + tiny) + 0.5 * (0.5 + tiny)
    second = 0.5 * (0.5 * 2 / 4 + tiny) + 0.5 * (0.5 + tiny)  # both prompts have been given the first word
    np.testing.assert_allclose(light.token_logprobs, np.log([first, second]), rtol=1e-6)
