"""Commands that write folders: `replug prepare`, its index, a full disk, damage, and two processes for one folder."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import RunError
from replug.data.folder import LOCK, sole_writer
from replug.data.sources.built_in_texts import stand_in_texts
from replug.data.store import PreparedSet
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from replug.models.packaged import write_stand_in_encoder
from replug.train.run_dir import RunDirectory
from tests.support.command_line import ROOT, CommandLine
from tests.support.evaluating import without_ray
from tests.support.outcome_folders import made_up_rows, write_evaluation
from tests.support.preparing import contents, prepare, rows_of, write_jsonl
from tests.support.small_disk import small_disk


def typed(source: Path, out: Path) -> list[str]:
    names = ["data.tokenizer=retriever", "retriever.path=stand_in", "data.context_tokens=16"]
    return ["prepare", str(ROOT / "configs/own_data.yaml"), f"data.source={source}", f"data.out={out}", *names]


def write_source(path: Path, number: int = 120) -> Path:
    """Rows, and one that is broken."""
    write_jsonl(path, rows_of(number, words=60))
    with path.open("a") as file:
        file.write("{broken\n")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "raw.jsonl")


@pytest.fixture(scope="module")
def made(source: Path, replug: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A set, and what was printed."""
    out = tmp_path_factory.mktemp("made") / "set"
    ended = replug(*typed(source, out))
    assert ended.status == 0, ended.printed
    return out, ended.printed


def test_it_says_what_it_made(made):
    out, printed = made
    last = json.loads(printed.splitlines()[-1])
    manifest = json.loads((out / "manifest.json").read_text())
    assert last == {"prepared": str(out), **manifest["counts"]}
    assert f"cut into {last['documents']:,} documents, {last['queries']:,} queries" in printed
    assert "0 shared sources, 0 equal texts" in printed
    assert manifest["rejected"] == {"invalid_json": 1}
    assert json.loads((out / "rejected.jsonl").read_text())["line"] == 121
    assert not (out / "work").exists()


def test_one_process_makes_the_same_bytes_and_verify_is_content(made, source, tmp_path, replug):
    replug(*typed(source, tmp_path / "set"))
    assert contents(tmp_path / "set") == contents(made[0])
    assert "all intact" in replug("doctor", tmp_path / "set").output


def test_verify_names_what_is_damaged_and_prepare_refuses_it(made, source, tmp_path, replug):
    out = Path(shutil.copytree(made[0], tmp_path / "set"))
    shard = out / "documents/00000.tokens.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xaa")
    (out / "heldout.arrow").unlink()
    ended = replug("doctor", out)
    assert ended.status == 1
    assert f"WRONG: {shard} is damaged: its checksum differs" in ended.printed
    assert f"WRONG: {out / 'heldout.arrow'} is missing" in ended.printed
    refused = replug(*typed(source, out))
    named = f"{out}/heldout.arrow is missing; remove the folder and run `replug prepare` again"
    assert refused.status == 2 and named in refused.errors


@pytest.mark.root
def test_a_full_disk_is_named_with_the_file_and_the_rerun_ends_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("replug.data.sources.shards.SOURCE_SHARD_BYTES", 30_000)
    monkeypatch.setattr("replug.data.prepare.assembly.PIECES_PER_SHARD", 500)
    source = write_source(tmp_path / "raw.jsonl", 300)
    prepare(tmp_path / "quiet", source)
    expected = contents(tmp_path / "quiet")
    with small_disk(tmp_path / "disk", megabytes=16) as disk:
        (disk.folder / "set").mkdir()
        failures = set()
        for kilobytes in [0, 4, *range(8, 1200, 60)]:
            disk.leave(kilobytes << 10)
            try:
                prepare(disk.folder / "set", source)
                break
            except RunError as error:
                assert "cannot be written: " in str(error), error
                failures.add(Path(str(error).split(" cannot")[0]).name)
        assert len(failures) > 2
        disk.free()
        if not (disk.folder / "set/manifest.json").exists():
            prepare(disk.folder / "set", source)
        assert contents(disk.folder / "set") == expected


