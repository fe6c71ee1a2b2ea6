"""Which spans of which texts are measured, by configurations; no LM is asked."""

import json
from pathlib import Path

import pytest

import replug.data.sources.shards
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.evals.kinds import check_evaluation
from replug.evals.language_modelling import read_spans
from replug.evals.spans import ROOM
from tests.support.tiny_lms import write_gpt2, write_tokenizer

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


def test_a_long_context_is_as_long_as_the_lm_holds(tmp_path, texts, monkeypatch):
    methods = ["methods=[none,long_context]", texts, "texts.max_examples=null"]
    whole = [span for span in read_spans(config_of(tmp_path, *methods), None) if span.source == "3.txt"]
    text = (tmp_path / "texts/3.txt").read_text()
    assert all(span.long_context == text[: span.start] for span in whole), "the stand-in has no limit"
    monkeypatch.setattr("replug.models.build.lm_max_tokens", lambda lm: 30)
    some = read_spans(config_of(tmp_path, *methods), None)
    lengths = {len(str(span.long_context).split()) for span in some if len(span.continuation.split()) == 5}
    assert max(lengths) == 30 - ROOM - 5
    assert read_spans(config_of(tmp_path, texts), None)[0].long_context is None


def test_wikitexts_words_are_counted_over_the_original(tmp_path):
    article = " = Title = \n \n He said ( 1 @,@ 000 @-@ odd ) . \n"
    (tmp_path / "wiki.jsonl").write_text(json.dumps({"id": "w", "text": article}) + "\n")
    keys = [f"texts.path={tmp_path / 'wiki.jsonl'}", "texts.detokenize=wikitext"]
    spans = read_spans(config_of(tmp_path, *keys), None)
    assert "".join(span.continuation for span in spans) == "= Title =\n\nHe said (1,000-odd).\n"
    assert sum(span.num_words for span in spans) == len(article.split()) + 3


def test_names_of_the_corpus_fields_are_no_names_of_fields_that_texts_lack(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "a", "text": "some text"}\n')
    (tmp_path / "b.jsonl").write_text('{"pid": "b", "contents": "other text", "text": "a summary"}\n')
    for name, expected in (("a", "some text"), ("b", "other text")):
        keys = [f"texts.path={tmp_path / name}.jsonl", "data.fields={contents: text, pid: id}"]
        [span] = read_spans(config_of(tmp_path, *keys), None)
        assert (span.source, span.continuation) == (name, expected)


def test_texts_of_the_hub_are_its_test_split_and_none_else_is_read_for_it(tmp_path, monkeypatch):
    real = replug.data.sources.shards.files_of
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        replug.data.sources.shards, "files_of", lambda source: None if source.startswith("of_hub") else real(source)
    )
    (tmp_path / "of_hub").mkdir()
    for split in ("train", "validation"):
        (tmp_path / f"of_hub/{split}-00000-of-00001.jsonl").write_text(
            json.dumps({"id": "a", "text": f"some {split} text"})
        )
    with pytest.raises(UserError, match=r"^texts\.path: of_hub::test has no split 'test'; expected one of train, val"):
        read_spans(config_of(tmp_path, "texts.path=of_hub"), None)
    [span] = read_spans(config_of(tmp_path, "texts.path=of_hub::validation"), None)
    assert span.continuation == "some validation text"
    (tmp_path / "of_hub/test-00000-of-00001.jsonl").write_text('{"id": "a", "text": "some test text"}\n')
    [span] = read_spans(config_of(tmp_path, "texts.path=of_hub"), None)
    assert span.continuation == "some test text"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["texts.path=null", "data.prepared=x"], "texts.scored_tokens is set, but held-out texts are measured as they"),
        (
            ["texts.path=null", "texts.scored_tokens=128", "data.prepared=x", "methods=[none,long_context]"],
            "methods: long_context reads on in whole texts",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, *overrides)
