"""Exact match, F1 and `has_answer`, against cases known from SQuAD and DPR."""

import pytest

from replug.data.answers import contains_answer, exact_match, has_answer, normalize_answer, token_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Eiffel  Tower!", "eiffel tower"),
        ("an  apple a day", "apple day"),
        ("A", ""),
        ("don't", "dont"),
    ],
)
def test_answers_are_normalised_as_in_squad(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


def test_f1_is_over_words_and_the_best_of_the_answers() -> None:
    assert token_f1("New York City", ["New York"]) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert token_f1("New York City", ["Boston", "New York", "the New York City"]) == 1
    assert token_f1("", ["Boston"]) == 0
    assert token_f1("red red blue", ["red blue blue"]) == pytest.approx(2 / 3)  # words count as often as they occur
    assert token_f1("the", ["a"]) == exact_match("the", ["a"]) == 1


@pytest.mark.parametrize(
    ("document", "answers", "expected"),
    [
        ("He was born in Tappahannock, Virginia.", ["tappahannock, virginia"], True),
        ("He was born in Tappahannock Virginia.", ["Tappahannock, Virginia"], False),  # the comma is a token
        ("the category theory", ["cat"], False),  # whole tokens
        ("the cafe\u0301 opened", ["caf\u00e9"], True),  # one character, or two
        ("the cafe opened", ["caf\u00e9"], False),
        ("anything", ["", "\u200b"], False),
        ("\u6771\u4eac \u30bf\u30ef\u30fc", ["\u6771\u4eac"], True),
    ],
)
def test_a_document_holds_an_answer_as_dpr_has_it(document: str, answers: list[str], expected: bool) -> None:
    assert has_answer(document, answers) is expected


@pytest.mark.parametrize(
    ("prediction", "answers", "by_characters", "by_words"),
    [
        ("He was a politician.", ["politician"], True, True),
        ("POLITICIAN", ["politician"], False, True),  # neither as written, nor lower, nor capitalised
        ("Stuttgart", ["art"], True, False),  # inside a word
        ("the Hague", ["The Hague"], False, True),  # its lower case is "the hague"
        ("Washington DC", ["Washington, D.C."], False, False),  # punctuation is part of the answer
        ("Jose\u0301", ["Jos\u00e9"], False, True),  # the same letter composed otherwise
        ("istanbul", ["İstanbul"], False, False),  # lower() of the dotted capital has two characters
        ("日本の東京", ["東京"], True, True),  # of characters, unlike DPR: one run of letters
    ],
)
def test_a_prediction_contains_an_answer_as_popqas_code_has_it_and_as_dpr_has_it(
    prediction: str, answers: list[str], by_characters: bool, by_words: bool
) -> None:
    assert contains_answer(prediction, answers) is by_characters
    assert has_answer(prediction, answers) is by_words


OTHER_SCRIPTS = [
    ("答案是 308分。", "308", 1 / 3, True),  # one word of one, and of four characters and a number
    ("「巴塞尔」", "巴塞尔", 1.0, True),
    ("在巴塞尔城", "巴塞尔", 0.75, True),
    ("กรุงเทพ", "กรุงเทพ", 1.0, True),
    ("Die Loire – „der Fluss“", "Die Loire der Fluss", 1.0, False),
    ("¿Quién? ¡Él!", "quién él", 1.0, False),
]


@pytest.mark.parametrize(("prediction", "answer", "f1", "holds"), OTHER_SCRIPTS)
def test_answers_in_other_scripts_are_compared_by_their_characters_and_punctuation(
    prediction: str, answer: str, f1: float, holds: bool
) -> None:
    assert token_f1(prediction, [answer]) == pytest.approx(f1)
    assert has_answer(prediction, [answer]) == holds
