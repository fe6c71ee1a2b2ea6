"""The card of a tuned retriever says what it is, of which weights, how it was made and what it is worth."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from replug.config.load import load_config
from replug.config.schema import LoRAConfig
from replug.models.encoder import Encoder
from replug.models.ensemble_temperature import EnsembleTemperature, write_temperature
from replug.models.packaged import MINILM_HUB_NAME
from replug.train.model_card import write_model_card
from replug.train.run_dir import provenance_lines
from replug.train.trained_weights import add_adapters
from tests.support.command_line import ROOT

ENVIRONMENT = {
    "command": "replug train my.yaml",
    "git_commit": "0123456789abcdef",
    "git_dirty": True,
    "packages": {"torch": "2.13.0"},
}
INTERVAL = {"n": 12, "interval": [1.5, 1.9]}
RESULTS = {
    "language_modelling": {
        "replug": {"bpb": {"value": 1.8, **INTERVAL}, "bpb/a|b": {"value": 1.9, **INTERVAL}},
        "lsr": {
            "bpb": {"value": 1.7, **INTERVAL},
            "bpb/a|b": {"value": 1.6, **INTERVAL},
            "bpb - replug": {"value": -0.1, "n": 12, "interval": [-0.2, -0.05]},
        },
    },
    "weights": {"step": 30, "steps": 30, "first": None, "best": None, "alone": None},
}


@pytest.mark.parametrize(
    ("base", "named"),
    [("facebook/contriever", "facebook/contriever"), ("package:minilm", MINILM_HUB_NAME), ("stand_in", None)],
)
def test_a_card_has_front_matter_models_weights_and_the_table(tmp_path: Path, base: str, named: str | None) -> None:
    config = load_config(ROOT / "configs/debug.yaml", [f"retriever.path={base}", "lm.path=gpt2-xl"])
    made_by = provenance_lines(config, ENVIRONMENT, "an-identity", is_public=True)
    write_model_card(tmp_path, config, "step 30, the last", made_by, RESULTS)
    card = (tmp_path / "README.md").read_text()
    front = ModelCard(card).data
    assert (front.base_model, front.library_name) == (named, "sentence-transformers")
    assert {"sentence-transformers", "replug-lsr"} <= set(front.tags)
    for part in (
        *("Weights of step 30, the last.", "LM gpt2-xl (1,5", "M parameters), identity an-identity"),
        *("commit 0123456789ab with changes, torch 2.13.0", "lsr: the weights of step 30, the last"),
        *("| lsr | 1.7000 | 1.5000 to 1.9000 |", "| a\\|b | 12 | 1.9000 | 1.6000 |"),
        "- bpb of lsr − replug: -0.1000 (-0.2000 to -0.0500: lower)",
    ):
        assert part in card, part


def card_of(folder: Path, *overrides: str) -> ModelCard:
    config = load_config(ROOT / "configs/debug.yaml", [*overrides])
    write_model_card(folder, config, "step 3", ["models: some"])
    return ModelCard.load(folder / "README.md")


def test_licence_language_and_dataset_are_the_bases_and_the_hubs(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")  # what makes it an encoder's folder
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: ours\nlanguage: [de, en]\n---\n# Base\n")
    of_base = card_of(tmp_path, f"retriever.path={base}").data
    assert (of_base.license, of_base.license_name, of_base.language) == ("other", "ours", ["de", "en"])
    assert card_of(tmp_path, "retriever.path=somebody/encoder").data.license == "unknown"
    (base / "README.md").write_text("---\n: [\n---\n")
    assert card_of(tmp_path, f"retriever.path={base}").data.license == "unknown"
    of_hub = card_of(tmp_path, "data.source=Salesforce/wikitext:wikitext-103-raw-v1:test").data
    assert of_hub.datasets == ["Salesforce/wikitext"]
    assert card_of(tmp_path, "data.source=mine/texts.jsonl").data.datasets is None


def test_the_card_says_what_learnt_the_ensembles_temperature_and_the_settings_at_work(tmp_path: Path) -> None:
    assert "REPLUG's ensemble: 1, as the paper." in card_of(tmp_path).text
    encoder = Encoder("stand_in")
    add_adapters(encoder.backbones[0], LoRAConfig(rank=4), seed=0)
    encoder.save(tmp_path)
    write_temperature(tmp_path, EnsembleTemperature(0.05, lm="an LM", k=5, num_texts=40))
    keys = ("lora.rank=4", "retriever.dims=[8,16]", "index.dims=8", "retriever.train=documents")
    text = card_of(tmp_path, *keys, "train.labels=labels", "train.epochs=3").text
    for part in (
        *("Tuned for documents alone", "adapters of rank 4", "the first 16, 8 numbers", "(`truncate_dim=8`)"),
        "ensemble: 0.05, fitted on 40 development texts, 5 documents (`ensemble.json`).",
        *("| `lora.rank` | 4 |", "| `retriever.dims` | [8, 16] |", "| `train.epochs` | 3 |"),
    ):
        assert part in text, part
    assert "train.max_steps" not in text and "refresh.every_steps" not in text
