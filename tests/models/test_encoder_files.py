"""How an encoder's folder says that its vectors are made: DPR's two halves, and what sentence-transformers writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    DPRContextEncoder,
    DPRQuestionEncoder,
    DPRReader,
    PreTrainedModel,
)

from replug.config.errors import UserError
from replug.data.sources.built_in_texts import stand_in_vocabulary
from replug.models.encoder import Encoder
from replug.models.stand_in_encoder import write_stand_in_encoder
from tests.support.dpr_folders import write_dpr

WORDS = [word for topic in stand_in_vocabulary() for word in topic]
TEXTS = [WORDS[0], " ".join(WORDS[3:60]), " ".join(WORDS[60:69]), "x"]


def write_pooling(folder: Path, content: dict) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(content))


def vectors_one_by_one(model: PreTrainedModel, folder: Path, output: str) -> np.ndarray:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        found = [model.eval()(**tokenizer(text, return_tensors="pt")) for text in TEXTS]
    rows = [one.pooler_output[0] if output == "pooler" else one.last_hidden_state[0, 0] for one in found]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("kind", [DPRContextEncoder, DPRQuestionEncoder])
def test_each_of_dprs_encoders_gives_the_vectors_that_transformers_gives(
    tmp_path: Path, kind: type[PreTrainedModel]
) -> None:
    write_dpr(tmp_path, kind, seed=3)
    expected = vectors_one_by_one(kind.from_pretrained(tmp_path), tmp_path, "pooler")
    encoder = Encoder(str(tmp_path), "dot")
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)

    encoder.save(tmp_path / "saved")  # as every refresh does; from here on it is a BERT as any other
    np.testing.assert_allclose(Encoder(str(tmp_path / "saved"), "dot").encode(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "projection_dim"), [(DPRReader, 0), (DPRContextEncoder, 16)])
def test_what_is_no_plain_encoder_of_dpr_is_refused(tmp_path: Path, kind: type, projection_dim: int) -> None:
    write_dpr(tmp_path, kind, seed=3, projection_dim=projection_dim)
    with pytest.raises(UserError, match=f"{kind.__name__} of DPR, projection_dim {projection_dim}; expected DPRCont"):
        Encoder(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [{"pooling_mode": "cls"}, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}],
    ids=["new form", "old form"],
)
def test_the_first_tokens_vector_where_the_folder_says_so(tmp_path: Path, content: dict) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    write_stand_in_encoder(tmp_path)
    write_pooling(tmp_path, content)
    expected = vectors_one_by_one(AutoModel.from_pretrained(tmp_path), tmp_path, "first")
    encoder = Encoder(str(tmp_path), "dot")
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)

    encoder.save(tmp_path / "saved")
    exported = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(exported.encode(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(Encoder(str(tmp_path / "saved"), "dot").encode(TEXTS), expected, atol=1e-5)


def test_the_first_tokens_vector_trains(tmp_path: Path) -> None:
    write_stand_in_encoder(tmp_path)
    write_pooling(tmp_path, {"pooling_mode": "cls"})
    encoder = Encoder(str(tmp_path), "dot")
    vectors = encoder.encode_with_gradient(encoder.token_ids(TEXTS))
    torch.testing.assert_close(vectors.detach(), encoder.encode(TEXTS), atol=1e-5, rtol=0)
    vectors.square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters() if parameter.requires_grad)


def test_a_file_that_says_nothing_of_pooling_means_the_mean(tmp_path: Path) -> None:
    write_stand_in_encoder(tmp_path)
    expected = Encoder(str(tmp_path)).encode(TEXTS)
    write_pooling(tmp_path, {"word_embedding_dimension": 32, "include_prompt": True})
    assert torch.equal(Encoder(str(tmp_path)).encode(TEXTS), expected)


@pytest.mark.parametrize(("content", "pooling"), [(None, "mean"), ({"pooling_mode": "cls"}, "cls")])
def test_a_name_on_the_hub_without_a_network_is_what_was_fetched_before(
    tmp_path: Path, content: dict | None, pooling: str
) -> None:
    """As on a cluster's compute nodes. In a process of its own, since the hub's settings are read at the import."""
    repository = tmp_path / "models--some--encoder"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(snapshot.name)
    write_stand_in_encoder(snapshot)
    if content:
        write_pooling(snapshot, content)
    script = "from replug.models.encoder import Encoder; print(Encoder('some/encoder').pooling)"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == [pooling], done.stderr
