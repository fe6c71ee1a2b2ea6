"""Words of a text, its spans, and which of them a configuration measures."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replug.config.evaluation_schema import EvaluationConfig, TextsConfig
from replug.config.load import load_evaluation_config
from replug.config.schema import LMConfig
from replug.data.records import Example
from replug.data.sources.records import SourceText
from replug.data.tokenizing import load_plain, word_tokenizer
from replug.evals.kinds import check_evaluation
from replug.evals.language_modelling import draw_evenly, num_words, read_spans, spans_of
from replug.models.build import lm_tokenizer_json
from replug.models.local.stand_in_lm import WORD
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
    for number in range(8):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{LONG_WORDS} of {number}\n")
    return f"texts.path={tmp_path / 'texts'}"


def test_lms_are_asked_the_same_spans_where_one_tokenizer_cuts_them(tmp_path, texts):
    write_tokenizer(tmp_path / "gpt2")
    write_gpt2(tmp_path / "gpt2")
    keys = [texts, "texts.max_examples=9", "texts.tokenizer=stand_in"]
    a, b = (read_spans(config_of(tmp_path, *keys, f"lm.path={lm}"), None) for lm in ("stand_in", tmp_path / "gpt2"))
    assert a == b
    alone = read_spans(config_of(tmp_path, texts, f"lm.path={tmp_path / 'gpt2'}", "texts.max_examples=9"), None)
    assert [span.continuation for span in alone] != [span.continuation for span in a], "its own tokens cut words"


def test_spans_of_joined_wikitext_leave_only_the_first_without_documents(tmp_path):
    """The authors' windows, by a naive loop over the tokens of all lines."""
    path, lm = shared("wikitext2_test.txt.gz"), real_lm()
    text, tokenizer = gzip.decompress(path.read_bytes()).decode(), load_plain(lm_tokenizer_json(LMConfig(lm)))
    articles = re.split(r"(?m)^(?= = [^=\n]+ = $)", text)
    counts = [len(tokenizer.encode(part, add_special_tokens=False)) for part in (text, *articles)]
    keys = [f"texts.path={path}", "data.new_text_at=^ = [^=].* = $", "texts.scored_tokens=768", f"lm.path={lm}"]
    keys.append("texts.max_examples=null")
    joined, apart = (read_spans(config_of(tmp_path, *keys, f"texts.join={on}"), None) for on in (True, False))
    assert "".join(span.continuation for span in joined) == "".join(span.continuation for span in apart) == text
    assert [bool(span.query) for span in joined] == [False] + [True] * ((counts[0] - 1) // 768)
    assert len({span.source for span in apart}) == 62, "Wikitext's test part has 62 articles"
    assert len({span.source for span in joined}) > 55, "each is a cluster of its own"
    assert sum(not span.query for span in apart) == 62
    shares = 768 / counts[0], sum(min(768, of) for of in counts[1:]) / counts[0]
    assert shares == (pytest.approx(0.0025, abs=5e-5), pytest.approx(0.148, abs=5e-4)), "tokens without documents"


def test_names_of_the_corpus_fields_are_no_names_of_fields_that_texts_lack(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "a", "text": "some text"}\n')
    (tmp_path / "b.jsonl").write_text('{"pid": "b", "contents": "other text", "text": "a summary"}\n')
    for name, expected in (("a", "some text"), ("b", "other text")):
        keys = [f"texts.path={tmp_path / name}.jsonl", "data.fields={contents: text, pid: id}"]
        [span] = read_spans(config_of(tmp_path, *keys), None)
        assert (span.source, span.continuation) == (name, expected)
