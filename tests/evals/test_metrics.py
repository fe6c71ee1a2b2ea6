"""Bits against numbers worked out by hand."""

import numpy as np
import pytest

from replug.evals.metrics import bits_of


def test_bits_of_a_known_distribution_are_exact() -> None:
    assert bits_of(np.log([0.5, 0.25, 0.125])) == pytest.approx(1 + 2 + 3, abs=1e-12)
    assert bits_of(np.zeros(4)) == 0
    many = np.full(100_000, np.log(0.5), dtype=np.float32)
    assert bits_of(many) == pytest.approx(100_000, rel=1e-7)  # summed in float64
