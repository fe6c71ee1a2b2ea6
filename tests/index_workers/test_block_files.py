"""Files of vectors and of token ids: what is damaged is never read, and what a disk or system refuses is named."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.index_workers.block_files import TokenFiles, map_vectors, token_fingerprint, write_vectors
from replug.index_workers.build_plan import BuildPlan
from replug.models.encoder import Encoder
from replug.models.stand_in_encoder import write_stand_in_encoder
from tests.support.command_line import ROOT

VECTORS = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)


# How many ------------------------------------------------------------------------------------------------


# What they hold --------------------------------------------------------------------------------------------


def test_mapped_vectors_are_those_that_were_written_and_the_file_is_never_written_to(tmp_path: Path) -> None:
    path = tmp_path / "vectors.npy"
    write_vectors(path, VECTORS)
    content = path.read_bytes()
    vectors = map_vectors(path, (20, 3))
    np.testing.assert_array_equal(vectors, VECTORS.astype(np.float16))
    vectors[:] = 0
    assert path.read_bytes() == content


@pytest.mark.parametrize("cut", [0, 5, 100, 128, 200, -1])
def test_a_file_that_was_cut_short_is_damaged_and_never_mapped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "vectors.npy"
    write_vectors(path, VECTORS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=rf"{path} is damaged, "):
        map_vectors(path, (20, 3))


# What a system allows --------------------------------------------------------------------------------------

MANY_FILES = """
import os, resource, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from replug.config.errors import RunError
from replug.index_workers.searcher import Searcher
from replug.index_workers.block_files import require_intact
from replug.index_workers.version_store import VersionStore  # noqa: E402
from tests.support.index_versions import PLAN, save_weights

store = VersionStore(Path(sys.argv[1]))
plan = replace(PLAN, version=0, num_documents=1600)
assert plan.num_files == 400
vectors = np.random.default_rng(0).normal(size=(1600, 2)).astype(np.float16)
store.save_snapshot(0, save_weights(b"w"))
store.begin(plan)
for file in range(400):
    store.write_vectors(0, file, vectors[4 * file : 4 * file + 4])
store.publish(plan)

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
searcher = Searcher(store.root, 0, 1, threads=1)
searcher.load(0)
open_before = len(os.listdir("/proc/self/fd"))
print(searcher.search(0, vectors[:1].astype(np.float32), 1600)[0].shape, open_before)

held = []
try:
    while True:
        held.append(open(sys.argv[0]))
except OSError:
    pass
for ask in (lambda: store.open_vectors(plan, [7]), lambda: require_intact(store.vectors_path(0, 7), "")):
    try:
        ask()
    except RunError as error:
        print(error)
held.clear()

mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**16, resource.RLIM_INFINITY))
try:
    while True:
        held.append(store.open_vectors(plan, [8]))
except RunError as error:
    message = str(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(message)
"""


def test_more_files_than_descriptors_are_served_and_a_limit_of_the_system_is_called_one(tmp_path: Path) -> None:
    script = tmp_path / "many_files.py"
    script.write_text(MANY_FILES)
    command = [sys.executable, str(script), str(tmp_path / "index")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stdout + done.stderr
    assert re.fullmatch(r"\(1, 1600\) \d\d?", lines[0])
    for line, said in (
        (lines[1], "cannot be read: Too many open files"),
        (lines[2], "cannot be read: Too many open"),
        (lines[3], r"cannot be (mapped|read): Cannot allocate memory"),
    ):
        assert re.search(rf"vectors-0000[78]\.npy {said}", line), line
        assert "this is a limit of the system and the file may be whole: see `ulimit -n`" in line
        assert "damaged" not in line


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
