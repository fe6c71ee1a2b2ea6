"""Words by which texts are searched and compared, predictions against answers, and questions made by a rule.

Answers are compared as SQuAD, DPR and PopQA do it. A rule takes a date, a number or a name out of a sentence.
"""

import gzip
import json
import unicodedata

import numpy as np
import pytest

from replug.data.answers import contains_answer, exact_match, has_answer, normalize_answer, token_f1
from replug.data.questions import questions_of
from replug.data.records import Document
from replug.data.words import compared_words, ngram_hashes, overlaps, search_words
from tests.support.shared_data import shared

SEARCHED = {
    "The Loire flows, 1,006 km.": ["the", "loire", "flows", "006", "km"],
    "L\u2019e\u0301te\u0301 \u2014 STRASSE": ["e\u0301te\u0301", "strasse"],
    "हिन्दी में": ["हिन्दी", "में"],  # of letters with marks
    "莱茵河流经NFL，海": ["莱茵", "茵河", "河流", "流经", "nfl", "海"],
    "ラーメンを3杯": ["ラー", "ーメ", "メン", "ンを", "杯"],
    "ภาษา": ["ภา", "าษ", "ษา"],
    "": [],
}


@pytest.mark.parametrize("text", SEARCHED)
def test_a_text_is_searched_by_its_words_or_pairs_of_characters(text: str) -> None:
    assert search_words(text) == SEARCHED[text]


SHARED = {
    "Chinese": "莱茵河是西欧第一大河发源于瑞士境内的阿尔卑斯山北麓"
    "西北流经列支敦士登奥地利法国德国和荷兰最后在鹿特丹附近注入北海",
    "Thai": "แม่น้ำเจ้าพระยาเป็นแม่น้ำสายหลักของประเทศไทยไหลผ่านกรุงเทพมหานครก่อนลงสู่อ่าวไทยและมีความสำคัญต่อการเกษตรของประเทศ",
    "Hindi": "गंगा भारत की सबसे लंबी नदी है और यह हिमालय से निकलकर बंगाल की खाड़ी में गिरती है",
}


@pytest.mark.parametrize("language", SHARED)
def test_texts_that_share_a_passage_share_an_ngram_and_others_do_not(language: str) -> None:
    passage = SHARED[language]
    first, second = (ngram_hashes(begin + passage + end, 13) for begin, end in (("乙", "甲"), ("กข ", " नया")))
    assert overlaps(first, np.sort(second))
    turned = unicodedata.normalize("NFC", passage[::-1])
    assert not overlaps(first, np.sort(ngram_hashes(turned, 13)))


def test_a_text_is_compared_by_pieces_of_about_two_characters() -> None:
    passage = SHARED["Chinese"]
    pieces = compared_words(passage)
    assert "".join(pieces) == passage and len(passage) / 3 < len(pieces) < len(passage) / 1.5


# Answers --------------------------------------------------------------------------------------------------------------


def test_answers_are_normalised_as_in_squad_and_f1_is_over_words_and_the_best_of_the_answers() -> None:
    texts = ["The Eiffel  Tower!", "an  apple a day", "A", "don't"]
    assert [normalize_answer(text) for text in texts] == ["eiffel tower", "apple day", "", "dont"]
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
    ],
)
def test_a_document_holds_an_answer_as_dpr_has_it(document: str, answers: list[str], expected: bool) -> None:
    assert has_answer(document, answers) is expected


