"""The results of outcomes, and the one renderer of their tables and figures."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from replug.config.methods import parse_methods
from replug.evals.evidence import EvidenceBook
from replug.evals.loop import Item, Metric, Task, write_examples
from replug.evals.results import compare
from replug.evals.tables import Html, Table, html_page, result_blocks, to_markdown


class Lengths(Task):
    """Two methods answer two examples: with nothing, and with 8 and 7 characters."""

    def __init__(self):
        self.metrics = {"length": Metric("characters"), "share": Metric("characters", "two", np.exp2)}
        self.examples = [Item("a", "", "left"), Item("b", "", "right")]


ROWS = [
    {"id": name, "group": "all", "methods": {"none": {"numbers": {"characters": 0.0, "two": 2.0}, "detail": {}},
                                             "replug": {"numbers": {"characters": length, "two": 2.0}, "detail": {}}}}
    for name, length in (("a", 8.0), ("b", 7.0))
]  # fmt: skip


def results_of():
    return compare(Lengths(), ROWS, parse_methods(["none", "replug"], 2, {"replug": ""}), num_resamples=200)


def test_results_hold_value_number_and_interval_by_method_and_metric():
    results = results_of()
    assert list(results) == ["none", "replug"]
    assert results["replug"]["length"] == {"value": 7.5, "n": 2, "interval": [7.0, 8.0]}
    assert results["replug"]["share"]["value"] == 2 ** (15 / 4)
    assert results["replug"]["length/left"] == {"value": 8.0, "n": 1, "interval": [8.0, 8.0]}
    assert results["replug"]["length - none"]["value"] == 7.5
    assert "length - replug" not in results["none"], "each pair once"
    assert results["replug"]["length/left - none"] == {"value": 8.0, "n": 1, "interval": [8.0, 8.0]}


def test_the_table_shows_differences_and_groups():
    table = to_markdown(result_blocks(results_of(), "lengths"))
    assert "length of replug − none: +7.5000 (+7.0000 to +8.0000: no difference shown)" in table
    assert "Fewer than 6 examples show no difference." in table
    assert "| left | 1 | 0.0000 | 8.0000 |" in table
    assert "left − " not in table, "differences of groups are in results.json alone"


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
    assert "margin" not in compare(task, rows, [], num_resamples=100)["none"]
    task.metrics["margin"] = Metric("margin")
    with pytest.raises(KeyError, match="margin"):
        compare(task, rows, [], num_resamples=100)


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
