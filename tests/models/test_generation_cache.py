"""The table of answers: what comes back is what was stored, or an error."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.models.answer_table import GenerationCache, generation_key
from replug.models.generation import Generated, GenerationOptions
from replug.models.score_cache import ScoreCache

OPTIONS = GenerationOptions(8, stop="\n", temperature=0.7, top_p=0.9, seed=3)
ASKED = ("lm", ["one", "two"], [0.25, 0.75], OPTIONS)
KEY = generation_key(*ASKED)
LOGPROBS, ENTROPIES = np.array([-0.1, -2.5], np.float32), np.array([0.3, 1e-8], np.float32)
ANSWER = Generated("two words", LOGPROBS, ENTROPIES, 2, 17)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scores.sqlite"


@pytest.fixture
def scores(path: Path) -> Iterator[ScoreCache]:
    scores = ScoreCache(path)
    yield scores
    scores.close()


@pytest.fixture
def cache(scores: ScoreCache) -> GenerationCache:
    return GenerationCache(scores)


def bits(answer: Generated) -> tuple:
    entropies = None if answer.token_entropies is None else answer.token_entropies.tobytes()
    counts = answer.num_prompts, answer.prompt_tokens, answer.answer_tokens
    return answer.text, answer.token_logprobs.tobytes(), entropies, *counts


# Rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER,
        replace(ANSWER, text="日本語 🙂 \x00 \ud83d half"),
        replace(ANSWER, token_entropies=None, answer_tokens=5),
        replace(ANSWER, token_entropies=None, prompt_tokens=None),
        Generated("", LOGPROBS[:0], ENTROPIES[:0], 1, 0),
    ],
    ids=["local", "any text", "served", "uncounted", "empty"],
)
def test_an_answer_comes_back_bit_for_bit(cache: GenerationCache, answer: Generated) -> None:
    cache.store("lm", {KEY: answer})
    found = cache.answers([KEY, b"another"])
    assert list(found) == [KEY]
    assert bits(found[KEY]) == bits(answer)
    assert found[KEY].token_logprobs.dtype == np.float32


def test_a_stored_answer_is_never_replaced(cache: GenerationCache) -> None:
    cache.store("lm", {KEY: ANSWER})
    cache.store("lm", {KEY: replace(ANSWER, text="another")})
    assert bits(cache.answers([KEY])[KEY]) == bits(ANSWER)


@pytest.mark.parametrize("field", ["token_logprobs", "token_entropies"])
def test_an_answer_with_numbers_that_are_not_finite_is_not_stored(cache: GenerationCache, field: str) -> None:
    for wrong in (np.nan, -np.inf):
        cache.store("lm", {KEY: replace(ANSWER, **{field: np.array([-1.0, wrong], np.float32)})})
    assert not cache.answers([KEY])


# Keys ---------------------------------------------------------------------------------------------------


def changed(**options: object) -> tuple:
    return (*ASKED[:3], replace(OPTIONS, **options))


OTHERS = [
    ("another", *ASKED[1:]),
    ("lm", ["one", "three"], *ASKED[2:]),
    ("lm", ["two", "one"], *ASKED[2:]),
    ("lm", ["onetwo", ""], *ASKED[2:]),
    ("lm", ["one"], [1.0], OPTIONS),
    (*ASKED[:2], [0.75, 0.25], OPTIONS),
    (*ASKED[:2], [0.25, np.nextafter(0.75, 1)], OPTIONS),
    changed(max_new_tokens=9),
    changed(stop=None),
    changed(stop="None"),
    changed(stop=["\n", "None"]),
    changed(temperature=0.0),
    changed(top_p=1.0),
    changed(seed=4),
]


def test_all_that_an_answer_follows_from_is_in_its_key() -> None:
    keys = [generation_key(*asked) for asked in [ASKED, *OTHERS]]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {16}


def test_an_opening_and_the_type_of_the_weights_are_not_in_the_key() -> None:
    assert generation_key(*changed(opening="one")) == KEY
    assert generation_key("lm", ("one", "two"), np.array([0.25, 0.75]), OPTIONS) == KEY


# The file -----------------------------------------------------------------------------------------------
