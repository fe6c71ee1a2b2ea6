"""`replug report` over several folders: what it joins, and what it refuses by name."""

import json
from pathlib import Path

import pytest

from replug.train.run_dir import RunDirectory
from tests.support.command_line import CommandLine
from tests.support.outcome_folders import made_up_rows, write_evaluation


def entry(value: float, low: float, high: float, **p: float) -> dict:
    return {"value": value, "n": 40, "interval": [low, high], **p}


def results(none: float, replug: float, p: float) -> dict:
    gain = replug - none
    return {
        "none": {"accuracy": entry(none, none - 0.1, none + 0.1)},
        "replug": {
            "accuracy": entry(replug, replug - 0.1, replug + 0.1),
            "accuracy - none": entry(gain, gain / 2, 2 * gain, p=p, p_holm=p),
        },
    }


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two LMs that answered the same questions."""
    of = {"small": results(0.2, 0.3, 0.03), "large": results(0.5, 0.6, 0.04)}
    rows = made_up_rows(4)
    return [write_evaluation(tmp_path / name, rows, lm=name, results={"popqa": one}) for name, one in of.items()]


def test_evaluations_of_several_lms_are_rows_of_one_table(replug: CommandLine, folders: list[Path], tmp_path: Path):
    ended = replug("report", *folders)
    assert ended.status == 0, ended.printed
    table = " ".join(ended.output.split())
    assert table.startswith("popqa: accuracy, n = 40 ")
    assert "small 0.2000 0.3000 large 0.5000 0.6000" in table
    # Holm over two comparisons: 0.03 becomes 0.06, so none of the two is shown any more.
    assert "small: accuracy of replug − none: +0.1000 (+0.0500 to +0.2000: higher if it were the only" in table
    assert "Verdicts: p < 0.05 after Holm's correction for 2 comparisons." in table


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"texts": ["others"]}, "has other texts than"),
        ({"corpus": "others"}, "has other corpus than"),
        (None, "holds no finished evaluation"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(replug, folders: list[Path], tmp_path: Path, other, message: str):
    path = tmp_path / "other"
    write_evaluation(path, made_up_rows(4), **(other or {}))
    if other is None:
        (path / "manifest.json").unlink()
    ended = replug("report", *folders, path)
    assert ended.status == 2 and message in ended.errors and str(path) in ended.errors


def bits_of(none: float, lsr: float) -> dict:
    difference = entry(lsr - none, lsr - none - 0.1, lsr - none + 0.1, p=0.01)
    return {"none": {"bpb": entry(none, 1, 2)}, "lsr": {"bpb": entry(lsr, 1, 2), "bpb - none": difference}}


def write_run(path: Path, heldout: float | None, dev: float, of_set: str = "s") -> Path:
    path.mkdir()
    measured = {} if heldout is None else {"language_modelling": bits_of(1.5, heldout)}
    folder = RunDirectory(path).folder
    folder.claim({"data.sha256": of_set})
    (path / "results.json").write_text(json.dumps({**measured, "weights": {"best": {"bpb": dev}}}))
    folder.finish(["results.json"])
    return path


def test_runs_are_rows_of_bits_per_byte(replug: CommandLine, tmp_path: Path):
    runs = [write_run(tmp_path / "0", 1.25, 1.3), write_run(tmp_path / "1", None, 1.2)]
    ended = replug("report", *runs)
    assert ended.status == 0, ended.printed
    table = " ".join(ended.output.split())
    assert "0 1.5000 1.2500" in table and "0: bpb of lsr − none: -0.2500 (" in table
    assert "run bpb of development texts" in table and "0 1.3000 1 1.2000" in table


def test_runs_on_other_data_and_folders_of_two_kinds_are_refused(replug, folders: list[Path], tmp_path: Path):
    runs = [write_run(tmp_path / "0", 1.25, 1.3), write_run(tmp_path / "1", 1.2, 1.2, of_set="other")]
    assert f"{runs[1]} has another prepared set than {runs[0]}" in replug("report", *runs).errors
    assert f"{folders[0]} is an evaluation and {runs[0]} is not" in replug("report", runs[0], folders[0]).errors


def test_the_policies_of_several_lms_are_a_page_and_json(replug: CommandLine, tmp_path: Path):
    tiny = write_evaluation(tmp_path / "tiny", made_up_rows(60))
    rows = made_up_rows(60, knows=0.9, seed=1)
    only = [{**row, "methods": {name: row["methods"][name] for name in ("none", "bm25@1")}} for row in rows]
    large = write_evaluation(tmp_path / "large <b>", only)
    ended = replug("report", tiny, large, "--policies", tmp_path / "out")
    assert ended.status == 0, ended.printed
    page = (tmp_path / "out/report.html").read_text()
    for shown in ("tiny", "large &lt;b&gt;", "documents hold an answer", "adaptive genread + replug@1"):
        assert shown in page
    assert "<b>" not in page
    of = json.loads((tmp_path / "out/report.json").read_text(), parse_constant=pytest.fail)
    assert list(of["large <b>"]) == ["bm25@1"]
    assert list(of["tiny"]) == ["bm25@1", "replug@1", "genread", "genread + bm25@1", "genread + replug@1"]
    assert sum(cell["n"] for cell in of["tiny"]["bm25@1"]["help and harm"]) == 60
    assert "others" in of["tiny"]["bm25@1"]["thresholds"]
