"""Advice on temperatures: entropies of known distributions, and when the user is told what."""

import math

import numpy as np
import pytest

from replug.train.callbacks import entropy_share, half_entropy_temperature, temperature_warning

SCORES = np.random.default_rng(0).normal(size=(6, 10))


def test_the_entropy_share_of_known_distributions_is_exact() -> None:
    assert entropy_share(np.full((2, 5), 3.0), 0.1) == pytest.approx(1)
    assert entropy_share(np.array([[0.0, -1e6, -1e6]]), 1.0) == pytest.approx(0)
    assert entropy_share(np.log([[0.5, 0.25, 0.25]]), 1.0) == pytest.approx(1.5 * math.log(2) / math.log(3))
    assert entropy_share(np.array([[0.0, 0.0], [0.0, -1e6]]), 1.0) == pytest.approx(0.5)  # the mean of both


def test_the_temperature_divides_the_scores() -> None:
    assert entropy_share(SCORES * 7, 7.0) == pytest.approx(entropy_share(SCORES, 1.0))
    shares = [entropy_share(SCORES, temperature) for temperature in (0.01, 0.1, 1.0, 10.0)]
    assert shares == sorted(shares)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_advised_temperature_gives_half_of_the_entropy(scale: float) -> None:
    temperature = half_entropy_temperature(SCORES * scale)
    assert entropy_share(SCORES * scale, temperature) == pytest.approx(0.5, abs=1e-6)
    assert half_entropy_temperature(SCORES) == pytest.approx(temperature / scale, rel=1e-6)


@pytest.mark.parametrize(("temperature", "shape"), [(1e4, "nearly uniform"), (1e-4, "nearly one-hot")])
def test_a_warning_names_the_distribution_the_key_its_value_and_a_better_one(temperature: float, shape: str) -> None:
    text = temperature_warning("Q", "loss.beta", SCORES, temperature)
    better = half_entropy_temperature(SCORES)
    assert text.startswith(f"Q is {shape} at loss.beta={temperature:g}: ")
    assert f"{entropy_share(SCORES, temperature):.1%} of the maximal entropy" in text
    assert text.endswith(f"loss.beta={better:.2g} would give half of it")


def test_there_is_no_warning_in_the_middle() -> None:
    assert temperature_warning("Q", "loss.beta", SCORES, half_entropy_temperature(SCORES)) is None
    assert temperature_warning("Q", "loss.beta", SCORES, 0.5) is None


def test_equal_scores_are_called_equal_and_no_temperature_is_advised() -> None:
    equal = np.repeat([[1.0], [-3.0]], 4, axis=1)
    assert half_entropy_temperature(equal) is None
    text = temperature_warning("P_R", "loss.gamma", equal, 0.1)
    assert (
        text
        == "P_R is nearly uniform at loss.gamma=0.1: 100.0% of the maximal entropy; its scores are equal or nearly so"
    )
