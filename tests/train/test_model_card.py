"""The card of a tuned retriever says what it is, of which weights, how it was made and what it is worth."""

from pathlib import Path

import pytest
import yaml

from replug.configs.load import load_config
from replug.data.checksums import require_checksums
from replug.train.model_card import write_model_card
from replug.train.provenance import provenance_lines
from tests.support.command_line import ROOT

ENVIRONMENT = {
    "command": "replug train my.yaml",
    "git_commit": "0123456789abcdef",
    "git_dirty": True,
    "packages": {"torch": "2.13.0"},
}
RESULTS = {
    "bpb": {"all": {"none": 2.0, "replug": 1.8, "lsr": 1.7}},
    "intervals": {"lsr_minus_replug": [-0.2, -0.05]},
    "num_windows": 12,
}


@pytest.mark.parametrize(("base", "named"), [("facebook/contriever", "facebook/contriever"), ("package:minilm", None)])
def test_a_card_has_front_matter_models_weights_and_the_table(tmp_path: Path, base: str, named: str | None) -> None:
    config = load_config(ROOT / "configs/debug.yaml", [f"retriever.path={base}", "lm.path=gpt2-xl"])
    made_by = provenance_lines(config, ENVIRONMENT, "an-identity")
    write_model_card(tmp_path, config, "step 30, the last", made_by, RESULTS)
    require_checksums(tmp_path, "mend", ["README.md"])
    card = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front.get("base_model"), front["library_name"]) == (named, "sentence-transformers")
    for said in (
        *("Weights of step 30, the last.", "LM gpt2-xl (1,5", "M parameters), identity an-identity"),
        *("command: replug train my.yaml", "commit 0123456789ab with changes, torch 2.13.0"),
        *("| 2.0000 | 1.8000 | 1.7000 |", "95% interval -0.2000 to -0.0500: lower"),
    ):
        assert said in card, said


def test_a_model_of_unknown_size_is_named_without_one(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs/debug.yaml", ["retriever.path=somebody/encoder", "lm.path=somebody/lm"])
    [models, code] = provenance_lines(config, {}, None)
    assert models == "models: retriever somebody/encoder; LM somebody/lm"
    assert code == "code: no git checkout"
    write_model_card(tmp_path, config, "step 3", [models, code])
    assert "Bits per byte" not in (tmp_path / "README.md").read_text()


def test_a_served_lm_is_named_with_its_server(tmp_path: Path) -> None:
    served = ["lm.path=null", "lm.url=http://127.0.0.1:8000/v1", "lm.model=llama"]
    config = load_config(ROOT / "configs/debug.yaml", served)
    assert "LM llama at http://127.0.0.1:8000/v1" in provenance_lines(config, {}, None)[0]
