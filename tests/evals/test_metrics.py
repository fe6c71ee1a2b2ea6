"""Bits, bits per byte, the paired bootstrap and recall, against numbers worked out by hand."""

import math

import numpy as np
import pytest
from replug.evals.language_modelling import num_bytes

from replug.data.records import Window
from replug.evals.metrics import bits_of, bits_per_byte, paired_bootstrap_interval, recall_at_k


def test_bits_of_a_known_distribution_are_exact() -> None:
    assert bits_of(np.log([0.5, 0.25, 0.125])) == pytest.approx(1 + 2 + 3, abs=1e-12)
    assert bits_of(np.zeros(4)) == 0
    many = np.full(100_000, np.log(0.5), dtype=np.float32)
    assert bits_of(many) == pytest.approx(100_000, rel=1e-7)  # summed in float64


def test_bits_per_byte_counts_utf_8_bytes_and_neither_tokens_nor_characters() -> None:
    window = Window("w", "", "日本🙂é", "d")  # 3 + 3 + 4 + 2 bytes, four characters
    sizes = num_bytes([window])
    assert sizes.tolist() == [12]
    bits = bits_of(np.log([0.25, 0.25, 0.25]))  # three tokens of two bits
    assert bits_per_byte(np.array([bits]), sizes) == pytest.approx(6 / 12)
    assert bits_per_byte(np.array([bits]), sizes) != pytest.approx(bits / 3 / 8)  # bits per token / 8


def test_bits_per_byte_sums_before_it_divides() -> None:
    assert bits_per_byte(np.array([8.0, 1.0]), np.array([2, 1])) == pytest.approx(3)


def test_a_constant_difference_has_an_interval_of_no_width() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 500, size=50)
    bits = 2.0 * sizes * rng.random(50)
    low, high = paired_bootstrap_interval(bits - 0.25 * sizes, bits, sizes, num_resamples=500)
    assert low == pytest.approx(-0.25, abs=1e-12)
    assert high == pytest.approx(-0.25, abs=1e-12)


def test_the_interval_equals_a_naive_bootstrap() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 100, size=20)
    a, b = rng.random(20) * sizes, rng.random(20) * sizes
    draws = np.random.default_rng(7)
    differences = []
    for _ in range(300):
        texts = [int(i) for i in draws.integers(20, size=20)]
        ours = sum(a[i] for i in texts) / sum(sizes[i] for i in texts)
        theirs = sum(b[i] for i in texts) / sum(sizes[i] for i in texts)
        differences.append(ours - theirs)
    expected = np.percentile(differences, [2.5, 97.5])
    np.testing.assert_allclose(paired_bootstrap_interval(a, b, sizes, 300, seed=7), expected)


def test_the_interval_covers_zero_for_noise_and_not_for_a_clear_difference() -> None:
    covered = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(50, 150, size=100)
        base = sizes * rng.uniform(0.5, 3.0, size=100)
        noise = rng.normal(size=100)
        low, high = paired_bootstrap_interval(base + noise, base, sizes, num_resamples=300)
        covered += low <= 0 <= high
        low, high = paired_bootstrap_interval(base + noise + 2, base, sizes, num_resamples=300)
        assert low > 0
    assert covered >= 34  # 38 of 40 are expected


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    rng = np.random.default_rng(0)
    sizes, a, b = rng.integers(1, 100, size=30), rng.random(30), rng.random(30)
    first = paired_bootstrap_interval(a, b, sizes, 200, seed=3)
    assert paired_bootstrap_interval(a, b, sizes, 200, seed=3) == first
    assert paired_bootstrap_interval(a, b, sizes, 200, seed=4) != first
    low, high = paired_bootstrap_interval(b, a, sizes, 200, seed=3)
    assert (low, high) == pytest.approx((-first[1], -first[0]))


def test_recall_at_k_counts_queries_with_any_gold_document() -> None:
    found = np.array([[5, 1, 2], [7, 8, 9], [4, 3, 0], [1, 2, 3]])
    gold = [{5, 99}, {9, 8}, {6}, set()]
    assert recall_at_k(found, gold, 1) == 0.25
    assert recall_at_k(found, gold, 2) == 0.5
    assert recall_at_k(found, gold, 3) == 0.5
    assert recall_at_k(found[:2], gold[:2], 20) == 1.0
    assert math.isclose(recall_at_k(found[:3], gold[:3], 1), 1 / 3)
