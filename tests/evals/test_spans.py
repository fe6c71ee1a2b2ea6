"""The spans of texts that are measured: their words, their tokens, and whether the corpus holds them."""

import gzip
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replug.config.evaluation_schema import EvaluationConfig, TextsConfig
from replug.config.load import load_evaluation_config
from replug.config.schema import LMConfig
from replug.data.records import Document, Example
from replug.data.sources.records import SourceText
from replug.data.tokenizing import load_plain, word_tokenizer
from replug.evals.kinds import check_evaluation
from replug.evals.language_modelling import draw_evenly, num_words, read_spans, spans_of
from replug.evals.leakage import find_overlaps, overlap_line
from replug.evals.loop import Item
from replug.models.build import lm_tokenizer_json
from replug.models.local.stand_in_lm import WORD
from tests.support.preparing import write_files
from tests.support.real_models import real_lm
from tests.support.shared_data import shared
from tests.support.tiny_lms import write_gpt2, write_tokenizer

WORDS = load_plain(word_tokenizer(WORD.pattern))
PAIRS = load_plain(word_tokenizer(r"\s?\S{1,2}|\s"))  # cuts words after two characters


def spans(text: str, tokenizer, keys: TextsConfig) -> list[Example]:
    return list(spans_of(SourceText("t", text, "all"), tokenizer, keys))


def rule(scored: int, context: int | None = None, query: int | None = None) -> TextsConfig:
    return TextsConfig(scored_tokens=scored, context_tokens=context or scored, query_tokens=query or scored)


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=200), st.integers(1, 7))
def test_every_character_is_scored_once_and_stands_behind_the_piece_before_it(text, tokens):
    found = spans(text, WORDS, rule(tokens))
    assert "".join(span.continuation for span in found) == text
    assert found[0].context == found[0].query == ""
    assert [span.context for span in found[1:]] == [span.continuation for span in found[:-1]]


def test_a_span_holds_so_many_tokens_and_the_last_what_is_left():
    [a, b] = spans_of(SourceText("t", "one two three four five", "news"), WORDS, rule(3))
    assert (a.continuation, b.continuation) == ("one two three", " four five")
    assert (a.id, b.id, a.domain, a.source) == ("t#0-13", "t#13-23", "news", "t")


def test_what_is_read_and_what_is_searched_for_have_lengths_of_their_own():
    found = spans("a b c d e f g", WORDS, rule(scored=1, context=3, query=2))
    assert [(span.continuation, span.context, span.query) for span in found][::3] == [
        ("a", "", ""),
        (" d", "a b c", " b c"),
        (" g", " d e f", " e f"),
    ]


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from("ab é\n\t"), min_size=1, max_size=80), st.integers(1, 9))
def test_the_words_and_line_ends_of_all_spans_are_those_of_the_text_whatever_the_tokens(text, tokens):
    """A word that a border cuts counts once."""
    for tokenizer in (WORDS, PAIRS):
        found = spans(text, tokenizer, rule(tokens))
        assert sum(map(num_words, found)) == len(text.split()) + text.count("\n")


