"""`replug report --policies` as a user types it."""

import json
from pathlib import Path

import pytest

from replug.config.evaluation_schema import PaperConfig
from tests.support.command_line import CommandLine
from tests.support.outcome_folders import counted_in_documents, made_up_rows, write_evaluation


def only(rows: list[dict], *methods: str) -> list[dict]:
    return [{**row, "methods": {name: row["methods"][name] for name in methods}} for row in rows]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Outcomes of two LMs, closed book and with BM25's first document."""
    root = tmp_path_factory.mktemp("policies")
    paper = PaperConfig("table 1", {"none": 0.34}, {"adaptive": {"genread + replug@1": 0.465}})
    tiny = write_evaluation(root / "tiny", only(made_up_rows(60), "none", "bm25@1"), paper=paper)
    rows = only(made_up_rows(60, knows=0.9, seed=1), "none", "bm25@1")
    return [tiny, write_evaluation(root / "large <b>", rows, lm="large <b>", paper=paper)]


@pytest.fixture(scope="module")
def written(replug: CommandLine, folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("report") / "report"
    done = replug("report", *folders, "--policies", out, "--price-in", "2", "--price-out", "6")
    assert done.status == 0, done.printed
    return out, done.printed


def test_every_signal_is_compared(written: tuple[Path, str]):
    out, printed = written
    for shown in (
        *("tiny: none or bm25@1", "p (Holm)", "may gain nothing", "oracle", "AUROC", "dollars", "by relation"),
        str(out),
    ):
        assert shown in printed


def test_the_page_shows_several_lms_with_the_papers_numbers_and_every_figure(written: tuple[Path, str]):
    out, _ = written
    page = (out / "report.html").read_text()
    for shown in ("tiny", "large &lt;b&gt;", "documents hold an answer", "adaptive: genread + replug@1"):
        assert shown in page
    assert page.count("<td>0.465</td>") == 1, "once, of both folders"
    assert "<b>" not in page
    found = {path.stem for path in out.glob("*.svg")}
    assert found == {"accuracy", "relations", "adaptive_bm25_1_tiny", "adaptive_bm25_1_large__b_"}
    assert page.count("<svg") == len(found)


def test_the_pages_numbers_are_json(written: tuple[Path, str]):
    of = json.loads((written[0] / "report.json").read_text(), parse_constant=pytest.fail)["tiny"]
    cells = of["pairs"]["bm25@1"]["help and harm"]
    assert sum(cell["n"] for cell in cells) == of["n"] == 60
    right = {(cell["closed_right"], cell["augmented_right"]): cell["share"] for cell in cells}
    assert right[True, True] + right[True, False] == pytest.approx(of["accuracy"]["none"]["value"])
    assert right[True, True] + right[False, True] == pytest.approx(of["accuracy"]["bm25@1"]["value"])
    for split in (of["popularity"], of["relations"], of["pairs"]["bm25@1"]["popularity"]):
        assert sum(one["n"] for one in split) == 60
    assert all(0 <= one["accuracy"]["adaptive bm25@1"] <= 1 for one in of["pairs"]["bm25@1"]["popularity"])
    signals = ("popularity", "frequency", "mean_logprob", "mean_entropy", "top_score")
    assert set(of["pairs"]["bm25@1"]["thresholds"]) == set(signals)


def test_documents_are_counted_where_questions_have_no_page_views(replug: CommandLine, tmp_path):
    folder = write_evaluation(tmp_path / "counted", counted_in_documents(only(made_up_rows(24), "none", "bm25@1")))
    done = replug("report", folder, "--policies", tmp_path / "report")
    assert done.status == 0, done.printed
    assert "documents that name the subject" in (tmp_path / "report" / "adaptive_bm25_1_tiny.svg").read_text()


def test_one_price_alone_is_refused(replug: CommandLine, folders: list[Path], tmp_path):
    done = replug("report", *folders, "--policies", tmp_path / "report", "--price-in", "1")
    assert done.status == 2 and "--price-out" in done.errors
