"""The loop of all evaluations, and what it makes of interruptions."""

import json
from collections.abc import Mapping

import numpy as np
import pyarrow.parquet as pq
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import PaperConfig
from replug.config.methods import parse_methods
from replug.evals.comparison import compare, markdown_table
from replug.evals.evidence import NOTHING, Evidence, EvidenceBook, RetrievedDocuments, texts_of
from replug.evals.folder import EvaluationFolder
from replug.evals.loop import Item, Metric, Outcome, run_task
from replug.evals.outcomes import OutcomeFile, outcomes_of, write_examples
from tests.support.known_lm import KnownTexts

TEXTS = ["zero", "one", "two", "three"]


def book(names, retrieves=(True, True), retrievers=("replug",)):
    of_all = RetrievedDocuments(np.array([[3, 1, 2], [0, 2, 1]]), np.array([[3.0, 2, 1], [6, 5, 4]]))
    found = dict.fromkeys(("replug", "random", "bm25"), of_all)
    methods = parse_methods(list(names), 2, dict.fromkeys(retrievers, "path"))
    return EvidenceBook(methods, KnownTexts(TEXTS), found, list(retrieves))


def test_each_method_gets_its_documents():
    of = book(["none", "random", "replug", "replug@3", "replug@3/concat"]).of(0)
    assert of["none"].texts == (None,)
    assert of["replug"].texts == ("three", "one") and list(of["replug"].similarities) == [3.0, 2.0]
    assert list(of["random"].similarities) == [0.0, 0.0], "evenly weighted"
    assert of["replug@3/concat"].texts == ("two\none\nthree",), "the nearest last"
    assert of["replug@3/concat"].doc_rows == (3, 1, 2)
    assert list(texts_of(of)) == [None, "one", "two", "three", "two\none\nthree"], "every text once, by its row"
    assert [text for text, is_concatenated in texts_of(of).items() if is_concatenated] == ["two\none\nthree"]


def test_the_order_of_methods_does_not_change_that_of_texts():
    names = ["none", "random", "replug", "replug@3/concat"]
    assert list(texts_of(book(names).of(0)).items()) == list(texts_of(book(names[::-1]).of(0)).items())


def test_what_the_lm_wrote_comes_between_no_document_and_those_that_were_found():
    of = book(["replug"]).of(0)
    written = {"genread": Evidence(("written",), np.zeros(1)), "none": NOTHING}
    for evidence in ({**of, **written}, {**written, **of}):
        assert list(texts_of(evidence)) == [None, "written", "one", "three"]


def test_the_digest_tells_which_documents_were_measured():
    assert book(["none", "replug"]).digest() == book(["none", "replug"]).digest()
    others = [
        book(["none"]),
        book(["none", "random"]),
        book(["none", "replug@1"]),
        book(["none", "replug"], (True, False)),
    ]
    assert len({one.digest() for one in [book(["none", "replug"]), *others]}) == 5


class Lengths:
    """A task whose outcome is the number of characters of a method's texts; `fails_at` breaks off."""

    metrics: Mapping[str, Metric] = {
        "length": Metric("characters"),
        "share": Metric("characters", "two", np.exp2),
    }

    def __init__(self, fails_at=None):
        self.fails_at, self.asked = fails_at, []
        self.examples = [Item("a", "x", "left"), Item("b", "y", "right")]

    def groups(self, example):
        return (example.group,)

    def submit(self, row, evidence):
        self.asked.append(row)

        def finish():
            if row == self.fails_at:
                raise RuntimeError("killed")
            return {
                name: Outcome({"characters": float(sum(len(t or "") for t in one.texts)), "two": 2.0})
                for name, one in evidence.items()
            }

        return finish


def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path):
    path, methods = tmp_path / "outcomes.jsonl", book(["none", "replug"])
    with pytest.raises(RuntimeError, match="killed"):
        run_task(Lengths(fails_at=1), methods, OutcomeFile(path), "lengths")
    with path.open("a") as file:
        file.write('{"id": "b", "torn')
    again, file = Lengths(), OutcomeFile(path)
    run_task(again, methods, file, "lengths")
    assert again.asked == [1], "the first example is not measured again"
    assert [row["id"] for row in file.rows] == ["a", "b"]
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "b"]
    run_task(Lengths(fails_at=0), methods, OutcomeFile(path), "lengths")  # nothing is left to do


class Numbered(Lengths):
    """Forty examples."""

    def __init__(self):
        super().__init__()
        self.examples = [Item(f"e{number}", "q", "all") for number in range(40)]

    def submit(self, row, evidence):
        self.asked.append(row)
        return lambda: {"none": Outcome({"characters": float(row), "two": 2.0})}


def no_documents():
    return EvidenceBook(parse_methods(["none"], 2, {}), None, {}, [True] * 40)


def test_a_file_that_two_processes_wrote_gives_every_example_once_and_in_order(tmp_path):
    """As two of them left it that were killed: some rows twice, in two orders, and others missing."""
    path, whole = tmp_path / "outcomes.jsonl", tmp_path / "whole.jsonl"
    expected = run_task(Numbered(), no_documents(), OutcomeFile(whole), "numbers")
    lines = whole.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:9], *lines[20:31], *lines[4:15], *lines[22:31]]))
    task = Numbered()
    rows = run_task(task, no_documents(), OutcomeFile(path), "numbers")
    assert rows == expected and len({row["id"] for row in rows}) == 40
    assert task.asked == [*range(15, 20), *range(31, 40)], "only what nobody measured"


