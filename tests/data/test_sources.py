"""Where raw texts come from, and what they are called."""

import bz2
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from huggingface_hub.errors import HTTPError

from replug.config.errors import RunError, UserError
from replug.data.rows import read_rows
from replug.data.sources import formats, shards
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import plan_source, source_fingerprint
from replug.data.sources.texts import read_items
from tests.support.preparing import contents, jsonl, parquet, prepare, rows_of, write_files, write_jsonl


def read(source: object, fields: FieldMap | None = None) -> list:
    fields = fields or FieldMap()
    source_shards = plan_source(str(source), fields).shards
    return [item for source_shard in source_shards for _, item in read_items(source_shard, fields) if item]


# Forms of sources ---------------------------------------------------------------------------------------

ROWS = rows_of(150)


@pytest.mark.parametrize("name", ["wiki.txt.gz", "wiki.txt.zst", "wiki.txt.bz2"])
def test_a_packed_text_is_the_text(name, tmp_path):
    content = b" = A =\none\n = B =\ntwo\n"
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda text: pa.compress(text, "zstd", asbytes=True)}
    (tmp_path / "wiki.txt").write_bytes(content)
    (tmp_path / name).write_bytes(pack[Path(name).suffix](content))
    for fields in (FieldMap(), FieldMap(new_text_at="^ = ")):
        plain, packed = read(tmp_path / "wiki.txt", fields), read(tmp_path / name, fields)
        assert [item.text for item in packed] == [item.text for item in plain]
        assert len(packed) == (2 if fields.new_text_at else 1)


def tsv(rows: list[dict]) -> bytes:
    """As DPR's psgs_w100.tsv."""
    lines = (f'{row["id"]}\t{row["text"]}\t"A ""title"""\t{row["domain"]}\n' for row in rows)
    return ("id\ttext\ttitle\tdomain\n" + "".join(lines)).encode()