@pytest.mark.parametrize(
    ("prediction", "answers", "by_characters", "by_words"),
    [
        ("POLITICIAN", ["politician"], False, True),  # neither as written, nor lower, nor capitalised
        ("Stuttgart", ["art"], True, False),  # inside a word
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


@pytest.mark.parametrize(
    ("prediction", "answer", "f1", "holds"),
    [
        ("答案是 308分。", "308", 1 / 3, True),  # one word of one, and of four characters and a number
        ("「巴塞尔」", "巴塞尔", 1.0, True),
        ("在巴塞尔城", "巴塞尔", 0.75, True),
        ("Die Loire – „der Fluss“", "Die Loire der Fluss", 1.0, False),
        ("¿Quién? ¡Él!", "quién él", 1.0, False),
    ],
)
def test_answers_in_other_scripts_are_compared_by_their_characters_and_punctuation(
    prediction: str, answer: str, f1: float, holds: bool
) -> None:
    assert token_f1(prediction, [answer]) == pytest.approx(f1)
    assert has_answer(prediction, [answer]) == holds


# Questions ------------------------------------------------------------------------------------------------------------

# One sentence with one span each: the document's text, its question and the answer.
BY_LANGUAGE = {
    "en": (
        "Alhambra\nThe walls of the palace were restored with great care after 1828.",
        "when Alhambra: The walls of the palace were restored with great care after",
        "1828",
    ),
    "de": (
        "Die Brücke über den Fluss wurde am 4. Mai 1891 für den Verkehr geöffnet und ist eine von mehreren.",
        "wann Die Brücke über den Fluss wurde am für den Verkehr geöffnet und ist eine von mehreren",
        "4. Mai 1891",
    ),
    "ar": (
        "فتحت المكتبة أبوابها لجميع سكان المدينة في عام 1862 بعد بناء طويل.",
        "متى فتحت المكتبة أبوابها لجميع سكان المدينة في عام بعد بناء طويل",
        "1862",
    ),
    "hi": (
        "यह पुल नदी के दोनों किनारों को जोड़ता है और 1893 में बना था।",
        "यह पुल नदी के दोनों किनारों को जोड़ता है और कब में बना था",
        "1893",
    ),
    "th": (
        "หอสมุดแห่งนี้เปิดให้ประชาชนทั่วไปเข้าใช้ครั้งแรกใน พ.ศ. 2448 และตั้งอยู่ริมแม่น้ำสายใหญ่ของเมือง",
        "หอสมุดแห่งนี้เปิดให้ประชาชนทั่วไปเข้าใช้ครั้งแรกใน พ.ศ. เมื่อไร และตั้งอยู่ริมแม่น้ำสายใหญ่ของเมือง",
        "2448",
    ),
    "ja": (
        "この図書館は1905年4月に市の中心に開かれ、今も使われている。",
        "この図書館は いつ に市の中心に開かれ、今も使われている",
        "1905年4月",
    ),
    "zh": ("他的第一部小说《边城》描写了河边小镇的生活。", "他的第一部小说《 谁或什么 》描写了河边小镇的生活", "边城"),
    "ko": (
        "이 도서관은 도시의 중심에 있으며 책이 모두 8500 권 정도 있다고 한다.",
        "이 도서관은 도시의 중심에 있으며 책이 모두 얼마 권 정도 있다고 한다",
        "8500",
    ),
}


@pytest.mark.parametrize("language", BY_LANGUAGE)
def test_a_span_is_taken_out_and_the_language_of_the_document_asks_for_it(language: str) -> None:
    text, question, answer = BY_LANGUAGE[language]
    assert questions_of(Document("d7", text, "text", "page"), 2, seed=0) == [(question, answer)]


def test_a_break_within_a_sentence_and_an_abbreviation_do_not_end_it() -> None:
    text = "The observatory on the hill above the old town was designed by\nthe brother of Dr. Hansteen and is open.\n"
    ((made, answer),) = questions_of(Document("d", text, "text", "d"), 2, seed=0)
    assert answer in ("Hansteen", "Dr. Hansteen")
    assert made.startswith("who or what The observatory on the hill above the old town was designed by the")


CODE = """import gzip
from pathlib import Path

LIMIT = 4096  # bytes of one Block that the Reader takes

def read_rows(path: Path, limit: int = 20) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if len(line) > 3 and Path(line).suffix != "Old"]
"""
PAGE = f"""# Reading

| Name | Rows | Year of the Release |
|------|------|------|
| Alpha Set | 1200 | 2019 |

- Install 3 packages
- [The first Guide](https://example.org/2019/index.html)

```python
{CODE}
Print the 20 rows of the Table to the Terminal and end here.
```

    $ run --limit 20 --source Archive.gz and wait for the Result 2020.
"""


def test_a_markdown_page_asks_for_the_terms_in_its_prose_and_not_in_code_tables_and_lists() -> None:
    for text in (CODE, PAGE):
        assert questions_of(Document("d", text, "text", "d"), 5, seed=0) == []
    text = f"{PAGE}\nThe reader opens each file of the folder that the option `rows.path` names.\n"
    question = "who or what Reading: The reader opens each file of the folder that the option names"
    assert questions_of(Document("d", text, "text", "d"), 5, seed=0) == [(question, "rows.path")]


@pytest.mark.parametrize("language", ["en", "ar", "zh"])
def test_real_passages_give_questions_whose_answer_they_hold_and_the_same_ones_again(language: str) -> None:
    with gzip.open(shared(f"xquad/{language}_passages.jsonl.gz"), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:30]
    documents = [Document(row["id"], row["text"], "text", row["source"]) for row in rows]
    made = [(document.text, *of) for document in documents for of in questions_of(document, 2, seed=1)]
    assert len(made) >= 30
    assert all(has_answer(text, [answer]) and answer not in question for text, question, answer in made)
    assert made == [(document.text, *of) for document in documents for of in questions_of(document, 2, seed=1)]
    assert made != [(document.text, *of) for document in documents for of in questions_of(document, 2, seed=2)]
