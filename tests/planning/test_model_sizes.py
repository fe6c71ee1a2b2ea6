import json
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.models.encoder import Encoder
from replug.planning import model_sizes
from replug.planning.model_sizes import encoder_size, lm_size
from tests.support.encoder_folders import WIDTH, write_chain, write_encoder, write_static

PUBLISHED = [  # millions of parameters, as their model cards have them
    (lm_size, "gpt2-xl", 1557.6),
    (lm_size, "package:smollm2", 134.5),
    (encoder_size, "facebook/contriever", 108.9),
    (encoder_size, "package:minilm", 22.6),
]


@pytest.mark.parametrize(("size_of", "name", "millions"), PUBLISHED)
def test_a_model_has_the_parameters_of_its_model_card(size_of: Callable, name: str, millions: float) -> None:
    assert size_of(name).parameters / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_local_config_gives_the_size_of_an_unknown_model(tmp_path: Path) -> None:
    fields = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    fields |= {"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}
    rope = {"hidden_act": "silu", "rope_parameters": {}, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **rope}))
    assert lm_size(str(tmp_path)).parameters == lm_size("package:smollm2").parameters


def test_a_model_that_was_fetched_from_the_hub_is_known_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    fields |= {"intermediate_size": 3072, "vocab_size": 151_936, "head_dim": 128, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "rope_theta": 1e6}))
    monkeypatch.setattr(model_sizes, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert lm_size("Qwen/Qwen3-0.6B").parameters / 1e6 == pytest.approx(596.0, rel=0.005)


def test_a_size_that_nothing_tells_is_refused_by_its_key_and_how_to_fetch_it(tmp_path: Path) -> None:
    for size_of, key in ((lm_size, "lm.path"), (encoder_size, "retriever.path")):
        with pytest.raises(UserError, match=rf"{key}: .*hf download acme/model config\.json"):
            size_of("acme/model")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}))
    with pytest.raises(UserError, match=r"lm\.path: .*config\.json has none of num_hidden_layers"):
        lm_size(str(tmp_path))


def test_the_width_is_that_of_the_encoder_itself(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    plain = encoder_size(str(tmp_path))
    write_chain(tmp_path, {"pooling_mode": "cls"}, ["Dense", "Normalize"])
    found, encoder = encoder_size(str(tmp_path)), Encoder(str(tmp_path))
    assert (found.dim, plain.dim) == (encoder.width, WIDTH)
    modules = encoder.sides["document"].modules[1:]
    dense = sum(weight.numel() for part in modules for weight in part.parameters() if weight.dim() == 2)
    assert found.parameters - plain.parameters == dense


def test_a_static_encoder_has_a_row_for_each_token(tmp_path: Path) -> None:
    write_static(tmp_path / "static", layers=["Dense"])
    size, encoder = encoder_size(str(tmp_path / "static")), Encoder(str(tmp_path / "static"))
    assert (size.dim, size.vocabulary) == (encoder.width, encoder.token_rule.vocab_size)