FORMS = {
    "Parquet of many row groups": {"a.parquet": parquet(ROWS, row_group_size=7)},
    "all kinds": {
        "z.parquet": parquet(ROWS[:50]),
        "y.tsv": tsv(ROWS[50:70]),
        "w.csv": tsv(ROWS[70:80]).replace(b"\t", b";"),
        "v.json": json.dumps(ROWS[80:90], indent=1).encode(),
        "x/x.jsonl": jsonl(ROWS[90:]),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_set_byte_for_byte(form, tmp_path, monkeypatch):
    plain = prepare(tmp_path / "plain", write_jsonl(tmp_path / "raw.jsonl", ROWS))
    monkeypatch.setattr(shards, "SOURCE_SHARD_BYTES", 1000)
    other = prepare(tmp_path / "other", write_files(tmp_path / "raw", FORMS[form]))
    assert contents(other.folder) == contents(plain.folder)


def test_a_pattern_of_folders_gives_texts_the_names_they_have_below_its_fixed_part(tmp_path):
    write_files(tmp_path / "raw", {f"{name}/a.txt": name.encode() for name in ("one", "two")})
    for source in (tmp_path / "raw/*/a.txt", tmp_path / "raw/*/*.txt", tmp_path / "raw"):
        found = [(text.id, text.text, text.domain) for text in read(source)]
        assert found == [("one/a.txt", "one", "one"), ("two/a.txt", "two", "two")]
    assert [(t.id, t.domain) for t in read(tmp_path / "raw/one/*.txt")] == [("a.txt", "all")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_source_shard_that_begins_right_at_a_line_takes_it_once(end, tmp_path, monkeypatch):
    lines = [json.dumps({"id": str(i), "text": "x" * (i % 5 + 1)}) for i in range(40)]
    (tmp_path / "a.jsonl").write_bytes(end.join(lines).encode())
    for size in range(1, 120, 7):
        monkeypatch.setattr(shards, "SOURCE_SHARD_BYTES", size)
        assert [text.id for text in read(tmp_path / "a.jsonl")] == [str(i) for i in range(40)]


# Datasets of the hub, and texts that run over many rows -------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A local folder that is taken for the dataset `corpus` of the hub."""
    monkeypatch.chdir(tmp_path)
    real = shards.files_of
    monkeypatch.setattr(shards, "files_of", lambda source: None if source.split(":")[0] == "corpus" else real(source))
    return tmp_path / "corpus"


def test_a_dataset_of_the_hub_gives_the_same_set_as_its_rows_in_a_file(hub, tmp_path):
    for number, rows in enumerate((ROWS[:80], ROWS[80:])):
        write_files(hub, {f"train-0000{number}-of-00002.parquet": parquet(rows)})
    source_shards = plan_source("corpus", FieldMap()).shards
    assert [(source_shard.kind, source_shard.start) for source_shard in source_shards] == [("hub", 0), ("hub", 1)]
    prepared = prepare(tmp_path / "a", "corpus")
    plain = prepare(tmp_path / "b", write_jsonl(tmp_path / "raw.jsonl", ROWS))
    assert contents(prepared.folder) == contents(plain.folder)


def test_a_dataset_of_the_hub_is_streamed_by_its_split(hub):
    write_files(hub, {"train.jsonl": jsonl(ROWS), "test.jsonl": jsonl(ROWS[:1])})
    assert list(read_rows("corpus::test")) == [("corpus::test, row 1", ROWS[0])]
    assert [row for _, row in read_rows("corpus::train")] == ROWS
    with pytest.raises(UserError, match=r"^corpus::dev has no split 'dev'"):
        list(read_rows("corpus::dev"))


def test_a_hub_that_breaks_off_is_named_with_the_row(hub, monkeypatch):
    write_files(hub, {"train.parquet": parquet(ROWS)})
    [source_shard] = plan_source("corpus", FieldMap()).shards

    class BreaksOff:
        num_shards = 1

        def shard(self, num_shards: int, index: int):
            yield {"text": "one"}
            raise HTTPError("the connection was lost")  # httpx's or httpx2's, by the version of huggingface_hub

    monkeypatch.setattr(formats, "_open_hub", lambda name: BreaksOff())
    with pytest.raises(RunError, match=r"corpus broke off after row 1 of shard 0 \(the connection was lost\)"):
        list(read_items(source_shard, FieldMap()))


# What is read of a folder, and what is named ------------------------------------------------------------


SHARDS = {"data/train-0.jsonl": jsonl(ROWS[:80]), "data/train-1.jsonl": jsonl(ROWS[80:])}
JSON_LINES = {f"part-{number}.json.gz": gzip.compress(content) for number, content in enumerate(SHARDS.values())}
NOT_ROWS = [
    (SHARDS, {"README.md": b"# A data set\n", "LICENSE": b"MIT"}),
    (JSON_LINES, {"_SUCCESS": b"", "part-0.json.gz.crc": b"crc\0"}),  # as Spark writes them
    (
        {"a.parquet": parquet(ROWS)},
        {"dataset_info.json": b'{\n "description": ""\n}', "dataset_infos.json": b'{"default": {"features": {}}}'},
    ),
    (SHARDS, {f"{name}.txt": b"some words" for name in "abcdefgh"}),
    (dict(zip(("part-0", "part-1"), SHARDS.values(), strict=True)), {"_SUCCESS": b"", "notes.md": b"{not JSON"}),
    (dict(zip(("a.txt", "b.txt"), SHARDS.values(), strict=True)), {"README.md": b"# A"}),  # JSON Lines called texts
]


@pytest.mark.parametrize("case", NOT_ROWS)
def test_the_rows_of_a_folder_are_read_and_other_files_are_named(case, tmp_path, caplog):
    rows, others = case
    write_files(tmp_path / "raw", rows | others | {".cache/a.metadata": b"hidden", ".gitattributes": b"hidden"})
    for source in ("raw", "raw/**/*"):
        plan = plan_source(str(tmp_path / source), FieldMap())
        assert {text.text for text in read(tmp_path / source)} == {row["text"] for row in ROWS}
        assert set(plan.left_aside) - {".cache/a.metadata", ".gitattributes"} == set(others)
        plan.say("data.source")
        [said] = [record.message for record in caplog.records if "left aside" in record.message]
        assert sorted(others)[0] in said
        caplog.clear()


def test_a_tree_of_texts_leaves_data_aside_and_keeps_its_cards(tmp_path):
    write_files(tmp_path, {"setup.cfg": b"about", "a/x.py": b"import b", "p.json": b"{}", "logo": b"\x89PNG\0"})
    plan = plan_source(str(tmp_path), FieldMap())
    assert [Path(name).name for shard in plan.shards for name in shard.names] == ["x.py", "setup.cfg"]
    assert plan.left_aside == ("logo", "p.json")


def test_a_source_is_known_by_the_files_that_are_read(tmp_path):
    write_files(tmp_path, SHARDS)
    known = source_fingerprint(str(tmp_path), FieldMap())
    write_files(tmp_path, {"README.md": b"a card that somebody added"})
    assert source_fingerprint(str(tmp_path), FieldMap()) == known
    write_files(tmp_path, {"data/train-2.jsonl": b"{}"})
    assert source_fingerprint(str(tmp_path), FieldMap()) != known


def test_links_to_files_are_read_those_to_folders_named_and_those_to_nothing_refused(tmp_path):
    write_files(tmp_path, {"blobs/1": jsonl(ROWS), "other/b.jsonl": jsonl(ROWS)})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/train.jsonl").symlink_to("../blobs/1")
    (tmp_path / "snapshot/more").symlink_to("../other")
    plan = plan_source(str(tmp_path / "snapshot"), FieldMap())
    assert plan.left_aside == ("more/",) and len(read(tmp_path / "snapshot")) == len(ROWS)
    (tmp_path / "snapshot/train2.jsonl").symlink_to("../blobs/2")
    with pytest.raises(UserError, match=r"train2\.jsonl is a link to nothing: is the download complete"):
        read(tmp_path / "snapshot")


def test_a_source_that_is_neither_here_nor_on_the_hub_is_named_as_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*given: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'notes' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"no file or folder notes is here, .* cannot be opened: Couldn't reach"):
        formats._open_hub("notes")
