"""Texts are cut at borders of tokens into pieces that join back and that the LM holds; none that fits is refused.

The ids of a text that is cut are those of the whole text, and cost what is read of it.
"""

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from replug.config.choices import TooLong
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import DataConfig
from replug.data.prepare.cutting import Tokenizers
from replug.data.prepare.sets import prepare_raw
from replug.data.records import Document, Example
from replug.data.shards import prepared_folder, write_documents, write_examples
from replug.data.store import TEXTS, PreparedSet
from replug.data.tokenizing import TokenIds, cut_ids, ids_of_texts, split_text, token_ends, word_tokenizer
from replug.models.local.hf_lm import HuggingFaceSource
from replug.models.preparing import LM_TOKENS, data_inputs
from replug.train.outset import check_data
from tests.support.command_line import ROOT
from tests.support.preparing import WORDS, write_jsonl
from tests.support.real_models import real_encoder, real_lm

ODD_ONES = st.sampled_from(" \n\u00e9\u0301\u2028中🙂👩🏽\u200d")
ALL_PLANES = st.text(st.one_of(st.characters(max_codepoint=0x7F), ODD_ONES, st.characters(codec="utf-8")))
ASCII = st.text(st.characters(max_codepoint=0x7F))


def byte_level(trim: bool) -> Tokenizer:
    """Bytes with a few merges; most characters beyond ASCII take several tokens, as in GPT-2's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat and the hat", "über die Brücke", "the bat, the rat"], trainer)
    return tokenizer


BYTE_LEVEL, TRIMMED = byte_level(trim=False), byte_level(trim=True)
ENDS: dict[str, Callable[[str], list[int]]] = {
    "words": lambda text: [match.end() for match in re.finditer(r"\s*\S+|\s+", text)],
    "byte-level": lambda text: token_ends(BYTE_LEVEL, [text])[0],
    "byte-level, white space trimmed": lambda text: token_ends(TRIMMED, [text])[0],
}


@pytest.mark.parametrize("name", ENDS)
def test_pieces_join_back_to_the_text_and_of_plain_text_hold_the_set_number_of_tokens(name: str):
    ends_of, is_exact = ENDS[name], name in ("words", "byte-level")

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


# What the LM holds ----------------------------------------------------------------------------------------------------


def test_no_piece_has_more_tokens_of_the_lm_than_it_holds_and_all_join_back_to_the_text(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [["".join(rng.choices("abcdefgh", k=rng.choice([3, 5, 7, 90]))) for _ in range(60)] for _ in range(40)]
    whole = {str(number): " ".join(words) for number, words in enumerate(texts)}
    source = write_jsonl(tmp_path / "raw.jsonl", ({"id": name, "text": text} for name, text in whole.items()))
    config = DataConfig(source=str(source), context_tokens=8, query_share=0.3, heldout_share=0.3, num_queries=9**6)
    characters = word_tokenizer(r"[\s\S]")
    prepare_raw(config, 0, Tokenizers(WORDS, None, characters, 80, 50), tmp_path / "set", {})
    prepared = PreparedSet(tmp_path / "set")
    examples = [*prepared.queries.examples(), *prepared.heldout.examples()]
    assert max(len(doc.text) for doc in prepared.corpus.iterate()) in range(60, 81)
    assert max(len(text) for example in examples for text in (example.context, example.continuation)) in range(40, 51)
    joined: dict[str, dict[int, str]] = {}
    for doc in prepared.corpus.iterate():
        joined.setdefault(doc.source, {})[int(doc.id.rpartition("#")[2])] = doc.text
    assert len(joined) > 5
    assert all("".join(parts[i] for i in sorted(parts)) == whole[name] for name, parts in joined.items())


def limits(*overrides: str) -> object:
    own = ("data.source=stand_in", "data.tokenizer=retriever", "data.context_tokens=128", "lm.path=gpt2-xl")
    return data_inputs(load_config(ROOT / "configs/debug.yaml", [*own, *overrides])).get(LM_TOKENS)


def test_a_document_and_a_text_share_what_the_lm_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HuggingFaceSource, "max_tokens", 1024)
    assert limits() == [338, 338]  # of 1,024, less the separator and what a model adds
    assert limits("data.document_tokens=256") == [507, 253]
    assert limits("lm.too_long=truncate") == [1015, 1015]  # a continuation alone is never cut
    monkeypatch.setattr(HuggingFaceSource, "max_tokens", 384)
    says = r"data.context_tokens, data.document_tokens: a document of 128 tokens.* holds 384"
    with pytest.raises(UserError, match=says):
        limits()


def prepared_set(folder: Path, document: int, context: int, continuation: int) -> PreparedSet:
    """A document and an example of so many words."""
    folder.mkdir()
    write_documents(folder / "documents", [Document("d", " ".join("d" * document), "all", "d")])
    write_examples(folder / "queries.arrow", [Example("q", " ".join("c" * context), " y" * continuation, "all")])
    write_examples(folder / "heldout.arrow", [])
    proof = {"shared_sources": [], "equal_texts": []}
    prepared_folder(folder).finish(TEXTS, {"disjoint": proof, "counts": {"documents": 1}})
    return PreparedSet(folder)


def test_a_document_that_leaves_no_room_is_named_with_the_text_and_the_limit(tmp_path, debug_config, monkeypatch):
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    monkeypatch.setattr(HuggingFaceSource, "tokenizer", lambda self: tokenizer)
    monkeypatch.setattr(HuggingFaceSource, "max_tokens", 100)
    source, config = HuggingFaceSource(str(tmp_path)), debug_config
    config.retrieve.k = config.evaluate.k = 1
    with pytest.raises(UserError, match=r"document d has 70 tokens and text q .* holds 100") as caught:
        check_data(config, prepared_set(tmp_path / "long", 70, 20, 20), source)
    assert "\n" not in str(caught.value)
    fits = prepared_set(tmp_path / "fits", 60, 20, 10)
    check_data(config, fits, source)
    config.lm.prompt = "This may help: {document}\n\n{context}" + " x" * 10  # its room is the document's
    with pytest.raises(UserError, match=r"document d has 60 tokens and text q up to 4\d, but the LM holds 100"):
        check_data(config, fits, source)
    config.lm.too_long = TooLong.truncate  # then only a continuation that fills the LM is refused
    check_data(config, prepared_set(tmp_path / "longer", 500, 90, 50), source)
    with pytest.raises(UserError, match="text q: its continuation alone fills the LM, which holds 100 tokens"):
        check_data(config, prepared_set(tmp_path / "continuation", 5, 5, 100), source)


# Token ids ------------------------------------------------------------------------------------------------------------

MOST = 48
LETTERS = 40 * MOST * 8
RNG = random.Random(0)


def repeated(text: str) -> str:
    return text * (LETTERS // len(text))


LONG_AND_SHORT = [
    repeated("word lake 1234, river! "),
    " " * LETTERS,
    " " * (LETTERS // 2) + repeated("a lake "),
    "".join(RNG.choices("0123456789", k=LETTERS)),
    "".join(RNG.choices("abcdefABCDEF0123+/", k=LETTERS)),
    "".join(RNG.choices("中文字的是在了不和有", k=LETTERS)),
    "".join(RNG.choices(["🙂", "👩🏽\u200d🚀", "🇩🇪"], k=LETTERS // 4)),
    repeated("x" * 150 + " "),
    "a lake",
    "",
]
CORPUS = ["the cat sat on the mat of the hall, with 1234 words and über Brücken 中文字 🙂"] * 20


def trained(**parts: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


# Such as Llama's, whose merges run over the whole text; and groups of three digits, counted from the end of a run.
WITHOUT_WORDS = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
DIGITS = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(\d{3})*\b)"), "isolated")
FROM_THE_END = pre_tokenizers.Sequence([DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False)])
TOKENIZERS = {
    "MiniLM": lambda: Tokenizer.from_file(f"{real_encoder()}/tokenizer.json"),
    "SmolLM2": lambda: Tokenizer.from_file(f"{real_lm()}/tokenizer.json"),
    "without words": lambda: trained(normalizer=WITHOUT_WORDS),
    "digits from the end": lambda: trained(pre_tokenizer=FROM_THE_END),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_has_the_ids_that_it_has_where_all_of_it_is_tokenized(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    is_slow = name == "digits from the end"  # its pattern takes the square of a run's length
    texts = [text[: LETTERS // 4] if is_slow and text.isdigit() else text for text in LONG_AND_SHORT]
    rule = TokenIds(tokenizer.to_str(), MOST, tokenizer.get_vocab_size(), prompt="passage: ")
    tokenizer.no_padding()
    found = ids_of_texts(rule, texts)
    tokenizer.enable_truncation(MOST)
    expected = [tokenizer.encode(rule.prompt + text).ids for text in texts]
    assert [ids.tolist() for ids in found] == expected
    assert {len(ids) for ids in found} >= {MOST}


def test_a_long_text_is_tokenized_at_its_beginning_only() -> None:
    given: list[str] = []

    def by_characters(parts: list[str]) -> list[list[int]]:
        given.extend(parts)
        return [[ord(character) for character in part[:MOST]] for part in parts]

    texts = ["b" * 10**7, "short", "c" * 10**6]
    assert cut_ids(by_characters, texts, MOST) == [list(map(ord, text[:MOST])) for text in texts]
    assert sum(map(len, given)) < 200 * MOST
