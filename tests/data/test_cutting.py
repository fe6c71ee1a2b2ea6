"""Texts are cut at borders of tokens into pieces that join back, and that the LM can hold."""

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config, DataConfig
from replug.data.prepare.cutting import Tokenizers
from replug.data.prepare.sets import prepare_raw
from replug.data.store import PreparedSet
from replug.data.tokenizing import split_text, token_ends, word_tokenizer
from replug.models.local.hf_lm import HuggingFaceSource
from replug.models.preparing import LM_TOKENS, data_inputs
from tests.support.preparing import WORDS, write_jsonl

Ends = Callable[[str], list[int]]
ODD_ONES = st.sampled_from(" \n\u00e9\u0301\u2028中🙂👩🏽\u200d")
ALL_PLANES = st.text(st.one_of(st.characters(max_codepoint=0x7F), ODD_ONES, st.characters(codec="utf-8")))
ASCII = st.text(st.characters(max_codepoint=0x7F))


def words(text: str) -> list[int]:
    return [match.end() for match in re.finditer(r"\s*\S+|\s+", text)]


def byte_level(trim: bool) -> Tokenizer:
    """Bytes with a few merges; most characters beyond ASCII take several tokens, as in GPT-2's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat", "über die Brücke", "the bat, the rat"], trainer)
    return tokenizer


BYTE_LEVEL, TRIMMED = byte_level(trim=False), byte_level(trim=True)
TOKENIZERS = {
    "words": words,
    "byte-level": lambda text: token_ends(BYTE_LEVEL, [text])[0],
    "byte-level, white space trimmed": lambda text: token_ends(TRIMMED, [text])[0],
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_back_to_the_text_and_of_plain_text_hold_the_set_number_of_tokens(name: str):
    ends_of, is_exact = TOKENIZERS[name], name in ("words", "byte-level")

    @settings(deadline=None, database=None, max_examples=150)
    @given(st.one_of(ALL_PLANES, ASCII), st.integers(1, 5))
    def check(text: str, tokens: int) -> None:
        ends = ends_of(text)
        pieces = split_text(text, ends, tokens)
        assert "".join(pieces) == text and all(pieces)
        if is_exact and text.isascii():
            borders = list(itertools.accumulate(map(len, pieces), initial=0))
            counts = [sum(a < end <= b for end in ends) for a, b in itertools.pairwise(borders)]
            assert sum(counts) == len(ends) and all(count == tokens for count in counts[:-1])
            assert all(0 < count <= tokens for count in counts[-1:])

    check()


def test_a_character_that_tokens_share_stays_whole_in_the_earlier_piece():
    # "a" is one token and the face four, so the third token ends inside it
    assert split_text("a🙂b", token_ends(BYTE_LEVEL, ["a🙂b"])[0], 3) == ["a🙂", "b"]


CHARACTERS = word_tokenizer(r"[\s\S]")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = random.Random(0)
    texts = [["".join(rng.choices("abcdefgh", k=rng.choice([3, 5, 7, 90]))) for _ in range(60)] for _ in range(40)]
    return write_jsonl(tmp_path / "raw.jsonl", [{"id": str(i), "text": " ".join(t)} for i, t in enumerate(texts)])


def test_no_piece_has_more_tokens_of_the_lm_than_it_holds_and_all_join_back_to_the_text(tmp_path, source):
    config = DataConfig(source=str(source), context_tokens=8, query_share=0.3, heldout_share=0.3, num_queries=9**6)
    tokenizers = Tokenizers(WORDS, None, CHARACTERS, 80, 50)
    prepare_raw(config, 0, tokenizers, tmp_path / "set", {})
    prepared = PreparedSet(tmp_path / "set")
    examples = [*prepared.queries.examples(), *prepared.heldout.examples()]
    assert max(len(doc.text) for doc in prepared.corpus.iterate()) in range(60, 81)
    assert max(len(text) for example in examples for text in (example.context, example.continuation)) in range(40, 51)
    whole = {row["id"]: row["text"] for row in map(json.loads, source.read_text().splitlines())}
    joined: dict[str, dict[int, str]] = {}
    for doc in prepared.corpus.iterate():
        joined.setdefault(doc.source, {})[int(doc.id.rpartition("#")[2])] = doc.text
    assert len(joined) > 5
    assert all("".join(parts[i] for i in sorted(parts)) == whole[name] for name, parts in joined.items())


# From a configuration -------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch):
    """What a local LM holds, whatever its files say."""

    def hold(tokens: int | None) -> None:
        monkeypatch.setattr(HuggingFaceSource, "max_tokens", property(lambda self: tokens))

    return hold


def by_retriever(*overrides: str) -> Config:
    own = ("data.source=stand_in", "data.tokenizer=retriever", "data.context_tokens=128", "lm.path=gpt2-xl")
    return load_config(ROOT / "configs/debug.yaml", [*own, *overrides])


def limits(config: Config) -> object:
    return data_inputs(config).get(LM_TOKENS)


def test_a_document_and_a_text_share_what_the_lm_holds(held):
    held(1024)
    assert limits(by_retriever()) == [338, 338]  # of 1,024, less the separator and what a model adds
    assert limits(by_retriever("data.document_tokens=256")) == [507, 253]
    assert limits(by_retriever("lm.too_long=truncate")) == [1015, 1015]  # a continuation alone is never cut
    assert 338 + 2 * 338 + 2 <= 1024


def test_pieces_that_the_lm_could_not_hold_together_are_refused(held):
    held(384)
    with pytest.raises(
        UserError, match=r"data.context_tokens, data.document_tokens: a document of 128 tokens.* holds 384"
    ):
        limits(by_retriever())
