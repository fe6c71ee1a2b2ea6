"""How document and context are joined, and what is cut: the document's end, then the context's beginning."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from models.pair_tokens import pair_token_ids
from models.prompt import PromptTemplate


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


def test_what_fits_is_left_as_it_is(tokenizer):
    template = PromptTemplate("\n", tokenizer, max_tokens=20)
    document, context, continuation = words("d", 10), words("c", 5), " " + words("y", 5)
    assert template.prefix(document, context, continuation) == f"{document}\n{context}"
    assert template.num_truncated == 0


@pytest.mark.parametrize(("max_tokens", "left"), [(19, 9), (15, 5), (11, 1)])
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
    with pytest.raises(ValueError, match="a continuation has 5 tokens, but the LM holds 5 with at least one before it"):
        template.prefix(words("d", 10), words("c", 5), " " + words("y", 5))
    assert template.prefix(words("d", 10), words("c", 5), " " + words("y", 4)) == " c4"
