"""The same bytes whatever the workers, files, source shards and interruptions, and nothing in two splits."""

import itertools
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

import replug.data.prepare.assembly
import replug.data.prepare.cutting
import replug.data.prepare.reading
import replug.data.sources.shards
from replug.config.errors import RunError
from replug.data.folder import read_mark
from tests.support.preparing import contents, ids_on, prepare, prepare_apart, rows_of, texts_of, write_jsonl
from tests.support.processes import PROCESSES

ROWS = rows_of(160)
FULL = os.environ.get("REPLUG_STORM") == "full"


@pytest.fixture
def small(monkeypatch) -> None:
    """Many source shards, runs and shards."""
    monkeypatch.setattr(replug.data.sources.shards, "SOURCE_SHARD_BYTES", 6000)
    monkeypatch.setattr(replug.data.prepare.assembly, "PIECES_PER_SHARD", 300)
    monkeypatch.setattr(replug.data.prepare.cutting, "RUN_CHARACTERS", 4000)


def dealt(folder: Path, rows: list[dict], seed: int) -> Path:
    """Rows in another order, dealt to other files."""
    rng = random.Random(seed)
    shuffled = rng.sample(rows, len(rows))
    count = rng.randrange(1, 9)
    for i in range(count):
        write_jsonl(folder / f"{rng.randrange(10**6)}/part{i}.jsonl", shuffled[i::count])
    return folder


# The same bytes -----------------------------------------------------------------------------------------

REPEATED = [*ROWS, *({**row, "id": f"again-{row['id']}"} for row in ROWS[:40]), *rows_of(20, seed=7), *ROWS[50:70]]
UNNAMED = [{"text": row["text"], "domain": row["domain"]} for row in [*ROWS, *ROWS[:30]]]
KEYS = {
    "few of each": {"num_documents": 37, "num_queries": 11, "num_heldout": 3},
    "n-grams": {"ngram_overlap": 5, "num_documents": 450, "document_tokens": 7},
}


@pytest.mark.parametrize(("rows", "keys", "shard_bytes"), [(REPEATED, "few of each", 3000), (UNNAMED, "n-grams", 9000)])
def test_shuffled_rows_in_other_files_and_source_shards_give_the_same_bytes(
    rows, keys, shard_bytes, tmp_path, monkeypatch
):
    """A slow test does so with several processes."""
    monkeypatch.setattr(replug.data.prepare.assembly, "PIECES_PER_SHARD", 300)
    whole = prepare(tmp_path / "whole", write_jsonl(tmp_path / "raw.jsonl", rows), **KEYS[keys])
    monkeypatch.setattr(replug.data.sources.shards, "SOURCE_SHARD_BYTES", shard_bytes)
    other = prepare(tmp_path / "other", dealt(tmp_path / "raw", rows, seed=1), **KEYS[keys])
    assert without_names(other.folder) == without_names(whole.folder)


def without_names(folder: Path) -> dict[str, object]:
    """A set without what names the files of its source."""
    found: dict[str, object] = {**contents(folder), "manifest.json": read_mark(folder / "manifest.json", "")}
    found["manifest.json"]["files"].pop("rejected.jsonl", None)  # type: ignore[index]
    found.pop("rejected.jsonl", None)
    return found


# Interruptions ------------------------------------------------------------------------------------------

SIZES = (9000, 200)  # of source shards and shards
STORM_KEYS = {"num_documents": 900, "ngram_overlap": 5}


def start_apart(out: Path, source: Path, num_workers: int) -> BaseProcess:
    process = PROCESSES.Process(target=prepare_apart, args=(str(out), str(source), num_workers, SIZES, STORM_KEYS))
    process.start()
    return process


def kill_after(process: BaseProcess, seconds: float, whole_group: bool) -> bool:
    """Kill -9, and see to it that nothing of it is left; False where it had ended by itself."""
    process.join(seconds)
    try:
        workers = [] if process.exitcode is not None else psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:  # it ended in this moment
        process.join()
    if process.exitcode is not None:
        assert process.exitcode == 0
        return False
    try:
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group yet
        process.kill()
    process.join()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert all(not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE for worker in alive)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "kills"), [(1, 60 if FULL else 10), pytest.param(2, 20 if FULL else 2, id="2 workers")]
)
def test_a_run_killed_again_and_again_ends_with_the_bytes_of_a_quiet_one(num_workers, kills, tmp_path):
    source = write_jsonl(tmp_path / "raw.jsonl", REPEATED)
    start_apart(tmp_path / "warm", source, 1).join()
    begun = time.monotonic()
    quiet = start_apart(tmp_path / "quiet", source, 1)
    quiet.join()
    seconds, expected = time.monotonic() - begun, contents(tmp_path / "quiet")
    assert quiet.exitcode == 0
    rng, out, killed = random.Random(0), tmp_path / "set", 0
    spawning = 2.0 if num_workers > 1 else 0.0
    while killed < kills:
        process = start_apart(out, source, num_workers)
        if kill_after(process, rng.uniform(0, spawning + 0.6 * seconds), whole_group=rng.random() < 0.5):
            killed += 1
        else:
            assert contents(out) == expected
            out = tmp_path / f"set-{killed}"
    process = start_apart(out, source, num_workers)
    process.join()
    assert process.exitcode == 0
    assert contents(out) == expected