def test_the_example_is_sixty_rows_that_a_run_takes(tmp_path: Path, replug: CommandLine) -> None:
    ended = replug("prepare", "--example", tmp_path / "mine")
    assert ended.status == 0, ended.printed
    paths = {name: tmp_path / f"mine/{name}.jsonl" for name in ("corpus", "train", "dev", "heldout")}
    rows = [json.loads(line) for path in paths.values() for line in path.read_text().splitlines()]
    assert len(rows) == 60
    given = [f"data.{name}={path}" for name, path in paths.items()]
    prepared = replug("prepare", ROOT / "configs/own_data.yaml", *given, f"data.out={tmp_path / 'set'}")
    assert prepared.status == 0, prepared.printed
    made = PreparedSet(tmp_path / "set")
    assert (len(made.corpus), len(made.queries), len(made.require_dev()), len(made.heldout)) == (30, 16, 4, 10)
    examples = [one for store in (made.queries, made.require_dev(), made.heldout) for one in store.examples()]
    gold = [doc for example in examples for doc in example.gold]
    assert len(made.corpus.rows_of(gold)) == 30
    for example in made.heldout.examples():
        [document] = made.corpus.texts([made.corpus.rows_of(example.gold)[example.gold[0]]])
        assert example.continuation.split()[0] in document


# An index of a user's own documents, without any LM -------------------------------------------------------------------

CONFIG = ROOT / "configs/own_data.yaml"
TEXTS = [text.text for text, _ in zip(stand_in_texts(), range(90), strict=False)]
QUERY = " ".join(TEXTS[7].split()[20:40])


def write_documents(path: Path, texts: list[str]) -> Path:
    return write_jsonl(path, [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index_command")


def overrides(folder: Path, **changes: object) -> list[str]:
    keys = {"retriever.path": "stand_in", "data.corpus": folder / "docs.jsonl", **changes}
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.fixture(scope="module")
def index(folder: Path) -> Path:
    """Written by the command; the slow test has Ray."""
    write_documents(folder / "docs.jsonl", TEXTS)
    with without_ray() as here:
        output = here.finish(folder / "run", "--index", *overrides(folder), command="prepare", config="own_data")
    told = {"index": str(folder / "run/index"), "documents": 90, "kind": "flat_fp16"}
    assert json.loads(output.splitlines()[-1]) == told
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
    other = write_documents(tmp_path / "other.jsonl", TEXTS[:50])
    before = sorted((path, path.stat().st_mtime_ns) for path in index.rglob("*"))
    for key, value, named in (
        ("retriever.path", tmp_path / "encoder", ("weights_sha256 is ", f"the index version in {index}/")),
        ("data.corpus", other, ("data.corpus (sha256) is ", f"the prepared set in {index}/corpus was made with")),
    ):
        keys = overrides(folder, **{key: value})
        ended = replug("prepare", CONFIG, "--index", f"run_dir={index.parent}", *keys)
        assert (ended.status, ended.output) == (2, "") and all(name in ended.errors for name in named), ended.errors
    assert sorted((path, path.stat().st_mtime_ns) for path in index.rglob("*")) == before


# Every command that writes a folder, where another process is writing it, after kill -9, and again --------------------

WRITERS = {  # what is typed, and the folder that it writes
    "train debug run_dir={}/run": "run",
    "evaluate eval_lm out={}/out retriever.path=stand_in lm.path=stand_in": "out",
    "prepare debug --index run_dir={}/run": "run",
    "prepare debug run_dir={}/run": "run/data",
    "report {}/finished": "finished",
    "report {}/outcomes --policies {}/page": "page",
}


@pytest.mark.parametrize("said", WRITERS)
def test_a_folder_that_another_process_writes_is_refused_by_its_name(said: str, replug, tmp_path: Path) -> None:
    written = tmp_path / WRITERS[said]
    if "finished" in said:
        finished = RunDirectory(written).folder
        finished.claim({})
        finished.finish([])
    if "outcomes" in said:
        write_evaluation(tmp_path / "outcomes", made_up_rows(60))
    with sole_writer(written):
        before = contents(written)
        ended = replug(*said.replace("{}", str(tmp_path)).split())
        assert contents(written) == before
    assert ended.status == 2 and "Traceback" not in ended.printed, ended.printed
    assert f"{written} is being written by process {os.getpid()} on {os.uname().nodename}" in ended.errors


def test_what_a_killed_process_leaves_does_not_stop_the_next_one(replug: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/data" / LOCK).write_text(json.dumps({"pid": 1, "host": "here"}))
    for _ in range(2):  # and again, on what is finished
        ended = replug("prepare", "debug", f"run_dir={tmp_path}/run")
        assert ended.status == 0, ended.printed
    assert not (tmp_path / "run/data" / LOCK).exists()
