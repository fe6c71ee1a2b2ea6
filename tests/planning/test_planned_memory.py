from dataclasses import replace

import pytest

from replug.configs.schema import Config
from replug.planning import memory
from replug.planning.accelerators import ACCELERATORS
from replug.planning.estimate import Split, job_of, memory_of
from replug.planning.model_sizes import encoder_size, lm_size
from replug.planning.workload import Shape


def with_step(shape: Shape, **changed: int) -> Shape:
    return replace(shape, step=replace(shape.step, **changed))


def test_gpt2_xl_needs_its_weights_in_bfloat16_and_little_more(paper: Config) -> None:
    needed = memory_of(job_of(paper), ACCELERATORS["A100"], Split(1, 1, 1))
    assert 2 * 1.557 < needed.score < 2 * 1.557 + 2


def test_a_70b_lm_takes_several_gpus_and_less_with_more_of_them() -> None:
    num_bytes = memory.score_bytes(lm_size("llama-3-70b"), 32_768, "bfloat16")
    assert num_bytes > 141e9
    assert memory.gpus_for(num_bytes, 80) == 3
    assert memory.gpus_for(num_bytes, 141) == 2
    assert memory.gpus_for(num_bytes, 24) > 6
    assert memory.gpus_for(num_bytes, 0) == 1


def test_the_optimizer_takes_sixteen_bytes_a_parameter(paper: Config) -> None:
    encoder = encoder_size("facebook/contriever")
    empty = with_step(job_of(paper).shape, batch_size=0)
    assert memory.train_bytes(encoder, empty, 1, "float32", checkpointed=False) == 16 * encoder.parameters


def test_activations_of_the_papers_step_fill_most_of_an_a100_unless_recomputed(paper: Config) -> None:
    needed = memory_of(job_of(paper), ACCELERATORS["A100"], Split(1, 1, 1))
    tokens = 64 * 21 * 128
    assert needed.train == pytest.approx((16 * 108.8e6 + tokens * 12 * 34 * 768) / 1e9, rel=0.01)
    assert needed.train_checkpointed < needed.train / 4


def test_activations_are_shared_out_over_ranks_and_micro_batches(paper: Config) -> None:
    job, encoder = job_of(paper), encoder_size("facebook/contriever")
    fixed = 16 * encoder.parameters
    whole = memory.train_bytes(encoder, job.shape, 1, "bfloat16", checkpointed=False) - fixed
    parted = with_step(job.shape, micro_batches=4)
    assert memory.train_bytes(encoder, parted, 2, "bfloat16", checkpointed=False) - fixed == pytest.approx(whole / 8)


def test_two_versions_of_the_index_stand_side_by_side_in_a_swap(paper: Config) -> None:
    assert memory.search_bytes(36_000_000, 1536, two_versions=True) == pytest.approx(110.6e9, rel=0.001)
    paper.index.swap = type(paper.index.swap).blue_green
    assert memory_of(job_of(paper), ACCELERATORS["A100"], Split(1, 1, 1)).search == pytest.approx(55.3, rel=0.001)


def test_float32_activations_and_weights_take_twice_the_bytes() -> None:
    lm = lm_size("gpt2")
    assert memory.pass_bytes(lm, 100, "float32") == 2 * memory.pass_bytes(lm, 100, "bfloat16")
