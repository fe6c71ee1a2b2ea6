"""Files of vectors: what is damaged is never read, and what a disk or system refuses is named."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.index_workers.vectors import map_vectors, write_vectors
from tests.support.command_line import ROOT

VECTORS = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)


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
from replug.index_workers.vectors import require_intact
from replug.index_workers.version_store import VersionStore  # noqa: E402
from tests.support.index_versions import PLAN, save_weights

store = VersionStore(Path(sys.argv[1]))
plan = replace(PLAN, version=0, num_documents=640)
assert plan.num_files == 160
vectors = np.random.default_rng(0).normal(size=(640, 2)).astype(np.float16)
store.save_snapshot(0, save_weights(b"w"))
store.begin(plan)
for file in range(160):
    store.write_vectors(0, file, vectors[4 * file : 4 * file + 4])
store.publish(plan)

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
searcher = Searcher(store.root, 0, 1, threads=1)
searcher.load(0)
open_before = len(os.listdir("/proc/self/fd"))
print(searcher.search(0, vectors[:1].astype(np.float32), 640)[0].shape, open_before)

held = []
try:
    while True:
        held.append(open(sys.argv[0]))
except OSError:
    pass
for ask in (lambda: store.open_vectors(plan, [7]), lambda: require_intact(store.vectors_path(0, 7), {})):
    try:
        ask()
    except RunError as error:
        print(error)
"""


def test_more_files_than_descriptors_are_served_and_a_limit_of_the_system_is_called_one(tmp_path: Path) -> None:
    script = tmp_path / "many_files.py"
    script.write_text(MANY_FILES)
    command = [sys.executable, str(script), str(tmp_path / "index")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert re.fullmatch(r"\(1, 640\) \d\d?", lines[0])
    for line, said in (
        (lines[1], "cannot be read: Too many open files"),
        (lines[2], "cannot be read: Too many open"),
    ):
        assert re.search(rf"vectors-0000[78]\.npy {said}", line), line
        assert "this is a limit of the system and the file may be whole: see `ulimit -n`" in line
        assert "damaged" not in line
