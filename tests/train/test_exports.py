"""Every loader loads what was tuned: replug, sentence-transformers, LangChain, LlamaIndex, the snippets of the card.

The hub's cache is a folder with the bases and the exports in it; there is no network.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard, constants
from sentence_transformers import SentenceTransformer

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config, LoRAConfig
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.encoder_files import document_encoder, has_tuned_queries
from replug.models.ensemble_temperature import EnsembleTemperature, write_temperature
from replug.models.packaged import MINILM_HUB_NAME
from replug.train.model_card import QUERY, TEXTS, write_model_card
from replug.train.run_dir import provenance_lines
from replug.train.trained_weights import add_adapters, choose_trained_weights, freeze_sides, save_retriever
from tests.support.command_line import ROOT
from tests.support.encoder_folders import write_chain, write_encoder

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
    "weights": {"step": 3, "steps": 3, "first": None, "best": None},
}
PROMPTS = {"query": "query : ", "document": "passage : w3 "}
QUERY_TEXT, DOCUMENT_TEXTS = "w1 w2 w3 w30", ["w4 w5 w6 w7", "w1 w1 w9"]
KINDS: dict[str, tuple[str, ...]] = {
    "both": ("retriever.path=base",),
    "query": ("retriever.path=base", "retriever.train=query"),
    "documents": ("retriever.path=base", "retriever.train=documents"),
    "pair": ("retriever.path=base", "retriever.query_path=other"),
    "pair-query": ("retriever.path=base", "retriever.query_path=other", "retriever.train=query"),
    "query-lora-dot": ("retriever.path=base", "retriever.similarity=dot", "retriever.train=query", "lora.rank=2"),
    "prompts": ("retriever.path=prompted",),
    "query-own-prompts": (
        *("retriever.path=base", "retriever.train=query", "retriever.max_tokens=7"),
        *("retriever.query_prompt='w8 '", "retriever.document_prompt='w9 w7 '"),
    ),
}


@dataclass(frozen=True)
class Export:
    """A tuned retriever on the hub, with the vectors that replug measured with, and whether these moved."""

    config: Config
    name: str
    folder: Path
    queries: np.ndarray
    documents: np.ndarray
    moved: list[bool]

    @property
    def is_pair(self) -> bool:
        return (self.folder / "router_config.json").is_file()

    @property
    def tuned_alone(self) -> bool:
        """Whether another model encodes the documents."""
        return self.config.retriever.train.value == "query" and not self.is_pair


def hub_folder(cache: Path, name: str) -> Path:
    """Make room for a model in a cache as the hub's client lays it out."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    return repository / "snapshots" / ("0" * 40)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The hub's cache, without a network, with three bases: MiniLM's shape in small."""
    cache = tmp_path_factory.mktemp("hub")
    for name, architecture, prompts in (("base", "bert", {}), ("other", "electra", {}), ("prompted", "bert", PROMPTS)):
        write_encoder(folder := hub_folder(cache, f"some/{name}"), architecture)
        write_chain(folder, {"pooling_mode": "mean"}, ["Normalize"], prompts)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(constants, "HF_HUB_CACHE", str(cache))
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        yield cache


def both_sides(encoder: Encoder, documents: Encoder | None = None) -> tuple[np.ndarray, np.ndarray]:
    vectors = encoder.encode_query([QUERY_TEXT]), (documents or encoder).encode_document(DOCUMENT_TEXTS)
    return vectors[0].numpy(), vectors[1].numpy()


def tune(config: Config) -> tuple[Encoder, Encoder | None]:
    """Move what a training would move. Returns its encoder, and that of documents where these stay as they are."""
    encoder = load_encoder(config.retriever)
    documents = freeze_sides(config.retriever.train, encoder)
    choose_trained_weights(config, encoder)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in encoder.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    encoder.temperature = EnsembleTemperature(0.05, "an LM", 5, 40)
    return encoder, documents


@pytest.fixture(scope="module", params=KINDS)
def export(request: pytest.FixtureRequest, cache: Path) -> Export:
    keys = [re.sub(r"path=(\w+)$", r"path=some/\1", key) for key in KINDS[request.param]]
    config, name = load_config(ROOT / "configs/debug.yaml", [*keys, "lm.path=stand_in"]), f"owner/{request.param}"
    encoder, documents = tune(config)
    if not (folder := cache / f"models--owner--{request.param}/snapshots" / ("0" * 40)).exists():
        save_retriever(hub_folder(cache, name), encoder, config.retriever, documents)
        write_model_card(folder, config, "step 3", ["code: some"], RESULTS, name)
    tuned, base = both_sides(encoder, documents), both_sides(load_encoder(config.retriever))
    moved = [bool(np.abs(after - before).max() > 1e-2) for after, before in zip(tuned, base, strict=True)]
    return Export(config, name, folder, *tuned, moved)


