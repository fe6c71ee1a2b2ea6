"""The results of outcomes, and the one renderer of their tables and figures."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from replug.config.evaluation_schema import PaperConfig
from replug.config.methods import parse_methods
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.loop import Item, Metric, Task, write_examples
from replug.evals.results import Results, add_effective_documents, compare
from replug.evals.tables import Html, Table, html_page, paper_tables, result_blocks, to_markdown


class Lengths(Task):
    """Two methods answer two examples: with nothing, and with 8 and 7 characters."""

    def __init__(self, *groups):
        self.metrics = {"length": Metric("characters"), "share": Metric("characters", "two", np.exp2)}
        self.examples = [Item(name, "", group) for name, group in zip("ab", groups or ("left", "right"), strict=True)]


ROWS = [
    {"id": name, "group": "all", "methods": {"none": {"numbers": {"characters": 0.0, "two": 2.0}, "detail": {}},
                                             "replug": {"numbers": {"characters": length, "two": 2.0}, "detail": {}}}}
    for name, length in (("a", 8.0), ("b", 7.0))
]  # fmt: skip


def results_of(task=None, paper=None):
    methods = parse_methods(["none", "replug"], 2, {"replug": ""})
    return compare(task or Lengths(), ROWS, methods, paper or PaperConfig(), 200, 0)


def test_the_effective_number_of_documents_tells_an_average_from_a_choice() -> None:
    methods = parse_methods(["none", "replug@2", "replug@2/posterior", "bm25@2", "replug@1"], 2, {"replug": "DIR"})
    close = RetrievedDocuments(np.array([[0, 1], [1, 0]]), np.array([[0.6, 0.5], [0.6, 0.6]]))
    book = EvidenceBook(methods, None, {"replug": close, "bm25": close}, [True, True])
    moved = {"replug@2/posterior": {"detail": {"final_weights": [1.0, 0.0]}}}
    rows = [{"methods": {**{method.name: {"detail": {}} for method in methods}, **moved}} for _ in range(2)]
    results: Results = {method.name: {} for method in methods}
    add_effective_documents(results, book, rows)
    weight = 1 / (1 + math.exp(-0.1))
    first = math.exp(-weight * math.log(weight) - (1 - weight) * math.log(1 - weight))
    assert results["replug@2"]["effective_documents"] == {"value": pytest.approx((first + 2) / 2), "n": 2}
    assert results["replug@2/posterior"]["effective_documents"]["value"] == 1
    assert results["bm25@2"]["effective_documents"]["value"] == pytest.approx(2)
    assert "effective_documents" not in results["replug@1"] | results["none"]


def test_results_hold_value_number_and_interval_by_method_and_metric():
    results = results_of()
    assert list(results) == ["none", "replug"]
    assert results["replug"]["length"] == {"value": 7.5, "n": 2, "interval": [7.0, 8.0]}
    assert results["replug"]["share"]["value"] == 2 ** (15 / 4)
    assert results["replug"]["length/left"] == {"value": 8.0, "n": 1, "interval": [8.0, 8.0]}
    assert results["replug"]["length - none"]["value"] == 7.5
    assert "length - replug" not in results["none"], "each pair once"
    assert results["replug"]["length/left - none"] == {"value": 8.0, "n": 1, "interval": [8.0, 8.0]}


def test_the_table_shows_differences_groups_and_the_papers_figures():
    paper = PaperConfig("table 9", {"replug": 1.5, "Atlas 11B": 0.479}, {"left": {"replug": 2.5}, "law": {"none": 1}})
    results = results_of(paper=paper)
    table = to_markdown(result_blocks(results, "lengths", paper))
    assert "length, table 9" in table and "| 1.5 |" in table
    assert "length of replug − none: +7.5000 (+7.0000 to +8.0000: no difference shown)" in table
    assert "Fewer than 6 examples show no difference." in table
    assert "| left | 1 | 0.0000 | 8.0000 |" in table
    assert "left − " not in table, "differences of groups are in results.json alone"
    assert results["replug"]["length/left"]["paper"] == 2.5 and "law" not in table
    assert "| replug, left | 8.0000 | 2.5 |  |  |" in table and "| Atlas 11B |  | 0.479 |  |  |" in table
    [of_group] = paper_tables(results, PaperConfig("table 9", groups={"left": {"Atlas 11B": 0.5}}))
    assert of_group.rows == [["Atlas 11B, left", "", "0.5", "", ""]]


def test_gains_are_in_percent_of_no_retrieval_and_above_0_where_they_are_better():
    def rows_of(metric, paper, **values):
        results = {method: {metric: {"value": value}} for method, value in values.items()}
        return paper_tables(results, paper)[0].rows

    codex = PaperConfig("table 2", {"none": 0.683, "replug": 0.714, "lsr": 0.718})
    assert rows_of("accuracy", codex, none=0.4, replug=0.5)[1] == ["replug", "0.5000", "0.714", "+25.0%", "+4.5%"]
    xl = PaperConfig("table 1", {"none": 1.16, "replug": 1.09})
    assert rows_of("bpb", xl, none=1.0, replug=0.9)[1] == ["replug", "0.9000", "1.09", "+10.0%", "+6.0%"]
    assert paper_tables({"none": {"bpb": {"value": 1.0}}}, PaperConfig()) == []


def test_a_number_that_some_examples_lack_is_empty_there_and_a_metric_of_it_is_left_out(tmp_path):
    numbers = [{"characters": 1.0, "two": 2.0}, {"characters": 3.0, "two": 2.0, "margin": 0.5}]
    rows = [
        {"id": name, "group": "all", "methods": {"none": {"numbers": of, "detail": {}}}}
        for name, of in zip("ab", numbers, strict=True)
    ]
    book = EvidenceBook(parse_methods(["none"], 2, {}), None, {}, [True, True])
    write_examples(tmp_path / "examples.parquet", rows, book, Lengths())
    assert pq.read_table(tmp_path / "examples.parquet").column("margin").to_pylist() == [None, 0.5]
    task = Lengths()
    task.metrics["margin"] = Metric("margin", may_be_unknown=True)
    assert "margin" not in compare(task, rows, [], PaperConfig(), 100, 0)["none"]
    task.metrics["margin"] = Metric("margin")
    with pytest.raises(KeyError, match="margin"):
        compare(task, rows, [], PaperConfig(), 100, 0)


def test_blocks_are_markdown_and_html_and_no_text_is_read_as_html():
    blocks = ["a <b>", ["one", "two & three"], Table(["x", "y"], [["<i>", "1"]]), Html("<svg></svg>")]
    assert to_markdown(blocks) == "a <b>\n\n- one\n- two & three\n\n| x | y |\n| --- | --- |\n| \\<i\\> | 1 |\n"
    page = html_page("t", {"": blocks}).replace("\n", "")
    assert (
        "<p>a &lt;b&gt;</p><ul><li>one</li><li>two &amp; three</li></ul><table><tr><th>x</th><th>y</th></tr>"
        "<tr><td>&lt;i&gt;</td><td>1</td></tr></table><svg></svg>"
    ) in page
    page = html_page("t", {"": ["first"], "Empty": [], "A & B": ["second"]})
    assert "<p>first</p>\n<h2>A &amp; B</h2>\n<p>second</p>" in page and "Empty" not in page
