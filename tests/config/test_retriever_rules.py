"""What of the retriever learns, and by which numbers: a key that would play no part is refused by its name."""

from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.alpha=8", r"lora.alpha is set, but lora.rank is not; expected lora.rank too"),
        ("lora.dropout=0.1", r"lora.dropout is set, but lora.rank is not; expected lora.rank too"),
        ("lora.targets=[query]", r"lora.targets is set, but lora.rank is not; expected lora.rank too"),
        ("lora.rank=2 lora.dropout=1", r"lora.dropout is 1, which leaves the adapters nothing"),
        ("lora.rank=2 lora.targets=[query,query]", r"lora.targets is .*; expected different names"),
        ("lora.rank=0", r"lora.rank is 0"),
        ("retriever.dims=[8,8]", r"retriever.dims is .*; expected different numbers above 0"),
    ],
)
def test_a_key_that_plays_no_part_is_refused_by_its_name(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(ROOT / "configs/debug.yaml", override.split())


def test_adapters_are_switched_on_by_their_rank() -> None:
    lora = load_config(ROOT / "configs/debug.yaml", ["lora.rank=4", "lora.alpha=8", "lora.targets=[query]"]).lora
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8, ["query"])
