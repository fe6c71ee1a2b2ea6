"""One flipped bit in a file that has a checksum: whoever reads the file names it, and `replug doctor` does too."""

import json
import shutil
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.data.folder import CHECKSUMS, file_sum, manifest_problems
from replug.data.prepare.sets import prepare_rows
from replug.data.store import PreparedSet
from replug.data.tokenizing import TokenIds, word_tokenizer
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder

NUM_DOCUMENTS = 5


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    documents = [{"id": f"d{i}", "text": f"a text of number {i}"} for i in range(NUM_DOCUMENTS)]
    texts = {name: [{"id": f"{name}{i}", "context": f"{name} {i}", "continuation": " ends", "gold": ["d1"]}
             for i in range(3)] for name in ("queries", "heldout")}  # fmt: skip
    for name, lines in {"corpus": documents, **texts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def whole(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "set"
    paths = [rows / f"{name}.jsonl" for name in ("corpus", "queries", "heldout")]
    prepare_rows(*paths, out, {}, TokenIds(word_tokenizer(r"\S+"), 16, 10))
    return out


@pytest.fixture
def prepared(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "set"))


def flip(path: Path, place: float, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


def read_all(folder: Path) -> None:
    """All that a run reads."""
    prepared = PreparedSet(folder)
    prepared.queries.examples()
    prepared.heldout.examples()
    prepared.corpus.texts(range(NUM_DOCUMENTS))
    prepared.corpus.token_ids(range(NUM_DOCUMENTS))


FILES = [
    *("queries.arrow", "heldout.arrow", "manifest.json", "inputs.json", "documents/tokens.json"),
    *("documents/00000.arrow", "documents/00000.tokens.npy", "documents/00000.ends.npy"),
]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named_by_who_reads_the_file_and_by_verify(prepared: Path, name: str) -> None:
    for place, bit in ((0.0, 0), (0.5, 6), (1.0, 0)):
        flip(prepared / name, place, bit)
        with pytest.raises(UserError, match=name):
            read_all(prepared)
        problems = manifest_problems(prepared)
        assert problems and name in problems[0]
        flip(prepared / name, place, bit)
    read_all(prepared)
    assert manifest_problems(prepared) == []
    assert sorted(FILES) == sorted(str(p.relative_to(prepared)) for p in prepared.rglob("*") if p.is_file())


def test_a_manifest_whose_proof_or_checksums_were_changed_is_refused(prepared: Path) -> None:
    shutil.copy(prepared / "heldout.arrow", prepared / "queries.arrow")
    content = json.loads((prepared / "manifest.json").read_text())
    content["files"]["queries.arrow"] = file_sum(prepared / "queries.arrow")
    (prepared / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest\.json is damaged: its content differs from its own checksum"):
        PreparedSet(prepared)


def test_one_flip_in_any_file_of_an_encoder_that_we_wrote_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    write_stand_in_encoder(tmp_path / "own")
    Encoder(str(tmp_path / "own")).save(tmp_path / "saved")
    files = [path for path in sorted((tmp_path / "saved").rglob("*")) if path.is_file() and path.name != CHECKSUMS]
    assert {"model.safetensors", "tokenizer.json", "config.json"} < {path.name for path in files}
    assert tmp_path / "saved" / "1_Pooling/config.json" in files
    for path in files:
        whole = path.read_bytes()
        flip(path, 0.5)
        with pytest.raises(UserError, match=f"{path} is damaged: its checksum differs; bring it back"):
            Encoder(str(tmp_path / "saved"))
        path.write_bytes(whole)
    assert Encoder(str(tmp_path / "saved")).dim == Encoder(str(tmp_path / "own")).dim
