"""The fitted temperature against a fine grid, and where there is nothing to fit."""

import math

import numpy as np
import pytest

from replug.evals.temperature_fit import DocumentScores, ensemble_bits, fit_temperature


def texts_with_noise(count: int, spread: float, seed: int = 0) -> list[DocumentScores]:
    """Documents whose similarity says something of how well they predict, and not all."""
    rng = np.random.default_rng(seed)
    quality = rng.normal(size=(count, 6))
    similarities = spread * (quality + 4 * rng.normal(size=quality.shape))
    logprobs = [-np.exp(1 - 0.4 * q[:, None] + 0.1 * rng.normal(size=(6, 12))) for q in quality]
    return [DocumentScores(given, of) for given, of in zip(logprobs, similarities, strict=True)]


def test_bits_are_those_of_the_mixture_at_each_token() -> None:
    logprobs, similarities = np.log([[0.5, 0.2], [0.1, 0.4]]), np.array([0.3, 0.1])
    first = math.exp(3) / (math.exp(3) + math.exp(1))  # at a temperature of 0.1
    expected = -sum(math.log2(first * a + (1 - first) * b) for a, b in ((0.5, 0.1), (0.2, 0.4)))
    assert ensemble_bits([DocumentScores(logprobs, similarities)], 0.1) == pytest.approx(expected)


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
def test_no_temperature_of_a_fine_grid_predicts_better(spread: float) -> None:
    texts = texts_with_noise(40, spread)
    fit = fit_temperature(texts)
    finest = min(ensemble_bits(texts, spread * 2.0**power) for power in np.arange(-6, 10, 0.1))
    assert fit.bits <= finest + 1e-6 * finest
    assert fit.bits == ensemble_bits(texts, fit.temperature) <= ensemble_bits(texts, 1.0)


def test_the_temperature_follows_the_unit_of_similarities() -> None:
    small, large = (fit_temperature(texts_with_noise(40, spread)).temperature for spread in (0.01, 1.0))
    assert large == pytest.approx(100 * small, rel=1e-3)


@pytest.mark.parametrize(("sign", "low", "high"), [(1, 0.0, 0.1), (-1, 100.0, 1e5)])
def test_a_search_that_is_always_right_or_wrong_ends_at_an_end(sign: int, low: float, high: float) -> None:
    logprobs = np.log(np.array([[0.9, 0.9], [0.1, 0.1]]))
    fit = fit_temperature([DocumentScores(logprobs, sign * np.array([1.0, 0.0]))] * 3)
    assert low < fit.temperature < high


def test_where_all_documents_are_equally_similar_it_is_1() -> None:
    fit = fit_temperature([DocumentScores(np.log([[0.5], [0.1]]), np.zeros(2))])
    assert (fit.temperature, fit.bits) == (1.0, pytest.approx(-math.log2(0.3)))
