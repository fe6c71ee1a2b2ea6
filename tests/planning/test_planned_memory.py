from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replug.config.errors import UserError
from replug.config.schema import Config, LoRAConfig
from replug.models.build import load_encoder
from replug.models.stand_in_encoder import write_stand_in_encoder
from replug.planning import memory
from replug.planning.accelerators import ACCELERATORS
from replug.planning.estimate import Split, job_of, memory_of
from replug.planning.model_sizes import encoder_size, lm_size
from replug.planning.plans import Assumptions, make_plan, plan_json
from replug.planning.tables import plan_lines
from replug.planning.trained import trained_part
from replug.planning.training_memory import train_bytes
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


def test_the_optimizer_takes_sixteen_bytes_a_parameter_and_has_four_more_in_hand(paper: Config) -> None:
    encoder = encoder_size("facebook/contriever")
    empty = with_step(job_of(paper).shape, batch_size=0)
    found = train_bytes(encoder, empty, 1, "float32", checkpointed=False)
    assert found == pytest.approx(20 * encoder.parameters, rel=0.003)


def test_activations_of_the_papers_step_fill_most_of_an_a100_unless_parted_or_recomputed(paper: Config) -> None:
    job, encoder = job_of(paper), encoder_size("facebook/contriever")
    whole = train_bytes(encoder, with_step(job.shape, micro_batches=1), 1, "bfloat16", checkpointed=False)
    needed = memory_of(job, ACCELERATORS["A100"], Split(1, 1, 1))
    assert whole == pytest.approx(16 * 108.8e6 + 64 * 21 * 128 * 12 * 41 * 768, rel=0.01)
    assert needed.train == pytest.approx(whole / 2e9, rel=0.05)
    assert needed.train_checkpointed < needed.train / 4


def test_activations_are_shared_out_over_ranks_and_micro_batches(paper: Config) -> None:
    """One pass of each is left of 21, so that a layer's passing tensors are a larger part."""
    job, encoder = job_of(paper), encoder_size("facebook/contriever")
    fixed = 16 * encoder.parameters
    whole = train_bytes(encoder, with_step(job.shape, micro_batches=1), 1, "bfloat16", checkpointed=False) - fixed
    parted = with_step(job.shape, micro_batches=4)
    found = train_bytes(encoder, parted, 2, "bfloat16", checkpointed=False) - fixed - 4 * encoder.parameters  # DDP's
    assert found == pytest.approx(whole / 8, rel=0.05)


def test_the_plan_counts_the_activations_of_one_chunk_and_the_second_pass(paper: Config) -> None:
    whole = replace(paper, train=replace(paper.train, micro_batches=1))
    chunked = replace(whole, train=replace(whole.train, chunk_tokens=8192))
    kept, parts = (memory_of(job_of(config), ACCELERATORS["A100"], Split(1, 1, 1)) for config in (whole, chunked))
    weights = 16e-9 * job_of(paper).retriever.parameters
    assert parts.train - weights == pytest.approx((kept.train - weights) * 8192 / (64 * 21 * 128), rel=0.05)
    assert parts.train < 8 < 60 < kept.train  # GB
    few = replace(whole, train=replace(whole.train, chunk_tokens=1))  # a text is the least
    job = job_of(few)
    least = train_bytes(job.retriever, job.shape, 1, "bfloat16", checkpointed=False)
    assert least == pytest.approx(1.25e9 * weights, rel=0.01)  # the optimizer has more in hand


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
    """Half of the layers, which keep 30 bytes of a token for each unit of width where whole ones keep 41."""
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
    assert whole - 16e-9 * weights == pytest.approx(2 * 41 / 30 * kept, rel=0.05)
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
