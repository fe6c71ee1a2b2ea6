"""A temperature lies beside an encoder's weights, is checked like them, and is used by what reads them."""

import json
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.data.folder import checksum_problems
from replug.models.encoder import Encoder
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.ensemble import mix, prior_log_weights
from replug.models.ensemble_temperature import FILE, EnsembleTemperature, temperature_in
from replug.models.local.stand_in_lm import StandInLM
from replug.models.packaged import write_stand_in_encoder
from replug.models.replug_lm import ReplugLM

FITTED = EnsembleTemperature(0.02, "lm", 10, 200)
TEXTS = ["red sky", "the blue sea", "a green tree"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_stand_in_encoder(tmp_path / "untuned")
    encoder = Encoder(str(tmp_path / "untuned"))
    assert encoder.temperature is None
    encoder.temperature = FITTED
    encoder.save(tmp_path / "tuned")
    return tmp_path / "tuned"


def test_it_is_saved_with_an_encoder_and_goes_on_with_it(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder(str(folder))
    assert encoder.temperature == temperature_in(str(folder)) == FITTED
    encoder.save(tmp_path / "copy")
    assert temperature_in(str(tmp_path / "copy")) == FITTED
    assert FILE in json.loads((folder / "checksums.json").read_text())["files"] and not checksum_problems(folder)


def test_one_that_is_gone_or_changed_is_refused(folder: Path) -> None:
    content = (folder / FILE).read_text()
    (folder / FILE).write_text(content.replace("0.02", "0.2"))
    with pytest.raises(UserError, match=r"ensemble\.json"):
        Encoder(str(folder))
    with pytest.raises(UserError, match=r"damaged.*fit it again"):
        temperature_in(str(folder))
    (folder / FILE).unlink()
    with pytest.raises(UserError, match=r"ensemble\.json"):
        Encoder(str(folder))


def test_replug_mixes_at_the_retrievers_own_or_at_a_given_one(folder: Path) -> None:
    retriever, lm = EncoderRetriever(Encoder(str(folder)), TEXTS), StandInLM()
    [found] = retriever.retrieve(["the red sea"], 3)
    given = np.stack([lm.score([f"{one.text}\nthe red sea"], [" blue"])[0].token_logprobs for one in found])
    for asked, used in ((None, 0.02), (1.0, 1.0)):
        replug = ReplugLM(lm, retriever, 3, temperature=asked)
        expected = mix(given, prior_log_weights([one.similarity for one in found], used))
        assert replug.temperature == used
        assert replug.score(["the red sea"], [" blue"])[0].token_logprobs == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="temperature is 0"):
        ReplugLM(lm, retriever, 3, temperature=0)
