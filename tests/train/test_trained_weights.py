"""The weights that learn: gradients, moments and checkpoints of adapters and of sides."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.config.choices import Similarity, TrainedSide
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.datamodule import Position
from replug.data.store import PreparedSet
from replug.index_workers.build_plan import IndexState
from replug.models.build import load_encoder
from replug.train.module import LSRModule
from replug.train.trained_weights import bring_back_untrained, check_training, leave_out_untrained
from tests.support.dpr_folders import write_dpr_pair
from tests.support.encoder_folders import write_static
from tests.support.training import InlineLM, documents_of, encoded_queries, module_given, pipeline_for


def gradients(module: LSRModule) -> dict[str, torch.Tensor]:
    module.training_step(Position(0), 0).backward()
    return {name: weight.grad for name, weight in module.encoder.named_parameters() if weight.grad is not None}


def test_adapters_alone_have_gradients_moments_and_a_place_in_checkpoints(debug_config, data):
    module = module_given(debug_config, data, lora={"rank": 2})
    optimizer = module.configure_optimizers()["optimizer"]
    assert gradients(module).keys() == {n for n, _ in module.encoder.named_parameters() if ".lora_" in n}
    optimizer.step()
    assert len(optimizer.state) == 8 == len(optimizer.param_groups[0]["params"])
    checkpoint = {"state_dict": module.state_dict()}
    leave_out_untrained(module.encoder, checkpoint)
    assert len(checkpoint["state_dict"]) == 8 and all(".lora_" in name for name in checkpoint["state_dict"])
    other = module_given(debug_config, data, lora={"rank": 2})
    bring_back_untrained(other.encoder, checkpoint)
    other.load_state_dict(checkpoint["state_dict"])
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in other.state_dict().items())


def test_a_checkpoint_of_other_weights_that_learn_is_no_match(debug_config, data):
    module = module_given(debug_config, data, lora={"rank": 2})
    checkpoint = {"state_dict": {name: value for name, value in module.state_dict().items() if "lora_A" not in name}}
    leave_out_untrained(module.encoder, checkpoint)
    bring_back_untrained(module.encoder, checkpoint)
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_A"):
        module.load_state_dict(checkpoint["state_dict"])
    with pytest.raises(UserError, match=r"retriever.path: its weights are not those"):
        bring_back_untrained(module_given(debug_config, data).encoder, checkpoint)


def test_dimensions_that_an_encoder_lacks_are_refused_before_anything_starts(debug_config, data):
    encoder = load_encoder(debug_config.retriever)
    longer = replace(debug_config.retriever, dims=[64])
    with pytest.raises(UserError, match=r"retriever.dims: 64 is more than the 32 numbers of the retriever's vectors"):
        check_training(replace(debug_config, retriever=longer), encoder)
    with pytest.raises(UserError, match=r"index.dims is 64, but vectors of .* have 32 numbers"):
        module_given(debug_config, data, index={"dims": 64})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("lora", "rank", 2), ("retriever", "dropout", True), ("train", "gradient_checkpointing", True)],
)
def test_a_static_encoder_has_no_layers_for_these_keys(debug_config, tmp_path, section, key, value):
    write_static(tmp_path / "static")
    config = replace(debug_config, retriever=replace(debug_config.retriever, path=str(tmp_path / "static")))
    check_training(config, encoder := load_encoder(config.retriever))
    config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    with pytest.raises(UserError, match=f"{section}.{key} is set, but .*static is a StaticEmbedding"):
        check_training(config, encoder)


# Sides ---------------------------------------------------------------------------------------------------


def moved(config: Config, data: PreparedSet) -> list[bool]:
    """Whether vectors of queries, and of documents, are others after a step."""
    module = module_given(config, data)
    pipeline_for(module, data, InlineLM()).advance(0, IndexState(0, 0))
    texts = ["mida furo", "furo"]

    def vectors() -> list[np.ndarray]:
        module.encoder.eval()
        return [encoded_queries(module, texts), documents_of(module).encode_document(texts).numpy()]

    before, steps = vectors(), module.configure_optimizers()
    module.training_step(Position(0), 0).backward()
    steps["optimizer"].step()
    return [not np.array_equal(old, new) for old, new in zip(before, vectors(), strict=True)]


def test_a_step_moves_the_side_that_is_trained_and_no_other(
    debug_config: Config, data: PreparedSet, tmp_path: Path
) -> None:
    documents, queries = write_dpr_pair(tmp_path)
    one = replace(debug_config.retriever, dropout=True)
    two = replace(one, path=str(documents), query_path=str(queries), similarity=Similarity.dot)
    for retriever in (one, two):
        for side in TrainedSide:
            config = replace(debug_config, retriever=replace(retriever, train=side))
            expected = [side is not TrainedSide.documents, side is not TrainedSide.query]
            assert moved(config, data) == expected, (side, retriever)


def test_documents_that_stay_as_they_are_have_an_encoder_that_is_in_no_checkpoint(debug_config, data):
    module = module_given(debug_config, data, retriever={"train": TrainedSide.query})
    assert module.frozen is not None and module.frozen.encoder is not module.encoder
    module.training_step(Position(0), 0).backward()
    assert all(weight.grad is None for weight in module.frozen.encoder.parameters())
    assert not any(name.startswith("_frozen") for name in module.state_dict())