def test_rows_of_other_examples_and_two_examples_of_one_id_are_refused(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    run_task(Lengths(), book(["none", "replug"]), OutcomeFile(path), "lengths")
    with pytest.raises(UserError, match=r"outcomes\.jsonl:1 is of id 'a', which is none of this evaluation's"):
        run_task(Numbered(), no_documents(), OutcomeFile(path), "numbers")
    twice = Lengths()
    twice.examples = [Item("a", "x", "left"), Item("a", "y", "right")]
    with pytest.raises(UserError, match="two examples have the id 'a'"):
        run_task(twice, book(["none", "replug"]), OutcomeFile(tmp_path / "new.jsonl"), "lengths")


def test_other_texts_or_documents_under_the_same_names_are_refused(tmp_path):
    folder = EvaluationFolder(tmp_path)
    folder.claim_inputs(["a query"], [], "documents")
    folder.claim_inputs(["a query"], [], "documents")
    with pytest.raises(UserError, match=r"texts: the evaluation in .* was begun with other content than what is there"):
        folder.claim_inputs(["an edited query"], [], "documents")
    with pytest.raises(UserError, match=r"corpus: the evaluation in .* give another out"):
        folder.claim_inputs(["a query"], [], "other documents")


def test_outcomes_of_another_measurement_are_dropped(tmp_path):
    outcomes_of(tmp_path, "this").append({"id": "a"})
    assert outcomes_of(tmp_path, "this").rows == [{"id": "a"}]
    assert outcomes_of(tmp_path, "that").rows == []
    assert outcomes_of(tmp_path, "this").rows == []


def results_of(tmp_path, paper=None):
    methods, task, file = book(["none", "replug"]), Lengths(), OutcomeFile(tmp_path / "o.jsonl")
    run_task(task, methods, file, "lengths")
    return compare(task, file.rows, paper or PaperConfig(), 200, 0)


def test_results_hold_value_number_and_interval_by_method_and_metric(tmp_path):
    results = results_of(tmp_path)
    assert list(results) == ["none", "replug"]
    assert results["replug"]["length"]["value"] == 7.5  # three+one, zero+two
    assert results["replug"]["length"]["n"] == 2
    low, high = results["replug"]["length"]["interval"]
    assert (low, high) == (7.0, 8.0)
    assert results["replug"]["share"]["value"] == 2 ** (15 / 4)
    assert results["replug"]["length/left"] == {"value": 8.0, "n": 1, "interval": [8.0, 8.0]}
    assert results["replug"]["length - none"]["value"] == 7.5
    assert "length - replug" not in results["none"], "each pair once"
    assert results["replug"]["length/left - none"] == {"value": 8.0, "n": 1, "interval": [8.0, 8.0]}


def test_a_group_called_as_a_difference_takes_the_place_of_none(tmp_path):
    task, file = Lengths(), OutcomeFile(tmp_path / "o.jsonl")
    task.examples = [Item("a", "x", "left - none"), Item("b", "y", "right")]
    run_task(task, book(["none", "replug"]), file, "lengths")
    results = compare(task, file.rows, PaperConfig(), 200, 0)
    assert "length/left – none" in results["none"]


def test_the_table_shows_the_papers_figure_beside_ours(tmp_path):
    table = markdown_table(results_of(tmp_path, PaperConfig("table 9", {"replug": 1.5})), "lengths", "table 9")
    assert "paper, table 9" in table and "| 1.5 |" in table
    assert "length of replug − none: +7.5000 (+7.0000 to +8.0000: higher)" in table
    assert "| left | 1 | 0.0000 | 8.0000 |" in table
    assert "left − " not in table, "differences of groups are in results.json alone"


def test_a_number_that_some_examples_lack_is_empty_there_and_a_metric_of_it_is_left_out(tmp_path):
    numbers = [{"characters": 1.0, "two": 2.0}, {"characters": 3.0, "two": 2.0, "margin": 0.5}]
    rows = [
        {"id": name, "group": "all", "methods": {"none": {"numbers": of, "detail": {}}}}
        for name, of in zip("ab", numbers, strict=True)
    ]
    write_examples(tmp_path / "examples.parquet", rows, book(["none"]))
    assert pq.read_table(tmp_path / "examples.parquet").column("margin").to_pylist() == [None, 0.5]
    task = Lengths()
    task.metrics = {**Lengths.metrics, "margin": Metric("margin", may_be_unknown=True)}
    assert "margin" not in compare(task, rows, PaperConfig(), 100, 0)["none"]
    task.metrics = {**Lengths.metrics, "margin": Metric("margin")}
    with pytest.raises(KeyError, match="margin"):
        compare(task, rows, PaperConfig(), 100, 0)


def test_of_many_differences_those_that_show_something_are_listed() -> None:
    unshown = {"value": 0.1, "interval": [-0.1, 0.3], "p_holm": 1.0}
    shown = {"value": 0.2, "interval": [0.1, 0.3], "p_holm": 0.01}
    names = [f"m{number}" for number in range(22)]
    results = {name: {"em": {"value": 0.5, "interval": [0.4, 0.6], "n": 30}} for name in names}
    results["m21"] |= {f"em - {name}": unshown for name in names[1:21]}
    assert markdown_table(results, "title").count("no difference shown") == 20
    results["m21"]["em - m0"] = shown
    table = markdown_table(results, "title")
    assert "- em of m21 − m0: +0.2000" in table and "no difference shown" not in table
    assert "- 20 others show no difference; results.json has them." in table
