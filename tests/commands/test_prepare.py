"""`replug prepare` and `replug doctor` as a user types them, and what a full disk does to them."""

import json
import shutil
from pathlib import Path

import pytest

from replug.config.errors import RunError
from replug.data.store import PreparedSet
from tests.support.command_line import ROOT, CommandLine
from tests.support.preparing import contents, prepare, rows_of, write_jsonl
from tests.support.small_disk import small_disk


def refused(replug: CommandLine, *typed: object) -> str:
    """The one line that says why."""
    ended = replug(*typed)
    assert ended.status == 2, ended.printed
    return ended.errors


def keys(source: Path, out: Path, *more: str) -> list[str]:
    own = str(ROOT / "configs/own_data.yaml")
    names = [
        "data.tokenizer=retriever",
        "retriever.path=stand_in",
        "data.context_tokens=16",
    ]
    return [own, f"data.source={source}", f"data.out={out}", *names, *more]


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
    ended = replug("prepare", *keys(source, out))
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
    replug("prepare", *keys(source, tmp_path / "set"))
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
    said = refused(replug, "prepare", *keys(source, out))
    assert f"{out}/heldout.arrow is missing; remove the folder and run `replug prepare` again" in said


# A full disk --------------------------------------------------------------------------------------------


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
