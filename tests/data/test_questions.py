"""Questions about a document made by a rule: a date, a number or a name is taken out of a sentence."""

import gzip
import json

import pytest

from replug.data.answers import has_answer
from replug.data.questions import questions_of
from replug.data.records import Document
from tests.support.shared_data import shared

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
    "fr": (
        "La cathédrale est dessinée par Pierre de Montreuil et les tours sont inachevées.",
        "qui ou quoi La cathédrale est dessinée par et les tours sont inachevées",
        "Pierre de Montreuil",
    ),
    "ru": (
        "Эта библиотека была открыта для всех жителей города в 1862 году.",
        "когда Эта библиотека была открыта для всех жителей города в году",
        "1862",
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


@pytest.mark.parametrize("text", [CODE, PAGE], ids=["source code", "Markdown"])
def test_nothing_is_made_of_code_tables_and_lists(text: str) -> None:
    assert questions_of(Document("d", text, "text", "d"), 5, seed=0) == []


def test_a_markdown_page_asks_for_the_terms_in_its_prose() -> None:
    text = f"{PAGE}\nThe reader opens each file of the folder that the option `rows.path` names.\n"
    question = "who or what Reading: The reader opens each file of the folder that the option names"
    assert questions_of(Document("d", text, "text", "d"), 5, seed=0) == [(question, "rows.path")]


@pytest.mark.parametrize("language", ["en", "de", "ar", "th", "zh"])
def test_real_passages_give_questions_whose_answer_they_hold_and_the_same_ones_again(language: str) -> None:
    with gzip.open(shared(f"xquad/{language}_passages.jsonl.gz"), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:60]
    documents = [Document(row["id"], row["text"], "text", row["source"]) for row in rows]
    made = [(document.text, *of) for document in documents for of in questions_of(document, 2, seed=1)]
    assert len(made) >= 60
    assert all(has_answer(text, [answer]) and answer not in question for text, question, answer in made)
    assert made == [(document.text, *of) for document in documents for of in questions_of(document, 2, seed=1)]
    assert made != [(document.text, *of) for document in documents for of in questions_of(document, 2, seed=2)]
