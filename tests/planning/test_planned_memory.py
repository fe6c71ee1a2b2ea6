from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replug.configs.errors import UserError
from replug.configs.schema import Config, LoRAConfig
from replug.models.build import load_encoder
from replug.models.stand_in_encoder import write_stand_in_encoder
from replug.planning import memory
from replug.planning.accelerators import ACCELERATORS
from replug.planning.estimate import Split, job_of, memory_of
from replug.planning.model_sizes import encoder_size, lm_size
from replug.planning.plans import Assumptions, make_plan, plan_json
from replug.planning.tables import plan_lines
from replug.planning.trained import trained_part
from replug.planning.workload import Shape
from replug.train.trained_weights import choose_trained_weights


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


def test_the_plan_counts_the_activations_of_one_chunk_and_the_second_pass(paper: Config) -> None:
    chunked = replace(paper, train=replace(paper.train, chunk_tokens=8192))
    whole, parts = (memory_of(job_of(config), ACCELERATORS["A100"], Split(1, 1, 1)) for config in (paper, chunked))
    weights = 16e-9 * job_of(paper).retriever.parameters
    assert parts.train - weights == pytest.approx((whole.train - weights) * 8192 / (64 * 21 * 128), rel=1e-3)
    assert parts.train < 8 < 50 < whole.train  # GB
    few = replace(paper, train=replace(paper.train, chunk_tokens=1))  # a text is the least
    job = job_of(few)
    least = memory.train_bytes(job.retriever, job.shape, 1, "bfloat16", checkpointed=False)
    assert least == pytest.approx(1e9 * weights + (whole.train - weights) * 1e9 / (64 * 21), rel=0.01)


def test_two_versions_of_the_index_stand_side_by_side_in_a_swap(paper: Config) -> None:
    assert memory.search_bytes(36_000_000, 1536, two_versions=True) == pytest.approx(110.6e9, rel=0.001)
    paper.index.swap = type(paper.index.swap).blue_green
    assert memory_of(job_of(paper), ACCELERATORS["A100"], Split(1, 1, 1)).search == pytest.approx(55.3, rel=0.001)


def test_float32_activations_and_weights_take_twice_the_bytes() -> None:
    lm = lm_size("gpt2")
    assert memory.pass_bytes(lm, 100, "float32") == 2 * memory.pass_bytes(lm, 100, "bfloat16")


@pytest.mark.parametrize("keys", [{}, {"rank": 4}, {"rank": 4, "targets": ["key", "dense"]}, {"frozen": 1}])
def test_weights_gradients_and_moments_are_those_that_torch_has(debug_config: Config, tmp_path: Path, keys) -> None:
    """By the encoder's own counts to the byte; the plan's count leaves out biases and norms, adapters have none."""
    write_stand_in_encoder(tmp_path / "encoder", hidden_size=128, num_layers=3)
    lora = LoRAConfig(rank=keys.get("rank"), targets=keys.get("targets", []))
    retriever = replace(debug_config.retriever, path=str(tmp_path / "encoder"), frozen_layers=keys.get("frozen", 0))
    config = replace(debug_config, retriever=retriever, lora=lora)
    encoder = load_encoder(retriever)
    choose_trained_weights(config, encoder)
    learning = [weight for weight in encoder.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learning)
    encoder.encode_with_gradient(encoder.token_ids(["mida furo"]))[0, 0].backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = [*encoder.parameters(), *(weight.grad for weight in learning if weight.grad is not None), *moments]
    planned, count = trained_part(config, encoder_size(retriever.path)), sum(weight.numel() for weight in learning)
    own = replace(planned, parameters=sum(weight.numel() for weight in encoder.parameters()), learning=count)
    assert own.num_bytes == sum(tensor.nbytes for tensor in held)
    assert planned.learning == pytest.approx(count, rel=0 if lora.rank else 0.02)
    assert planned.parameters == pytest.approx(own.parameters, rel=0.05)  # a table of positions that is small elsewhere


def test_adapters_and_frozen_layers_take_less_memory_and_the_plan_says_so(paper: Config) -> None:
    keys = replace(paper.retriever, frozen_layers=6)
    adapted = replace(paper, lora=LoRAConfig(rank=16), retriever=keys)
    split = Assumptions(split="5/2/1")
    plans = {
        name: plan_json(make_plan(config, "8xA100", assumptions=split))
        for name, config in (("whole", paper), ("part", adapted))
    }
    learning = 6 * 16 * 2 * (768 + 768)
    assert plans["part"]["retriever"]["learning"] == learning
    whole, part = (plan["memory_gb"]["train"] for plan in plans.values())
    weights = encoder_size("facebook/contriever").parameters
    kept = part - 4e-9 * (weights + learning) - 12e-9 * learning
    assert whole - 16e-9 * weights == pytest.approx(2 * 34 / 24 * kept)
    assert plans["part"]["disk_gb"]["checkpoints"] == pytest.approx(3 * 12e-9 * learning)
    assert any(line.startswith(f"{learning:,} weights of the retriever learn") for line in plan_lines(plans["part"]))


def test_sizes_that_the_plan_cannot_know_are_refused_by_their_keys(paper: Config) -> None:
    for config, message in (
        (replace(paper, lora=LoRAConfig(rank=4, targets=["Wqkv"])), r"lora.targets: the plan does not know .* of Wqkv"),
        (replace(paper, retriever=replace(paper.retriever, frozen_layers=12)), r"retriever.frozen_layers is 12"),
        (replace(paper, index=replace(paper.index, dims=1000)), r"index.dims is 1000, but .* have 768 numbers"),
    ):
        with pytest.raises(UserError, match=message):
            job_of(config)
