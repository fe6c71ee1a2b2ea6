"""How a step is cut: units that keep many replicas at work, and passes of which none is a remnant."""

import random
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig

from replug.models.batching import (
    even_batches,
    token_budget_batches,
    units_of_similar_length,
    weights_of_layers,
)
from replug.models.lm_source import GivenSource
from replug.models.local.hf_lm import HuggingFaceSource
from replug.models.local.stand_in_lm import StandInLM
from replug.models.model_files import lm_weights
from tests.support.tiny_lms import write_gpt2

GPT2_XL, GPT2, LLAMA_7B = (weights_of_layers(*size) for size in ((48, 1600), (12, 768), (32, 4096)))


def padded(lengths: list[int], batches: list[list[int]]) -> list[int]:
    return [len(batch) * max(lengths[row] for row in batch) for batch in batches]


@pytest.mark.parametrize("seed", range(5))
def test_even_batches_are_as_few_as_greedy_ones_and_pad_no_more_than_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 80))]
    budget = rng.randint(60, 900)
    greedy, even = list(token_budget_batches(lengths, budget)), even_batches(lengths, budget)
    assert len(even) <= len(greedy)
    for batches in (greedy, even):
        assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
        in_order = [lengths[row] for batch in batches for row in batch]
        assert in_order == sorted(lengths, reverse=True)
        assert max(padded(lengths, batches)) <= budget


def test_a_unit_a_little_beyond_a_pass_is_two_of_half_a_pass() -> None:
    lengths = [100] * 12
    assert [len(batch) for batch in token_budget_batches(lengths, 1000)] == [10, 2]
    assert [len(batch) for batch in even_batches(lengths, 1000)] == [6, 6]
    assert even_batches([5, 3], 10) == [[0, 1]]
    assert even_batches([], 10) == list(token_budget_batches([], 10)) == []
    assert even_batches([50, 40], 10) == [[0], [1]]  # more than a pass holds: one at a time


def test_a_models_layers_and_width_are_read_from_its_configuration(tmp_path: Path) -> None:
    assert lm_weights(GPT2Config(n_layer=48, n_embd=1600)) == GPT2_XL
    assert lm_weights(LlamaConfig()) == LLAMA_7B
    write_gpt2(tmp_path)
    source = HuggingFaceSource(str(tmp_path))
    assert source.num_weights == weights_of_layers(2, 32)
    assert (source.tokens_per_unit(on_gpu=True), source.tokens_per_unit(on_gpu=False)) == (32_768, 8192)
    assert GivenSource(StandInLM(), 20).tokens_per_unit(on_gpu=False) == 160


@pytest.mark.parametrize("continuation", [" end", " and the end"], ids=["choices", "texts"])
def test_units_stay_the_same_when_whole_units_are_gone(continuation: str) -> None:
    prefixes = ["word " * (1 + 7 * row % 40) for row in range(100)]
    units = units_of_similar_length(prefixes, [continuation] * 100, 160)
    assert sorted(row for unit in units for row in unit) == list(range(100))
    assert len(units) > 5
    for gone in (units[0:1], units[3:5], units[-1:], units[::2]):
        left = [row for row in range(100) if all(row not in unit for unit in gone)]
        again = units_of_similar_length([prefixes[row] for row in left], [continuation] * len(left), 160)
        assert [[left[row] for row in unit] for unit in again] == [unit for unit in units if unit not in gone]


def test_choices_after_one_prefix_are_one_unit_and_cost_its_bytes_once() -> None:
    prefixes = [f"{number} " + "x" * 300 for number in range(4) for _ in "ABCD"]
    units = units_of_similar_length(prefixes, [" A", " B", " C", " D"] * 4, 160)  # 640 bytes in a unit
    assert units == [list(range(8)), list(range(8, 16))]
    assert len(units_of_similar_length(prefixes, [" a longer text"] * 16, 160)) == 8
