"""How document and context are joined, and what is cut: the document's end, then the context's beginning."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from replug.models.pair_tokens import pair_token_ids
from replug.models.prompt import PromptTemplate
from tests.support.tokenizers import write_family


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Words are tokens; a start token opens an empty prefix."""
    words = Tokenizer(models.WordLevel({"?": 0, "<s>": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder: Path = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", bos_token="<s>").save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def words(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{i}" for i in range(count))


def test_the_document_comes_first_and_no_document_leaves_the_context():
    template = PromptTemplate("\n\n")
    assert template.prefix("a document", "a context", " and more") == "a document\n\na context"
    assert template.prefix("", "a context", " and more") == "\n\na context"
    assert template.prefix(None, "a context", " and more") == "a context"


@pytest.mark.parametrize(("max_tokens", "left"), [(19, 9), (11, 1)])
def test_the_documents_end_is_cut_first(tokenizer, max_tokens, left):
    template = PromptTemplate("\n", tokenizer, max_tokens)
    prefix = template.prefix(words("d", 10), words("c", 5), " " + words("y", 5))
    assert prefix.split("\n")[0].split() == words("d", left).split()
    assert prefix.split("\n")[1] == words("c", 5)
    assert template.num_truncated == 1


@pytest.mark.parametrize(("max_tokens", "left"), [(10, 5), (8, 3), (6, 1)])
def test_then_the_document_goes_with_its_separator_and_the_contexts_beginning_is_cut(tokenizer, max_tokens, left):
    template = PromptTemplate("\n", tokenizer, max_tokens)
    for document in (words("d", 10), None):
        prefix = template.prefix(document, words("c", 5), " " + words("y", 5))
        assert prefix.split() == words("c", 5).split()[5 - left :]
        assert "\n" not in prefix
    before, after = pair_token_ids(tokenizer, prefix, " " + words("y", 5))
    assert len(before) + len(after) == max_tokens


def test_the_continuation_is_never_cut(tokenizer):
    template = PromptTemplate("\n", tokenizer, max_tokens=5)
    with pytest.raises(
        ValueError, match="a continuation has 5 tokens or more, but the LM holds 5 with at least one before it"
    ):
        template.prefix(words("d", 10), words("c", 5), " " + words("y", 5))
    assert template.prefix(words("d", 10), words("c", 5), " " + words("y", 4)) == " c4"


def test_concatenated_documents_lose_their_beginning_which_is_farthest(tokenizer):
    template = PromptTemplate("\n", tokenizer, max_tokens=15)
    prefix = template.prefix(words("d", 10), words("c", 5), " " + words("y", 5), keep_end=True)
    assert prefix.split("\n")[0].split() == words("d", 10).split()[5:]


@pytest.mark.parametrize("family", ["byte-level", "Llama 2", "Unigram"])
@pytest.mark.parametrize("keep_end", [False, True])
def test_a_long_document_is_read_as_far_as_it_is_kept(tmp_path, monkeypatch, family, keep_end):
    template = PromptTemplate("\n", write_family(family, tmp_path), 24)
    texts = ["The river is the Rhine. " * 400, "日本" * 5000, "x" * 9000, " " * 9000 + "Rhine" + "\n" * 9000]
    found = [template.prefix(text, "Which river?", " Rhine", keep_end) for text in texts]
    for text, prefix in zip(texts, found, strict=True):
        kept = prefix.removesuffix("Which river?").removesuffix("\n")
        assert len(kept) < 200 and (text.endswith(kept) if keep_end else text.startswith(kept))
    monkeypatch.setattr(PromptTemplate, "_readable", lambda self, text, keep_end: text)
    assert found[:2] == [template.prefix(text, "Which river?", " Rhine", keep_end) for text in texts[:2]]


def test_a_tokenizer_that_leaves_blanks_out_of_its_offsets_cuts_them_all_the_same(tmp_path):
    tokenizer = write_family("byte-level", tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for keep_end in (False, True):
        prefix = PromptTemplate("\n", tokenizer, 24).prefix("   a   b" * 40, "c", " d", keep_end)
        assert prefix.endswith("\nc") and len(prefix) > 10


def ask(document: str | None) -> str:
    return f"shots shots\n{document}\nquestion ?" if document else "shots shots\nquestion ?"


@pytest.mark.parametrize(
    ("max_tokens", "keep_end", "left"), [(16, False, "d0 d1 d2"), (16, True, "d2 d3 d4"), (20, False, "d0 d1 d2 d3 d4")]
)
def test_a_prompt_of_any_form_is_cut_in_its_document(tokenizer, max_tokens, keep_end, left):
    template = PromptTemplate("\n", tokenizer, max_tokens)
    assert template.fit(words("d", 5), ask, 9, keep_end).split() == ask(left).split()
    assert template.num_truncated == (max_tokens == 16)


def test_a_prompt_goes_without_its_document_and_no_further(tokenizer):
    assert PromptTemplate("\n", tokenizer, max_tokens=13).fit(words("d", 5), ask, 9) == ask(None)
    for document in (words("d", 5), None):
        with pytest.raises(ValueError, match=r"1 tokens too long without any document: the LM holds 12, 9 of them for"):
            PromptTemplate("\n", tokenizer, max_tokens=12).fit(document, ask, 9)
    assert PromptTemplate("\n").fit(words("d", 5), ask, 9) == ask(words("d", 5))
