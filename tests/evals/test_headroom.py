"""Bits and headroom against numbers worked out by hand."""

import math

import numpy as np
import pytest

from replug.config.methods import parse_methods
from replug.evals.headroom import Headroom, headroom_lines, oracle_bits
from replug.evals.intervals import bits_of
from replug.evals.tasks.lm import mixed_documents, untuned


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


def test_a_share_is_of_what_the_lms_own_weights_would_gain() -> None:
    room = Headroom(ensemble=0.70, q_weighted=0.64, best_document=0.66)
    assert room.share(0.67) == pytest.approx(0.5)
    assert room.share(0.73) == pytest.approx(-0.5)
    assert Headroom(0.7, 0.69999, 0.7).share(0.6) is None


def test_lines_say_the_room_and_the_shares_of_as_many_documents() -> None:
    ensembles = {
        "random": Headroom(0.9, 0.88, 0.88),
        "replug": Headroom(0.7, 0.64, 0.66),
        "lsr": Headroom(0.67, 0.62, 0.61),
        "lsr@2": Headroom(0.6, 0.5, 0.5),
    }
    lines = headroom_lines(
        ensembles, {"random": 6, "replug": 6, "lsr": 6, "lsr@2": 2}, {"lsr": "replug"}, {"lsr": "tuned"}
    )
    assert lines[1] == (
        "headroom of replug, 6 documents: 0.7000 bits per byte; 0.6400 weighed by the LM's own scores, 0.6600 by the "
        "best document alone"
    )
    assert lines[4:] == ["tuned gets 50% of what weights by the LM's own scores would gain over replug"]
    assert headroom_lines({}, {}, {}) == []


def test_a_share_is_of_replugs_room_with_as_many_documents_mixed_alike() -> None:
    names = ["none", "random", "bm25", "replug", "replug/even", "lsr", "lsr/even", "lsr@2"]
    methods = parse_methods(names, 6, {"replug": "a folder", "lsr": "another"})
    assert untuned(methods, names) == {"lsr": "replug", "lsr/even": "replug/even"}


def test_one_document_or_one_prompt_has_no_headroom():
    names = ["none", "bm25@1", "bm25@16/rerank", "replug@10/concat", "replug", "replug@3/even"]
    assert mixed_documents(parse_methods(names, 10, {"replug": "a folder"})) == {"replug": 10, "replug@3/even": 3}
