"""Small files that would be gigabytes: what is read of a source at once has bounds, whatever the file holds."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replug.config.errors import UserError
from replug.data import rows
from replug.data.sources import lines
from replug.data.sources.records import FieldMap, Rejected, SourceText
from replug.data.sources.shards import plan_source, read_source_shard
from tests.support.command_line import ROOT

READ = """
import json, resource, sys
from collections import Counter
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import plan_source, read_source_shard

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fields, found = FieldMap(**json.loads(sys.argv[2])), Counter()
for shard in plan_source(sys.argv[1], fields).shards:
    for line, item in read_source_shard(shard, fields):
        found[getattr(item, "reason", "text")] += 1
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, found]))
"""


def read(source: Path, **fields: object) -> tuple[float, dict[str, int]]:
    """Megabytes that reading took, and how many texts there were and rows rejected, by reason."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(source), json.dumps(fields)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kilobytes, found = json.loads(done.stdout)
    return kilobytes / 1024, found


def repeated_value(path: Path, name: str, size: int, count: int = 256) -> Path:
    """A value of so many bytes is stored once, for all rows; `a.b` is field b within a."""
    array = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [" word" * (size // 5)])
    outer, _, inner = name.partition(".")
    column = pa.StructArray.from_arrays([array], [inner]) if inner else array
    others = {"text": pa.array(["a text"] * count)} if name != "text" else {}
    pq.write_table(pa.table({outer: column, **others}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    return path


@pytest.mark.parametrize("name", ["text", "meta.domain"])
def test_a_value_that_all_rows_share_is_made_for_one_row_at_a_time(name, tmp_path):
    source = repeated_value(tmp_path / "a.parquet", name, 4 << 20)  # a gigabyte as rows
    megabytes, found = read(source, max_characters=1 << 19, domain=name if "." in name else "domain")
    assert found == {"too_long": 256}
    assert megabytes < 500


def test_a_text_of_many_lines_is_held_no_longer_than_it_may_be(tmp_path):
    member = gzip.compress(json.dumps({"text": "word " * 800_000}).encode() + b"\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": " = One\\n"}\n') + 120 * member)  # 480 MB
    megabytes, found = read(tmp_path / "a.jsonl.gz", new_text_at="^ = ")
    assert found == {"too_long": 1}
    assert megabytes < 400


@pytest.mark.parametrize("fields", [{}, {"new_text_at": "^ = "}], ids=["a text a file", "many texts a file"])
def test_a_file_of_text_is_held_no_longer_than_a_text_may_be(fields, tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(1 << 29)  # one line without an end
    megabytes, found = read(tmp_path / "a.txt", **fields)
    assert found == {"too_long": 1}
    assert megabytes < 450


@pytest.mark.parametrize("at", [5, (1 << 20) - 1, (1 << 20) + 1, (2 << 20) - 2])
def test_a_byte_that_is_no_utf8_is_found_wherever_it_stands(at, tmp_path):
    content = ("é" * (1 << 20)).encode()
    (tmp_path / "a.txt").write_bytes(content[: at // 2 * 2] + b"\xff" + content[at // 2 * 2 :])
    [(_, item)] = read_source_shard(plan_source(str(tmp_path / "a.txt"), FieldMap()).shards[0], FieldMap())
    assert isinstance(item, Rejected)
    assert (item.reason, item.detail) == (
        "not_utf8",
        f"at byte {at // 2 * 2}; convert the file, or leave it out of the source",
    )


def test_a_line_of_own_rows_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    path = tmp_path / "docs.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1, "text": "short"}\n' + b'{"id": 2, "text": "' + b"x" * 10**6 + b'"}\n'))
    with pytest.raises(UserError, match=r"docs\.jsonl\.gz:2: the line is longer than 100 bytes"):
        list(rows.read_documents(path))


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([2**61] * 3, pa.timestamp("us")),
        pa.array([[[1]], None, []], pa.list_(pa.list_(pa.int8()))),
        pa.array([b"\xff\xfe"] * 3, pa.binary()),
    ],
    ids=lambda array: str(array.type),
)
def test_ids_of_any_type_are_taken_or_rejected_and_never_a_traceback(ids, tmp_path):
    pq.write_table(pa.table({"id": ids, "text": ["one", "two", "three"]}), tmp_path / "a.parquet")
    found = [
        item
        for _, item in read_source_shard(plan_source(str(tmp_path / "a.parquet"), FieldMap()).shards[0], FieldMap())
    ]
    assert all(isinstance(item, SourceText | Rejected) for item in found)
    assert found
