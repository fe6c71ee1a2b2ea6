"""`results.json`: its structure, its numbers by hand, and the table made of it."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from replug.train.results import (
    bpb_results,
    interval_lines,
    label_lines,
    print_results,
    weights_lines,
    weights_of,
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


BETTER = {"step": 10, "heldout_bpb": 0.5}


def test_the_table_says_which_weights_it_is_of(results: dict) -> None:
    results["weights"] = weights_of(30, None)
    assert weights_lines(results) == ["REPLUG LSR (tuned): the weights of step 30, the last, in retriever/"]
    results["weights"] = weights_of(30, {"step": 30, "heldout_bpb": 0.5})
    assert "did best" not in weights_lines(results)[0]
    results["weights"] = weights_of(30, BETTER)
    assert "those of step 10 did best on held-out text (0.5000 bits per byte)" in weights_lines(results)[0]
    assert "`replug export --best`" in weights_lines(results)[0]


def test_the_table_can_be_of_the_last_and_the_best_weights() -> None:
    of_two = bpb_results(rows_of({name: BITS[name] for name in ("none", "replug")}), 50, 0)
    assert set(of_two["intervals"]) == {"replug_minus_none"}, "of methods that were measured"
    some = bpb_results(rows_of({**BITS, "best": BITS["lsr"] - 1}), 50, 0)
    assert set(some["intervals"]) == {"lsr_minus_replug", "best_minus_replug", "replug_minus_none"}
    stream = io.StringIO()
    print_results(some, Console(file=stream, width=150))
    assert "REPLUG LSR (best while training)" in " ".join(stream.getvalue().split())


@pytest.mark.parametrize(("share", "warns"), [(0.91, False), (0.46, False), (0.15, True)])
def test_a_training_on_labels_warns_where_a_search_finds_what_nobody_scored(share: float, warns: bool) -> None:
    first = {"step": 0, "bpb": 0.92, "kl": 1.0, "temperature": 0.1, "scored_share": 0.91}
    labels = {"step": 9, "first": first, "best": {**first, "step": 9, "scored_share": share}, "dev_alone": 1.1}
    [line] = [line for line in label_lines({"labels": labels}) if "the LM has scored" in line]
    assert f"the LM has scored {share:.0%}, before 91%" in line and ("a search finds others" in line) is warns
