"""`results.json`: its structure, its numbers by hand, and the table made of it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from replug.evals.language_modelling import Choice
from replug.evals.results import bpb_results, interval_lines, print_results, retrieval_results
from rich.console import Console

from replug.data.records import Document, Window
from replug.data.shards import write_documents
from replug.data.store import CorpusStore

WINDOWS = [
    Window("a", "", "four", "wiki"),
    Window("b", "", "日本", "code"),  # six bytes
    Window("c", "", "eight by", "wiki"),
]
BITS = {
    "none": np.array([8.0, 12.0, 16.0]),
    "random": np.array([8.0, 12.0, 16.0]),
    "replug": np.array([6.0, 12.0, 12.0]),
    "lsr": np.array([5.0, 10.5, 10.0]),  # always 0.25 bits a byte below replug
}


@pytest.fixture
def results() -> dict:
    return bpb_results(WINDOWS, BITS, num_resamples=200, seed=0)


def test_bits_per_byte_are_given_over_all_texts_and_by_domain(results: dict) -> None:
    assert list(results["bpb"]) == ["all", "code", "wiki"]
    assert results["bpb"]["all"] == pytest.approx({"none": 2, "random": 2, "replug": 30 / 18, "lsr": 25.5 / 18})
    assert results["bpb"]["wiki"] == pytest.approx({"none": 2, "random": 2, "replug": 1.5, "lsr": 1.25})
    assert results["bpb"]["code"] == pytest.approx({"none": 2, "random": 2, "replug": 2, "lsr": 1.75})
    assert results["num_windows"] == 3
    assert json.loads(json.dumps(results)) == results


def test_intervals_belong_to_the_named_differences(results: dict) -> None:
    assert set(results["intervals"]) == {"lsr_minus_replug", "replug_minus_none"}
    assert results["intervals"]["lsr_minus_replug"] == pytest.approx([-0.25, -0.25])
    low, high = results["intervals"]["replug_minus_none"]
    assert -0.5 - 1e-9 <= low < high <= 1e-9
    lines = interval_lines(results)
    assert "-0.2500 (95% interval -0.2500 to -0.2500: lower)" in lines[0]


def test_differences_of_methods_that_were_not_measured_are_left_out() -> None:
    some = bpb_results(WINDOWS, {name: BITS[name] for name in ("none", "replug")}, 50, 0)
    assert set(some["intervals"]) == {"replug_minus_none"}


@pytest.mark.parametrize(
    ("interval", "verdict"), [([-2, -1], "lower"), ([1, 2], "higher"), ([-1, 1], "no difference shown")]
)
def test_the_verdict_follows_the_interval(results: dict, interval: list[float], verdict: str) -> None:
    results["intervals"] = {"lsr_minus_replug": interval}
    assert interval_lines(results)[0].endswith(f": {verdict})")


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusStore:
    path = tmp_path / "documents"
    write_documents(path, [Document(f"d{i}", f"text {i}", "x", "s") for i in range(30)])
    return CorpusStore(path)


def test_there_is_no_recall_without_gold_documents(corpus: CorpusStore) -> None:
    choice = Choice(np.zeros((3, 20), dtype=int), np.zeros((3, 20)))
    assert retrieval_results(corpus, WINDOWS, {"before": choice}) is None


def test_recall_is_over_the_texts_that_name_gold_documents(corpus: CorpusStore) -> None:
    windows = [
        Window("a", "", "x", "d", gold=("d3",)),
        Window("b", "", "x", "d"),  # names none: not counted
        Window("c", "", "x", "d", gold=("d9", "d7")),
        Window("d", "", "x", "d", gold=("not in the corpus",)),  # counted, and never found
    ]
    before = np.array([np.arange(0, 20), np.arange(0, 20), np.arange(5, 25), np.arange(0, 20)])
    after = before.copy()
    after[0, 0] = 3
    choices = {name: Choice(rows, np.zeros(rows.shape)) for name, rows in (("before", before), ("after", after))}
    found = retrieval_results(corpus, windows, choices)
    assert found["before"] == pytest.approx({"R@1": 0, "R@5": 2 / 3, "R@20": 2 / 3})
    assert found["after"] == pytest.approx({"R@1": 1 / 3, "R@5": 2 / 3, "R@20": 2 / 3})


@pytest.mark.parametrize("retrieval", [{}, {"retrieval": {"before": {"R@1": 0.1, "R@5": 0.5, "R@20": 0.75}}}])
def test_the_table_shows_every_method_and_domain(results: dict, retrieval: dict) -> None:
    console = Console(file=io.StringIO(), width=110)
    print_results({**results, **retrieval}, console)
    text = console.file.getvalue()
    for part in ("3 held-out texts", "REPLUG LSR (tuned)", "wiki", "code", "1.2500", "95% interval"):
        assert part in text
    assert ("0.750" in text) == bool(retrieval)
