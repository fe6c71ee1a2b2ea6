"""The ids of a text that is cut are those of the whole text, and cost what is read of it."""

import random

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from replug.data.tokenizing import TokenIds, cut_ids, ids_of_texts
from tests.support.real_models import real_encoder, real_lm

MOST = 48
LETTERS = 40 * MOST * 8
RNG = random.Random(0)


def repeated(text: str) -> str:
    return text * (LETTERS // len(text))


TEXTS = {
    "words": repeated("word lake 1234, river! "),
    "blanks": " " * LETTERS,
    "words behind blanks": " " * (LETTERS // 2) + repeated("a lake "),
    "digits": "".join(RNG.choices("0123456789", k=LETTERS)),
    "letters and digits without a blank": "".join(RNG.choices("abcdefABCDEF0123+/", k=LETTERS)),
    "Chinese": "".join(RNG.choices("中文字的是在了不和有", k=LETTERS)),
    "emoji of several code points": "".join(RNG.choices(["🙂", "👩🏽\u200d🚀", "🇩🇪"], k=LETTERS // 4)),
    "words of 150 letters": repeated("x" * 150 + " "),
    "short": "a lake",
    "empty": "",
}
CORPUS = ["the cat sat on the mat of the hall, with 1234 words and über Brücken 中文字 🙂"] * 20


def without_words() -> Tokenizer:
    """Return a tokenizer such as Llama's, whose merges run over the whole text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def digits_from_the_end() -> Tokenizer:
    """Groups of three digits are counted from the end of a run."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    digits = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(\d{3})*\b)"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZERS = {
    "MiniLM": lambda: Tokenizer.from_file(f"{real_encoder()}/tokenizer.json"),
    "SmolLM2": lambda: Tokenizer.from_file(f"{real_lm()}/tokenizer.json"),
    "without words": without_words,
    "digits from the end": digits_from_the_end,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_has_the_ids_that_it_has_where_all_of_it_is_tokenized(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    if name == "digits from the end":  # its pattern takes the square of a run's length
        texts = [text if not text.isdigit() else text[: LETTERS // 4] for text in TEXTS.values()]
    else:
        texts = list(TEXTS.values())
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
