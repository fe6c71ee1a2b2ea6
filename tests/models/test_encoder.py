"""The retriever against mean pooling written out, one text at a time, on a random BERT and on MiniLM."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from replug.config.errors import UserError
from replug.data.sources.built_in_texts import stand_in_texts, stand_in_vocabulary
from replug.index_workers.version_store import weights_sha256
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder
from tests.support.real_models import real_encoder

WORDS = [word for topic in stand_in_vocabulary() for word in topic]
LONG_TEXT = next(stand_in_texts()).text  # 160 words, beyond the stand-in's 128 tokens
TEXTS = ["a cat", LONG_TEXT, " ".join(WORDS[:40]), "日本語 and 🙂", "", WORDS[7], "a cat", " ".join(WORDS[60:63])]
SHORT = [WORDS[0], " ".join(WORDS[:9])]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    write_stand_in_encoder(path)
    return path


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, stand_in: Path) -> Path:
    return stand_in if request.param == "stand_in" else Path(real_encoder())


def naive_vectors(folder: Path, texts: list[str], similarity: str, max_tokens: int | None) -> np.ndarray:
    """By transformers alone, one text at a time without padding; `None` leaves the limit to the tokenizer."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in texts:
        one = tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt")
        with torch.no_grad():
            vector = model(**one).last_hidden_state[0].mean(0)
        vectors.append(vector / vector.norm() if similarity == "cosine" else vector)
    return torch.stack(vectors).numpy()


# A real encoder takes seconds where the stand-in takes none, so each similarity is seen of one of the two.
EACH = pytest.mark.parametrize(
    ("folder", "similarity"), [("stand_in", "dot"), ("minilm", "cosine")], indirect=["folder"]
)


@EACH
def test_vectors_equal_mean_pooling_of_one_text_at_a_time(folder: Path, similarity: str) -> None:
    encoder = Encoder(str(folder), similarity, max_tokens=100)
    expected = naive_vectors(folder, TEXTS, similarity, 100)
    np.testing.assert_allclose(encoder.encode(TEXTS).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("folder", "threads"), [("stand_in", 1), ("minilm", 3)], indirect=["folder"])
def test_the_same_texts_have_the_same_bits_in_any_order(folder: Path, threads: int) -> None:
    encoder, before = Encoder(str(folder)), torch.get_num_threads()
    texts = [" ".join(WORDS[start : start + 2 + start % 23]) for start in range(0, 300, 15)]
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    torch.set_num_threads(threads)
    try:
        vectors = encoder.encode(texts, 64)
        assert torch.equal(encoder.encode([texts[row] for row in order], 64), vectors[order])
        for tokens_per_batch in (1, 100_000):
            torch.testing.assert_close(encoder.encode(texts, tokens_per_batch), vectors, atol=1e-5, rtol=0)
    finally:
        torch.set_num_threads(before)


def test_texts_that_are_tokenized_already_have_the_same_vectors(stand_in: Path) -> None:
    encoder = Encoder(str(stand_in), max_tokens=24)
    ids = encoder.token_ids(TEXTS)
    expected = encoder.model.tokenizer(TEXTS, truncation=True, max_length=24)["input_ids"]
    assert [row.tolist() for row in ids] == expected
    assert {row.dtype for row in ids} == {np.dtype(np.uint16)}
    for tokens_per_batch in (64, 8192):
        vectors = encoder.encode_tokens(ids, tokens_per_batch)
        assert torch.equal(vectors, encoder.encode(TEXTS, tokens_per_batch))
    assert encoder.encode([]).shape == (0, encoder.dim)


def test_encoding_with_gradient_gives_the_same_vectors_and_the_gradient_of_the_naive_computation(
    stand_in: Path,
) -> None:
    encoder, naive = Encoder(str(stand_in), "dot"), AutoModel.from_pretrained(stand_in).eval()
    read = encoder.model.tokenizer
    one, two = (naive(**read(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in SHORT)
    (one @ two).backward()
    for tokens_per_batch in (1, 64, 8192):
        encoder.zero_grad()
        vectors = encoder.encode_with_gradient(encoder.token_ids([*TEXTS, *SHORT]), tokens_per_batch)
        torch.testing.assert_close(vectors.detach()[:-2], encoder.encode(TEXTS), atol=1e-5, rtol=0)
        (vectors[-1] @ vectors[-2]).backward()
        assert all(weight.grad is not None for weight in encoder.parameters() if weight.requires_grad)
        ours = encoder.backbones[0].get_input_embeddings().weight.grad
        torch.testing.assert_close(ours, naive.get_input_embeddings().weight.grad, atol=1e-3, rtol=1e-4)
    assert not encoder.encode(TEXTS).requires_grad


def test_truncation_depends_on_max_tokens_and_never_on_the_batch_size(stand_in: Path) -> None:
    text, max_tokens = " ".join(WORDS[:60]), 16
    cut = " ".join(WORDS[: max_tokens - 2])  # [CLS] and [SEP] count too
    changed_inside = " ".join([*WORDS[: max_tokens - 3], WORDS[100], *WORDS[max_tokens - 2 : 60]])
    encoder = Encoder(str(stand_in), max_tokens=max_tokens)
    for tokens_per_batch in (1, 4, 8192):
        vectors = encoder.encode([text, cut, changed_inside], tokens_per_batch)
        torch.testing.assert_close(vectors[0], vectors[1], atol=1e-5, rtol=0)
        assert (vectors[0] - vectors[2]).abs().max() > 1e-3
    assert [len(row) for row in encoder.token_ids([text, cut, "x"])] == [max_tokens, max_tokens, 3]
    assert Encoder(str(stand_in)).max_tokens == 128  # the smaller one of tokenizer and position table
    with pytest.raises(UserError, match=r"max_tokens.*129.*128"):
        Encoder(str(stand_in), max_tokens=129)


@EACH
def test_a_saved_encoder_loads_in_transformers_and_sentence_transformers(
    folder: Path, tmp_path: Path, similarity: str
) -> None:
    encoder = Encoder(str(folder), similarity, max_tokens=24)
    with torch.no_grad():
        encoder.backbones[0].get_input_embeddings().weight.mul_(1.1)  # as after training
    encoder.save(tmp_path / "saved")
    vectors = encoder.encode(TEXTS).numpy()

    exported = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(exported.encode(TEXTS), vectors, atol=1e-5)
    assert exported.similarity_fn_name == similarity
    np.testing.assert_allclose(naive_vectors(tmp_path / "saved", TEXTS, similarity, None), vectors, atol=1e-5)
    np.testing.assert_allclose(Encoder(str(tmp_path / "saved")).encode(TEXTS), vectors, atol=1e-6)
    pickles = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
    assert not [path for path in (tmp_path / "saved").rglob("*") if path.suffix in pickles]


def test_weights_that_a_folder_lacks_are_the_same_at_every_load(stand_in: Path, tmp_path: Path) -> None:
    digests = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        Encoder(str(stand_in)).save(tmp_path / str(seed))
        assert torch.equal(torch.get_rng_state(), state)
        digests.append(weights_sha256(tmp_path / str(seed)))
    assert digests[0] == digests[1]