def test_a_run_stopped_after_every_write_ends_with_the_bytes_of_a_quiet_one(small, tmp_path, monkeypatch):
    """Each write of a file fails once, the first of all, then the second, and so on."""
    source = write_jsonl(tmp_path / "raw.jsonl", REPEATED[:70])
    keys = {"num_documents": 300}
    expected = contents(prepare(tmp_path / "quiet", source, **keys).folder)
    replace, left = Path.replace, [0]

    def fails_once(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fails_once)
    for number in range(1, 200):
        left[0] = number
        try:
            prepare(tmp_path / "set", source, **keys)
            break
        except KeyboardInterrupt:
            pass
    left[0] = -1
    assert contents(tmp_path / "set") == expected
    assert number > 5


def test_a_killed_worker_is_one_clear_line_and_the_rerun_goes_on(small, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "raw.jsonl", REPEATED)
    expected = contents(prepare(tmp_path / "quiet", source).folder)
    finished = replug.data.prepare.reading.Progress.advance
    count = []

    def kill_one(*arguments: object, **keys: object) -> None:
        finished(*arguments, **keys)
        count.append(keys)
        if len(count) == 3:
            workers = [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]
            max(workers, key=psutil.Process.create_time).kill()

    with monkeypatch.context() as patch:
        patch.setattr(replug.data.prepare.reading.Progress, "advance", kill_one)
        patch.setattr(replug.data.prepare.reading, "num_processes", lambda *_: 2)
        with pytest.raises(RunError, match="a preparing process was killed"):
            prepare(tmp_path / "set", source)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("set/work/cut/*/report.json")}
    assert len(before) >= 3
    prepare(tmp_path / "set", source)
    assert contents(tmp_path / "set") == expected


# Nothing in two splits -----------------------------------------------------------------------------------


def words(prefix: str, count: int = 8) -> str:
    return " ".join(f"{prefix}{i}" for i in range(count))


PAIRS = [*itertools.combinations(["documents", "queries", "heldout"], 2)]
WHAT = {"documents": "document", "queries": "query"}


@pytest.mark.parametrize(("loses", "wins", "shared"), [*((*pair, 13) for pair in PAIRS), (*PAIRS[0], 12)])
def test_thirteen_words_in_common_with_another_split_are_found(loses, wins, shared, small, tmp_path):
    (a,), (b,) = ids_on(loses, 1), ids_on(wins, 1)
    common = words("Planted", shared)
    texts = {a: f"one two {common} three", b: f"a b c, {common.upper().replace(' ', ', ')}! And more"}
    rows = [{"id": name, "text": f"{text} {words('pad' + name, 48)}"} for name, text in texts.items()]
    source = write_jsonl(tmp_path / "a.jsonl", [*rows_of(60, seed=3, words=90), *rows])
    prepared = prepare(tmp_path / "set", source, context_tokens=16, document_tokens=32, ngram_overlap=13)
    found = [split for split, texts in texts_of(prepared).items() if any("planted0" in t.casefold() for t in texts)]
    dropped = prepared.manifest["dropped"].get(f"{WHAT[loses]} that shares 13 words with another split's text")
    assert (found, dropped) == (([wins], 1) if shared >= 13 else ([loses, wins], None))
    assert prepared.manifest["disjoint"]["ngram"] == 13


# Sampling -----------------------------------------------------------------------------------------------


def test_each_split_has_exactly_the_number_requested(small, tmp_path):
    source = write_jsonl(tmp_path / "raw.jsonl", ROWS)
    prepared = prepare(tmp_path / "set", source, num_documents=299, num_queries=77, num_heldout=31)
    assert prepared.manifest["counts"] == {"documents": 299, "queries": 77, "heldout": 31}
    whole = texts_of(prepare(tmp_path / "whole", source, num_queries=10**6, num_heldout=10**6))
    for (split, texts), number in zip(texts_of(prepared).items(), (299, 77, 31), strict=True):
        assert texts == whole[split][:number] and len(texts) == number


def test_enough_texts_are_left_where_most_repeat(small, tmp_path):
    """The licence at the head of all files, say, of which most of the first held-out pieces are made."""
    texts = [*[words("licence", 12)] * 120, *(words(f"other{i}_", 12) for i in range(4))]
    ids = [*ids_on("heldout", len(texts)), *ids_on("queries", 40), *ids_on("documents", 100)]
    texts += [row["text"] for row in ROWS[:140]]
    source = write_jsonl(tmp_path / "raw.jsonl", ({"id": i, "text": text} for i, text in zip(ids, texts, strict=True)))
    prepared = prepare(tmp_path / "set", source, num_documents=20, num_queries=5, num_heldout=5)
    assert len(prepared.heldout) == 5
