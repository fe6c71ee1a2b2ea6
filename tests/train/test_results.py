"""`results.json`: its structure, its numbers by hand, and the table made of it."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from replug.train.results import (
    bpb_results,
    interval_lines,
    print_results,
    weights_lines,
)

TEXTS = [("wiki", "four"), ("code", "日本"), ("wiki", "eight by")]  # 4, 6 and 8 bytes
BITS = {
    "none": np.array([8.0, 12.0, 16.0]),
    "random": np.array([8.0, 12.0, 16.0]),
    "replug": np.array([6.0, 12.0, 12.0]),
    "lsr": np.array([5.0, 10.5, 10.0]),  # always 0.25 bits a byte below replug
}


def rows_of(bits: dict[str, np.ndarray]) -> list[dict]:
    """Outcomes as an evaluation leaves them."""
    return [
        {
            "group": domain,
            "methods": {m: {"numbers": {"bits": b[place], "bytes": len(text.encode())}} for m, b in bits.items()},
        }
        for place, (domain, text) in enumerate(TEXTS)
    ]


@pytest.fixture
def results() -> dict:
    return bpb_results(rows_of(BITS), num_resamples=200, seed=0)


def test_bits_per_byte_are_given_over_all_texts_and_by_domain(results: dict) -> None:
    assert list(results["bpb"]) == ["all", "code", "wiki"]
    assert results["bpb"]["all"] == pytest.approx({"none": 2, "random": 2, "replug": 30 / 18, "lsr": 25.5 / 18})
    assert results["bpb"]["wiki"] == pytest.approx({"none": 2, "random": 2, "replug": 1.5, "lsr": 1.25})
    assert results["bpb"]["code"] == pytest.approx({"none": 2, "random": 2, "replug": 2, "lsr": 1.75})
    assert results["num_examples"] == 3
    assert json.loads(json.dumps(results)) == results


def test_intervals_belong_to_the_named_differences(results: dict) -> None:
    assert set(results["intervals"]) == {"lsr_minus_replug", "replug_minus_none"}
    assert results["intervals"]["lsr_minus_replug"] == pytest.approx([-0.25, -0.25])
    low, high = results["intervals"]["replug_minus_none"]
    assert -0.5 - 1e-9 <= low < high <= 1e-9
    lines = interval_lines(results)
    assert "-0.2500 (95% interval -0.2500 to -0.2500: lower)" in lines[0]


@pytest.mark.parametrize("retrieval", [{}, {"retrieval": {"before": {"R@1": 0.1, "R@5": 0.5, "R@20": 0.75}}}])
def test_the_table_shows_every_method_and_domain(results: dict, retrieval: dict) -> None:
    console = Console(file=io.StringIO(), width=110)
    print_results({**results, **retrieval}, console)
    text = console.file.getvalue()
    for part in ("3 held-out texts", "REPLUG LSR (tuned)", "wiki", "code", "1.2500", "95% interval"):
        assert part in text
    assert ("0.750" in text) == bool(retrieval)


FIRST = {"step": 0, "bpb": 0.92, "kl": 1.0, "temperature": 0.1, "scored_share": 0.91}
LAST = {"step": 30, "steps": 30, "first": None, "best": None, "alone": None}


def test_the_table_says_which_weights_it_is_of() -> None:
    assert weights_lines({"weights": LAST}) == ["REPLUG LSR (tuned): the weights of step 30, the last, in retriever/"]
    looks = {name: {**FIRST, "step": 10, "kl": None, "scored_share": None} for name in ("first", "best")}
    lines = weights_lines({"weights": {**LAST, **looks, "step": 10}})
    assert "the weights of step 10 of 30, the best on development texts" in lines[0]
    assert lines[1] == "development texts, bits per byte: 0.9200 at a temperature of 0.1; before 0.9200 at 0.1"


@pytest.mark.parametrize(("share", "warns"), [(0.91, False), (0.46, False), (0.15, True)])
def test_a_training_on_labels_warns_where_a_search_finds_what_nobody_scored(share: float, warns: bool) -> None:
    weights = {**LAST, "first": FIRST, "best": {**FIRST, "step": 9, "scored_share": share}, "alone": 1.1}
    [line] = [line for line in weights_lines({"weights": weights}) if "the LM has scored" in line]
    assert f"the LM has scored {share:.0%}, before 91%" in line and ("a search finds others" in line) is warns