def require_measured(export: Export, queries: object, documents: object) -> None:
    np.testing.assert_allclose(np.asarray(queries).reshape(1, -1), export.queries, atol=2e-6)
    np.testing.assert_allclose(np.asarray(documents), export.documents, atol=2e-6)


def test_replug_loads_what_was_tuned_by_name_and_by_folder(export: Export) -> None:
    assert export.moved == [export.config.retriever.train.value in ("both", side) for side in ("query", "documents")]
    for path in (export.name, str(export.folder)):
        encoder = Encoder(path)
        require_measured(export, *both_sides(encoder))
        assert encoder.temperature is not None and encoder.temperature.value == 0.05
        assert encoder.similarity == ("dot" if export.config.retriever.similarity else "cosine")


def test_the_snippets_of_the_card_run_as_they_stand(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    card = ModelCard.load(export.folder / "README.md")
    snippets = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        names: dict = {}
        exec(snippet.replace(QUERY, repr([QUERY_TEXT])).replace(TEXTS, repr(DOCUMENT_TEXTS)), names)
        if "queries" in names:
            require_measured(export, names["queries"], names["documents"])
    [product], printed = export.queries @ export.documents.T, capsys.readouterr().out.splitlines()
    shown = [float(number) for number in re.findall(r"-?\d+\.\d+", printed[0])]
    np.testing.assert_allclose(shown, product, atol=1e-3)
    assert printed[1] == DOCUMENT_TEXTS[product.argmax()]


def of_page(name: str, model: str = "MODEL") -> Any:
    """Run the block of docs/encoders.md that defines a name, and return its value."""
    _, _, section = (ROOT / "docs/encoders.md").read_text().partition("## In LangChain and LlamaIndex")
    names: dict[str, Any] = {"__name__": __name__}
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [block] = [block for block in blocks if re.search(rf"^(?:class )?{name}\b", block, re.MULTILINE)]
    exec(block.replace("MODEL", model), names)
    return names[name]


def test_langchain_has_the_measured_vectors(export: Export) -> None:
    pytest.importorskip("langchain_huggingface", reason="not installed")
    tuned, config = of_page("embeddings", export.name), export.config.retriever
    documents = export.documents  # where the base needs more than its name: its card says what
    if not (export.tuned_alone and (config.max_tokens or config.similarity)):
        of_documents = of_page("embeddings", config.path if export.tuned_alone else export.name)
        documents = of_documents.embed_documents(DOCUMENT_TEXTS)
    require_measured(export, tuned.embed_query(QUERY_TEXT), documents)


def test_queries_tuned_alone_are_plain_and_name_their_documents(export: Export) -> None:
    documents, card = document_encoder(export.name), ModelCard.load(export.folder / "README.md")
    assert has_tuned_queries(str(export.folder)) is (export.config.retriever.train.value == "query")
    assert ("separate encoders, the routes of a `Router`" in card.text) is export.is_pair
    base = export.config.retriever.path
    unchanged = re.search(rf"`{base}` encodes documents, unchanged \(SHA-256 of its .*: `[0-9a-f]{{64}}`\)", card.text)
    assert export.tuned_alone is bool(unchanged) is (documents is not None)
    assert documents is None or documents["path"] == card.data.base_model == base


@pytest.mark.parametrize("export", ["documents", "pair", "pair-query"], indirect=True)
def test_a_text_of_a_pair_without_its_task_is_refused_by_every_loader(export: Export) -> None:
    with pytest.raises(ValueError, match="Could not determine route"):
        SentenceTransformer(export.name, device="cpu").encode([QUERY_TEXT])
    with pytest.raises(UserError, match="use encode_query or encode_document"):
        Encoder(export.name).encode([QUERY_TEXT])


# Tuned queries and their documents --------------------------------------------------------------------------------


@pytest.fixture
def local(cache: Path, tmp_path: Path) -> tuple[Config, Path]:
    """Queries tuned alone, whose base is a folder; both lie in one folder."""
    shutil.copytree(cache / "models--some--base/snapshots" / ("0" * 40), tmp_path / "base")
    config = load_config(ROOT / "configs/debug.yaml", [f"retriever.path={tmp_path}/base", "retriever.train=query"])
    encoder, documents = tune(config)
    save_retriever(tmp_path / "tuned", encoder, config.retriever, documents)
    return config, tmp_path / "tuned"


def test_a_local_base_is_named_by_its_folder_and_no_place_of_this_machine(
    local: tuple[Config, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = local
    write_model_card(folder, config, "step 3", ["code: some"])
    text = (folder / "README.md").read_text()
    assert str(folder.parent) not in text and '"./tuned"' in text and '"./base"' in text
    monkeypatch.chdir(folder.parent)
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(snippet, {})


def test_a_base_that_is_gone_or_another_now_is_refused_with_what_to_give_instead(local: tuple[Config, Path]) -> None:
    config, folder = local
    given = rf"set retriever.path to the documents' encoder of the training, and retriever.query_path={folder}"
    base = Path(config.retriever.path)
    both = Encoder(str(folder))
    base.rename(base.with_name("moved"))
    with pytest.raises(UserError, match=rf"base, cannot be read .*{given}"):
        Encoder(str(folder))
    moved = Encoder(str(base.with_name("moved")), query_path=str(folder))
    for again, first in zip(both_sides(moved), both_sides(both), strict=True):
        np.testing.assert_array_equal(again, first)
    Encoder("some/other").save(base)
    with pytest.raises(UserError, match=rf"base has other weights, .* {given}"):
        Encoder(str(folder))
    with pytest.raises(UserError, match="tuned queries for documents of another encoder than this one"):
        Encoder("some/other", query_path=str(folder))


# What a card says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "named"),
    [("facebook/contriever", "facebook/contriever"), ("package:minilm", MINILM_HUB_NAME), ("stand_in", None)],
)
def test_a_card_has_front_matter_models_weights_and_the_table(tmp_path: Path, base: str, named: str | None) -> None:
    config = load_config(ROOT / "configs/debug.yaml", [f"retriever.path={base}", "lm.path=gpt2-xl"])
    made_by = provenance_lines(config, ENVIRONMENT, "an-identity")
    write_model_card(tmp_path, config, "step 3, the last", made_by, RESULTS)
    card = (tmp_path / "README.md").read_text()
    front = ModelCard(card).data
    assert (front.base_model, front.library_name) == (named, "sentence-transformers")
    assert {"sentence-transformers", "replug-lsr"} <= set(front.tags)
    for part in (
        *("Weights of step 3, the last.", "LM gpt2-xl, identity an-identity"),
        *("commit 0123456789ab with changes, torch 2.13.0", "lsr: the weights of step 3, the last"),
        *("| lsr | 1.7000 | 1.5000 to 1.9000 |", "| a\\|b | 12 | 1.9000 | 1.6000 |"),
        "- bpb of lsr − replug: -0.1000 (-0.2000 to -0.0500: lower)",
    ):
        assert part in card, part


def card_of(folder: Path, *overrides: str) -> ModelCard:
    config = load_config(ROOT / "configs/debug.yaml", [*overrides])
    write_model_card(folder, config, "step 3", ["models: some"])
    return ModelCard.load(folder / "README.md")


def test_licence_and_language_are_the_bases(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")  # what makes it an encoder's folder
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: ours\nlanguage: [de, en]\n---\n# Base\n")
    of_base = card_of(tmp_path, f"retriever.path={base}").data
    assert (of_base.license, of_base.license_name, of_base.language) == ("other", "ours", ["de", "en"])
    assert card_of(tmp_path, "retriever.path=somebody/encoder").data.license == "unknown"
    (base / "README.md").write_text("---\n: [\n---\n")
    assert card_of(tmp_path, f"retriever.path={base}").data.license == "unknown"


def test_the_card_says_what_learnt_the_ensembles_temperature_and_the_settings_at_work(tmp_path: Path) -> None:
    assert "REPLUG's ensemble (`ensemble.json`): 1, as the paper." in card_of(tmp_path).text
    encoder = Encoder("stand_in")
    add_adapters(encoder.backbones[0], LoRAConfig(rank=4), seed=0)
    encoder.save(tmp_path)
    write_temperature(tmp_path, EnsembleTemperature(0.05, lm="an LM", k=5, num_texts=40))
    keys = ("lora.rank=4", "index.dims=8", "retriever.train=documents")
    text = card_of(tmp_path, *keys, "train.labels=labels", "train.epochs=3").text
    for part in (
        *("Tuned for documents alone", "adapters of rank 4", "(`truncate_dim=8`)"),
        "ensemble (`ensemble.json`): 0.05, fitted on 40 development texts, 5 documents.",
        *("| `lora.rank` | 4 |", "| `train.epochs` | 3 |"),
    ):
        assert part in text, part
    assert "train.max_steps" not in text and "refresh.every_steps" not in text
