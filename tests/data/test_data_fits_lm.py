"""No document, with the longest text after it, may exceed what the LM holds; and none that fits is refused."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replug.config.choices import TooLong
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.records import Document, Example
from replug.data.shards import prepared_folder, write_documents, write_examples
from replug.data.store import TEXTS, PreparedSet
from replug.models.local.hf_lm import HuggingFaceSource
from replug.train.outset import check_data


class Source(HuggingFaceSource):
    """An LM of whose files only the tokenizer is read; it holds 100 tokens."""

    max_tokens = 100

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast.from_pretrained(self.path)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "lm")
    return Source(str(tmp_path / "lm"))


@pytest.fixture
def config(debug_config: Config) -> Config:
    debug_config.retrieve.k = debug_config.evaluate.k = 1
    return debug_config


def prepared(folder: Path, document: str, context: str, continuation: str) -> PreparedSet:
    folder.mkdir()
    write_documents(folder / "documents", [Document("d", document, "all", "d")])
    write_examples(folder / "queries.arrow", [Example("q", context, continuation, "all")])
    write_examples(folder / "heldout.arrow", [])
    return marked(folder)


def marked(folder: Path) -> PreparedSet:
    proof = {"shared_sources": [], "equal_texts": []}
    prepared_folder(folder).finish(TEXTS, {"disjoint": proof, "counts": {"documents": 1}})
    return PreparedSet(folder)


def words(count: int) -> str:
    return " ".join(["word"] * count)


def test_a_document_that_leaves_no_room_is_named_with_the_text_and_the_limit(tmp_path, config, source):
    data = prepared(tmp_path / "set", words(70), words(20), " " + words(20))
    with pytest.raises(UserError, match=r"document d has 70 tokens and text q .* holds 100") as caught:
        check_data(config, data, source)
    assert "\n" not in str(caught.value)


def test_a_template_takes_its_room_from_the_document(tmp_path, config, source):
    data = prepared(tmp_path / "set", " ".join("d" * 60), " ".join("c" * 20), " ".join("y" * 10))
    check_data(config, data, source)
    config.lm.prompt = "This may help: {document}\n\n{context}" + " x" * 10
    with pytest.raises(UserError, match=r"document d has 60 tokens and text q up to 4\d, but the LM holds 100"):
        check_data(config, data, source)


def test_where_documents_are_cut_only_a_continuation_that_fills_the_lm_is_refused(tmp_path, config, source):
    config.lm.too_long = TooLong.truncate
    check_data(config, prepared(tmp_path / "set", words(500), words(90), " " + words(50)), source)
    with pytest.raises(UserError, match="text q: its continuation alone fills the LM, which holds 100 tokens"):
        check_data(config, prepared(tmp_path / "other", words(5), words(5), " " + words(100)), source)
