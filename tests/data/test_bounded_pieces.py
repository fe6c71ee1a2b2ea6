"""Pieces that one tokenizer cuts are bounded by the LM's tokens too: a word of any length may be one token."""

import base64
import json
import random
from pathlib import Path

import pytest

import replug.models.preparing
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config, DataConfig
from replug.data.prepare.cutting import LMBound
from replug.data.prepare.local_pool import LocalPool
from replug.data.prepare.sets import Tokenizers, prepare_raw
from replug.data.store import PreparedSet
from replug.data.tokenizing import load_plain, pieces_within, word_tokenizer
from replug.models.build import lm_source
from replug.models.local.local_source import HuggingFaceSource
from replug.models.preparing import LM_TOKENS, data_origin, prepared_set
from replug.train.data_checks import check_data
from tests.support.preparing import WORDS, contents, rows_of, texts_of, write_jsonl
from tests.support.real_models import real_encoder, real_lm

CHARACTERS = word_tokenizer(r"[\s\S]")
ROOT = Path(__file__).parent.parent.parent


def prepare(out: Path, source: Path, bound: LMBound | None) -> PreparedSet:
    """By words, eight to a piece."""
    config = DataConfig(source=str(source), window=8, query_share=0.3, heldout_share=0.3, num_queries=9**6)
    return prepare_raw(config, 0, Tokenizers(WORDS, None, bound), out, {}, LocalPool(1))


def long_words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=rng.choice([3, 5, 7, 90]))) for _ in range(count))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [{"id": str(i), "text": long_words(i, 60)} for i in range(40)]
    return write_jsonl(tmp_path / "raw.jsonl", rows)


def test_no_piece_has_more_tokens_of_the_lm_than_it_holds(tmp_path, source):
    prepared = prepare(tmp_path / "set", source, LMBound(CHARACTERS, 80, 50))
    windows = [*prepared.queries.windows(), *prepared.heldout.windows()]
    assert max(len(doc.text) for doc in prepared.corpus.iterate()) in range(60, 81)
    assert max(len(text) for window in windows for text in (window.context, window.continuation)) in range(40, 51)
    assert prepared.manifest["source"]["cut_further"] > 100


def test_what_is_cut_further_still_joins_back_to_the_text(tmp_path, source):
    prepared = prepare(tmp_path / "set", source, LMBound(CHARACTERS, 80, 50))
    whole = {row["id"]: row["text"] for row in map(json.loads, source.read_text().splitlines())}
    joined: dict[str, dict[int, str]] = {}
    for doc in prepared.corpus.iterate():
        joined.setdefault(doc.source, {})[int(doc.id.rpartition("#")[2])] = doc.text
    assert len(joined) > 5
    assert all("".join(parts[i] for i in sorted(parts)) == whole[name] for name, parts in joined.items())


def test_ordinary_text_is_cut_to_the_same_bytes_as_without_a_bound(tmp_path):
    source = write_jsonl(tmp_path / "raw.jsonl", rows_of(60))
    plain = prepare(tmp_path / "plain", source, None)
    bounded = prepare(tmp_path / "bounded", source, LMBound(CHARACTERS, 80, 80))
    assert contents(plain.folder) == contents(bounded.folder)


def test_pieces_of_a_text_are_even_and_within_the_bound():
    tokenizer = load_plain(CHARACTERS)
    assert pieces_within(tokenizer, ["x" * 11, "y" * 10, "z" * 31], 10) == [
        ["x" * 6, "x" * 5],
        ["y" * 10],
        ["z" * 8, "z" * 8, "z" * 8, "z" * 7],
    ]


def test_what_has_no_more_bytes_than_the_bound_is_not_tokenized():
    class Refusing:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list:
            assert texts == []
            return []

    assert pieces_within(Refusing(), ["é" * 5, "x" * 10], 10) == [["é" * 5], ["x" * 10]]  # type: ignore[arg-type]


# From a configuration -------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch):
    """What a local LM holds, whatever its files say."""

    def hold(tokens: int | None) -> None:
        monkeypatch.setattr(HuggingFaceSource, "max_tokens", property(lambda self: tokens))

    return hold


def by_retriever(*overrides: str) -> Config:
    own = ("data.source=stand_in", "data.tokenizer=retriever", "data.window=128", "lm.path=gpt2-xl")
    return load_config(ROOT / "configs/debug.yaml", [*own, *overrides])


def limits(config: Config) -> object:
    return data_origin(config).get(LM_TOKENS)


def test_a_document_and_a_text_share_what_the_lm_holds(held):
    held(1024)
    assert limits(by_retriever()) == [338, 338]  # of 1,024, less the separator and what a model adds
    assert limits(by_retriever("data.document_tokens=256")) == [507, 253]
    assert limits(by_retriever("lm.too_long=truncate")) == [1015, 1015]  # a continuation alone is never cut
    assert 338 + 2 * 338 + 2 <= 1024


def test_paper_yaml_is_bounded_by_its_lm(held):
    held(1024)
    origin = data_origin(load_config(ROOT / "configs/paper.yaml", ["data.source=stand_in"]))
    assert origin["lm.path"] == "gpt2-xl" and origin[LM_TOKENS] == [338, 338]


def test_texts_cut_by_the_lms_own_tokens_need_no_other_bound(held):
    held(1024)
    assert limits(by_retriever("data.tokenizer=lm")) is None
    held(None)
    assert limits(by_retriever()) is None


def test_pieces_that_the_lm_could_not_hold_together_are_refused(held):
    held(384)
    with pytest.raises(UserError, match=r"data.window, data.document_tokens: a document of 128 tokens.* holds 384"):
        limits(by_retriever())


def test_where_nobody_knows_what_the_lm_holds_that_is_said(tmp_path, caplog):
    server = ("lm.path=null", "lm.url=http://127.0.0.1:9/v1", "lm.model=m")
    config = by_retriever("data.tokenizer=lm", *server)
    config.data.tokenizer = "retriever"
    assert replug.models.preparing._lm_bound(config) is None
    assert "what the LM can hold is not known here" in caplog.text


def test_words_that_the_retriever_does_not_know_no_longer_stop_a_run(tmp_path, held):
    rng = random.Random(0)
    texts = [" ".join(base64.b16encode(rng.randbytes(60)).decode() for _ in range(300)) for _ in range(12)]
    source = write_jsonl(tmp_path / "raw.jsonl", [{"id": str(i), "text": text} for i, text in enumerate(texts)])
    models = (f"retriever.path={real_encoder()}", f"lm.path={real_lm()}")
    config = by_retriever(f"data.source={source}", *models, "data.query_share=0.4")
    held(1024)
    prepared = prepared_set(config, tmp_path / "set")
    check_data(config, prepared, lm_source(config.lm, tmp_path / "spent", tmp_path / "cache"))
    assert max(map(len, texts_of(prepared)["documents"])) < 1500  # was 15,400 characters, 13,860 tokens