def test_spans_are_drawn_from_equal_parts_of_all_so_every_text_gives_some():
    rows = draw_evenly(64 * 39, 200, seed=0)
    assert len(rows) == len(set(rows)) == 200 and rows == sorted(rows)
    of_texts = np.bincount(np.array(rows) // 39, minlength=64)
    assert of_texts.min() >= 2 and of_texts.max() <= 5
    assert draw_evenly(64 * 39, 200, seed=0) == rows != draw_evenly(64 * 39, 200, seed=1)
    assert draw_evenly(3, None, 0) == draw_evenly(3, 5, 0) == [0, 1, 2]


# Spans of configurations ----------------------------------------------------------------------------------------------


LONG_WORDS = " ".join(f"word{number:05d}" for number in range(40))


def config_of(tmp_path: Path, *overrides: str) -> EvaluationConfig:
    path = tmp_path / "evaluation.yaml"
    texts = "texts: {path: texts, scored_tokens: 5}"
    path.write_text(f"evaluation: language_modelling\nmethods: [none]\nlm: {{path: stand_in}}\n{texts}\n")
    config = load_evaluation_config(path, [f"out={tmp_path / 'out'}", *overrides])
    check_evaluation(config)
    return config


@pytest.fixture
def texts(tmp_path) -> str:
    files = {f"{number}.txt": f"{LONG_WORDS} of {number}\n".encode() for number in range(8)}
    return f"texts.path={write_files(tmp_path / 'texts', files)}"


def test_lms_are_asked_the_same_spans_where_one_tokenizer_cuts_them(tmp_path, texts):
    write_tokenizer(tmp_path / "gpt2")
    write_gpt2(tmp_path / "gpt2")
    keys = [texts, "texts.max_examples=9", "texts.tokenizer=stand_in"]
    a, b = (read_spans(config_of(tmp_path, *keys, f"lm.path={lm}"), None) for lm in ("stand_in", tmp_path / "gpt2"))
    assert a == b
    alone = read_spans(config_of(tmp_path, texts, f"lm.path={tmp_path / 'gpt2'}", "texts.max_examples=9"), None)
    assert [span.continuation for span in alone] != [span.continuation for span in a], "its own tokens cut words"


@pytest.mark.parametrize("num", [8, pytest.param(62, marks=pytest.mark.slow)])
def test_spans_of_joined_wikitext_leave_only_the_first_without_documents(num, tmp_path):
    """The authors' windows, by a naive loop over the tokens of all lines; Wikitext's test part has 62 articles."""
    lm = real_lm() if num == 62 else "stand_in"
    whole = gzip.decompress(shared("wikitext2_test.txt.gz").read_bytes()).decode()
    begin, *articles = re.split(r"(?m)^(?= = [^=\n]+ = $)", whole)
    articles = [begin + articles[0], *articles[1:num]]
    text, tokenizer = "".join(articles), load_plain(lm_tokenizer_json(LMConfig(lm)))
    (tmp_path / "wikitext.txt").write_text(text)
    counts = [len(tokenizer.encode(part, add_special_tokens=False)) for part in (text, *articles)]
    keys = [f"texts.path={tmp_path / 'wikitext.txt'}", "data.new_text_at=^ = [^=].* = $", f"lm.path={lm}"]
    keys += ["texts.scored_tokens=768", "texts.max_examples=null"]
    joined, apart = (read_spans(config_of(tmp_path, *keys, f"texts.join={on}"), None) for on in (True, False))
    assert "".join(span.continuation for span in joined) == "".join(span.continuation for span in apart) == text
    assert [bool(span.query) for span in joined] == [False] + [True] * ((counts[0] - 1) // 768)
    assert len({span.source for span in apart}) == sum(not span.query for span in apart) == num
    assert len({span.source for span in joined}) > 0.8 * num, "each is a cluster of its own"
    if num == 62:
        shares = 768 / counts[0], sum(min(768, of) for of in counts[1:]) / counts[0]
        assert shares == (pytest.approx(0.0025, abs=5e-5), pytest.approx(0.148, abs=5e-4)), "tokens without documents"


def test_names_of_the_corpus_fields_are_no_names_of_fields_that_texts_lack(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "a", "text": "some text"}\n')
    (tmp_path / "b.jsonl").write_text('{"pid": "b", "contents": "other text", "text": "a summary"}\n')
    for name, expected in (("a", "some text"), ("b", "other text")):
        keys = [f"texts.path={tmp_path / name}.jsonl", "data.fields={contents: text, pid: id}"]
        [span] = read_spans(config_of(tmp_path, *keys), None)
        assert (span.source, span.continuation) == (name, expected)


# What the corpus holds of texts ---------------------------------------------------------------------------------------


def random_words(seed: int, num: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10**9)}" for _ in range(num))


def document(name: str, text: str, source: str | None = None) -> Document:
    return Document(name, text, "all", source or name)


LONG, OTHER, SHORT = random_words(1, 40), random_words(2, 40), random_words(3, 9)
SOURCES = {"copied": "a", "free": "b", "question": None, "tiny": None}
EXAMPLES = [Item(name, "", "all", source=source) for name, source in SOURCES.items()]
TEXTS = [(LONG,), (OTHER,), (SHORT, "Paris"), ("who is it",)]


def test_a_short_text_is_compared_whole_and_a_shorter_one_as_an_equal_text_alone():
    documents = [document("d1", f"x {SHORT} y"), document("d2", "Who is  IT"), document("d3", "in Paris")]
    found = find_overlaps(EXAMPLES, TEXTS, documents)
    assert found == {"question": ["13 words in a row"], "tiny": ["equal text"]}
    assert overlap_line(found, 8) == "In the corpus: 2 of 8 examples (25.0%): 1 by equal text, 1 by 13 words in a row."


def test_a_document_of_the_same_source_is_found():
    documents = [document("d1", random_words(9, 30), source="a"), document("d2", LONG, source="a")]
    assert find_overlaps(EXAMPLES, TEXTS, documents) == {"copied": ["source", "equal text", "13 words in a row"]}


def test_words_that_half_of_the_sources_hold_are_no_leak_and_a_copy_beside_them_is():
    footer = " ".join(f"footer{number}" for number in range(20))
    documents = [document(f"d{i}", f"{random_words(i + 50, 20)} same {footer}", f"s{i}") for i in range(9)]
    documents += [document(f"e{i}", random_words(i + 80, 20), f"t{i}") for i in range(9)]
    alike = (f"{random_words(7, 20)} same {footer}",)  # ends in one more word that theirs have
    items = [Item("alike", "", "all", source="a"), Item("copied", "", "all", source="b")]
    texts = [alike, (f"{random_words(8, 20)} {footer}",)]
    assert find_overlaps(items, texts, documents) == {}
    copy = document("copy", f"{random_words(8, 20)} {footer}", "c")
    assert find_overlaps(items, texts, [*documents, copy]) == {"copied": ["equal text", "13 words in a row"]}
    chunks = [document(f"f{i}", f"{random_words(i + 150, 20)} {LONG}", "one") for i in range(9)]  # of one source of ten
    found = find_overlaps(EXAMPLES[1:], [(LONG,), *TEXTS[2:]], [*documents[9:], *chunks])
    assert found == {"free": ["13 words in a row"]}
    few = find_overlaps(items, texts, documents[:4])
    assert few == {"alike": ["13 words in a row"], "copied": ["13 words in a row"]}


def test_overlaps_are_those_of_a_naive_search():
    rng = random.Random(0)
    vocabulary = [f"w{number}" for number in range(2)]
    texts = [" ".join(rng.choices(vocabulary, k=rng.randint(5, 18))) for _ in range(60)]
    documents = [document(f"d{row}", " ".join(rng.choices(vocabulary, k=60))) for row in range(40)]
    items = [Item(str(row), "", "all") for row in range(len(texts))]
    found = find_overlaps(items, [(text,) for text in texts], documents)
    for row, text in enumerate(texts):
        parts = text.split()
        n = min(13, len(parts))
        grams = {" ".join(parts[i : i + n]) for i in range(len(parts) - n + 1)} if n >= 8 else set()
        held = any(f" {gram} " in f" {doc.text} " for gram in grams for doc in documents)
        assert ("13 words in a row" in found.get(str(row), [])) == held
    assert 5 < len(found) < 55
