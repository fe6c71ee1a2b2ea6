"""Token ids on disk: what is read is what was written, and nothing that is damaged is ever read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.index_workers.block_files import TokenFiles, token_fingerprint
from replug.index_workers.build_plan import BuildPlan
from replug.models.encoder import Encoder
from replug.models.stand_in_encoder import write_stand_in_encoder

PLAN = BuildPlan(
    version=0,
    step=0,
    weights_sha256="w",
    corpus_path="documents",
    corpus_sha256="c",
    num_documents=62,
    block_documents=12,
    similarity="cosine",
    max_tokens=100,
    dim=32,
    dtype="float32",
    tokens_per_batch=512,
)


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    write_stand_in_encoder(tmp_path / "encoder")
    return Encoder(str(tmp_path / "encoder"))


def some_ids(dtype: type[np.unsignedinteger] = np.uint16) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 2**16, size, dtype=dtype) for size in (3, 128, 2, 17)]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_ids_come_back_as_they_were(tmp_path: Path, dtype: type[np.unsignedinteger], num_rows: int) -> None:
    files, ids = TokenFiles(tmp_path, "f"), some_ids(dtype)[:num_rows]
    files.write(7, ids)
    found = files.read(7)
    assert found is not None
    for row, expected in zip(found, ids, strict=True):
        assert row.dtype == dtype
        np.testing.assert_array_equal(row, expected)
    assert [path.name for path in files.folder.iterdir()] == ["tokens-00007.npy"]


def test_no_flipped_byte_and_no_torn_end_is_ever_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = TokenFiles(tmp_path, "f")
    files.write(0, some_ids())
    path = files.path(0)
    good = path.read_bytes()
    flipped = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 11)]
    torn = [good[:size] for size in range(0, len(good), 13)]
    for content in [*flipped, *torn]:
        path.write_bytes(content)
        assert files.read(0) is None
    said = f"warning: {path} is damaged; tokenizing these documents again"
    assert capsys.readouterr().err.splitlines() == [said] * len(flipped + torn)
    files.write(0, some_ids())
    assert files.read(0) is not None


def test_a_disk_that_takes_nothing_is_said_and_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokens-f").write_text("a file where the folder should be")
    files = TokenFiles(tmp_path, "f")
    files.write(0, some_ids())
    assert files.read(0) is None
    said = capsys.readouterr().err
    assert f"{files.path(0)} cannot be written (File exists); the next refresh will tokenize these again" in said


def test_the_folder_follows_from_tokenizer_limit_corpus_and_files_and_from_no_call(
    encoder: Encoder, tmp_path: Path
) -> None:
    first = token_fingerprint(encoder.tokenizer, PLAN)
    encoder.encode(["a cat", "some words that are longer"])
    encoder.tokenizer(["a", "b c"], padding="longest", truncation=True, max_length=5)
    encoder.save(tmp_path / "saved")
    for again in (encoder, Encoder(str(tmp_path / "saved"))):
        assert token_fingerprint(again.tokenizer, replace(PLAN, version=3, step=9, weights_sha256="x")) == first
    others = [replace(PLAN, max_tokens=64), replace(PLAN, corpus_sha256="d"), replace(PLAN, block_documents=13)]
    encoder.tokenizer.add_tokens(["newword"])
    found = {token_fingerprint(encoder.tokenizer, PLAN), *(token_fingerprint(encoder.tokenizer, p) for p in others)}
    assert len(found | {first}) == 5
