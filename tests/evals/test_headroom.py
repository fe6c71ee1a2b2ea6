"""Bits and headroom against numbers worked out by hand."""

import math

import numpy as np
import pytest

from replug.evals.intervals import bits_of
from replug.evals.language_modelling import headroom_lines, oracle_bits


def test_bits_of_a_known_distribution_are_exact() -> None:
    assert bits_of(np.log([0.5, 0.25, 0.125])) == pytest.approx(1 + 2 + 3, abs=1e-12)
    assert bits_of(np.zeros(4)) == 0
    many = np.full(100_000, np.log(0.5), dtype=np.float32)
    assert bits_of(many) == pytest.approx(100_000, rel=1e-7)  # summed in float64


LOGPROBS = np.log(np.array([[0.5, 0.25], [0.25, 0.125]]))  # the first document's text has 3 bits, the second's 5


def test_q_weighs_by_the_mean_logprob_over_beta() -> None:
    means = LOGPROBS.mean(axis=1)
    weight = 1 / (1 + math.exp((means[1] - means[0]) / 0.5))
    expected = -math.log2(weight * 0.5 + (1 - weight) * 0.25) - math.log2(weight * 0.25 + (1 - weight) * 0.125)
    assert oracle_bits(LOGPROBS, beta=0.5)["bits_q_weighted"] == pytest.approx(expected)
    assert oracle_bits(LOGPROBS, beta=1e-3)["bits_q_weighted"] == pytest.approx(3)


def of(ensemble: float, q_weighted: float, best_document: float) -> dict:
    numbers = {"bpb": ensemble, "bpb_q_weighted": q_weighted, "bpb_best_document": best_document}
    return {name: {"value": value} for name, value in numbers.items()}


def test_lines_say_the_headroom_and_the_shares_of_as_many_documents_mixed_alike() -> None:
    results = {
        "none": of(1.0, 1.0, 1.0),
        "random": of(0.9, 0.88, 0.88),
        "replug": of(0.70, 0.64, 0.66),
        "replug@3/even": of(0.7, 0.69999, 0.6),
        "lsr": of(0.67, 0.62, 0.61),
        "lsr@2": of(0.6, 0.5, 0.5),
        "lsr@3/even": of(0.6, 0.5, 0.5),
        "lsr@1": of(0.6, 0.6, 0.6),
    }
    lines = headroom_lines(results)
    assert [line.split(":")[0] for line in lines[:-1]] == [
        f"Headroom of {name}" for name in ("random", "replug", "replug@3/even", "lsr", "lsr@2", "lsr@3/even")
    ]
    assert lines[1] == (
        "Headroom of replug: 0.7000 bits per byte; 0.6400 weighed by the LM's own scores, 0.6600 by the best document "
        "alone."
    )
    assert lines[-1] == "lsr gets 50% of what weights by the LM's own scores would gain over replug."
    assert headroom_lines({}) == []
