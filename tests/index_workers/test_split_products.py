"""Products by float16 halves of a query against float64's."""

import pytest
import torch

from replug.index_workers.vectors import SplitQueries

GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("length", [1e-6, 1.0, 3e7])
def test_two_float16_halves_are_as_exact_as_float32(length: float) -> None:
    vectors = torch.randn(300, 768, generator=GENERATOR).half()
    queries = torch.randn(5, 768, generator=GENERATOR) * length
    queries[0] = 0
    queries[1, :4] *= 1e4  # few large numbers, which leave the others few bits in float16
    products = SplitQueries(queries).products(vectors).double()
    exact = vectors.double() @ queries.double().T
    lengths = vectors.double().norm(dim=1)[:, None] * queries.double().norm(dim=1)
    assert ((products - exact).abs() <= 1e-6 * lengths).all()
    in_float16 = vectors.double() @ queries[2:].div(length).half().double().T * length
    assert ((in_float16 - exact[:, 2:]).abs() / lengths[:, 2:]).max() > 1e-5  # one half alone would not do
