"""`replug prepare --index`, `doctor` and `search` of a user's own documents, as a user types them, without any LM."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replug.data.sources.built_in_texts import stand_in_texts
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder

CONFIG = Path(__file__).parents[2] / "configs/own_data.yaml"
TEXTS = [text.text for text, _ in zip(stand_in_texts(), range(90), strict=False)]
QUERY = " ".join(TEXTS[7].split()[20:40])


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index_command")


def overrides(folder: Path, **changes: object) -> list[str]:
    keys = {
        "retriever.path": "stand_in",
        "data.corpus": folder / "docs.jsonl",
    }
    return [f"{key}={value}" for key, value in {**keys, **changes}.items()]


@pytest.fixture(scope="module")
def index(folder: Path, finish: Callable[..., str]) -> Path:
    """Written by the real command."""
    write_rows(folder / "docs.jsonl", TEXTS)
    output = finish(folder / "run", "--index", *overrides(folder), command="prepare", config="own_data")
    assert json.loads(output.splitlines()[-1]) == {
        "index": str(folder / "run/index"),
        "documents": 90,
        "kind": "flat_fp16",
    }
    return folder / "run/index"


def found(output: str) -> list[dict]:
    return [json.loads(line)["found"] for line in output.splitlines()]


def test_search_gives_what_brute_force_gives(index, replug):
    ended = replug("search", index, QUERY, "--k", 3, "--json")
    assert ended.status == 0
    encoder = Encoder(str(VersionStore(index).encoder_folder(0)))
    vectors = encoder.encode(TEXTS).numpy().astype(np.float16).astype(np.float32)
    similarities = vectors @ encoder.encode([QUERY]).numpy()[0]
    expected = np.argsort(-similarities, kind="stable")[:3]
    (answer,) = found(ended.output)
    assert [doc["id"] for doc in answer] == [f"d{row}" for row in expected]
    assert [doc["text"] for doc in answer] == [TEXTS[row] for row in expected]
    assert [doc["similarity"] for doc in answer] == pytest.approx(similarities[expected].tolist(), abs=1e-3)


@pytest.mark.slow
def test_another_kind_is_built_of_the_same_vectors_and_finds_the_same(index, folder, finish, replug):
    """In a copy, so that the other tests have theirs."""
    copy = Path(shutil.copytree(index, folder / "lossy" / "index"))
    blocks = sorted((copy / "v000000").glob("vectors-*.npy"))
    stamps = [path.stat().st_mtime_ns for path in blocks]
    changes = {"index.kind": "IVF4,SQ8", "index.nprobe": 4, "index.num_shards": 2}
    output = finish(copy.parent, "--index", *overrides(folder, **changes), command="prepare", config="own_data")
    assert json.loads(output.splitlines()[-1])["kind"] == "IVF4,SQ8"
    assert "embedding index" not in output
    assert [path.stat().st_mtime_ns for path in blocks] == stamps
    names = {path.name for path in (copy / "v000000").glob("*.faiss")}
    assert names == {"quantizer.faiss", "shard-00000.faiss", "shard-00001.faiss"}
    assert replug("doctor", copy).status == 0
    lossy, exact = (found(replug("search", place, QUERY, "--k", 5, "--json").output) for place in (copy, index))
    assert lossy == exact and len(exact[0]) == 5


def test_another_encoder_and_other_documents_are_refused_before_anything_is_overwritten(
    index, folder, tmp_path, replug
):
    write_stand_in_encoder(tmp_path / "encoder", seed=1)
    other = write_rows(tmp_path / "other.jsonl", TEXTS[:50])
    before = sorted((path, path.stat().st_mtime_ns) for path in index.rglob("*"))
    for key, value, named in (
        ("retriever.path", tmp_path / "encoder", ("weights_sha256 is ", f"the index version in {index}/")),
        ("data.corpus", other, ("data.corpus (sha256) is ", f"the prepared set in {index}/corpus was made with")),
    ):
        keys = overrides(folder, **{key: value})
        ended = replug("prepare", CONFIG, "--index", f"run_dir={index.parent}", *keys)
        assert (ended.status, ended.output) == (2, "") and all(name in ended.errors for name in named), ended.errors
    assert sorted((path, path.stat().st_mtime_ns) for path in index.rglob("*")) == before
