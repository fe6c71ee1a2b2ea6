"""The small example of one's own data is what a run takes: read, proved disjoint, its gold documents found."""

import json
from pathlib import Path

from replug.data.store import PreparedSet
from tests.support.command_line import ROOT, CommandLine


def test_the_example_is_sixty_rows_that_a_run_takes(tmp_path: Path, replug: CommandLine) -> None:
    ended = replug("prepare", "--example", tmp_path / "mine")
    assert ended.status == 0, ended.printed
    paths = {name: tmp_path / f"mine/{name}.jsonl" for name in ("corpus", "queries", "dev", "heldout")}
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


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path, replug: CommandLine) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    ended = replug("prepare", "--example", tmp_path)
    assert (ended.status, "is not empty; give a new folder" in ended.errors) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
