"""What `replug` offers as a library: its names, their examples, and the page that tells of them."""

import doctest
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard, constants

import replug
from replug import Encoder
from replug.commands.serve import serve
from replug.serving.app import TOKEN_VARIABLE
from replug.serving.openai_api import LM_NAME
from tests.support.command_line import CommandLine
from tests.support.real_models import real_encoder
from tests.support.tiny_lms import load, random_lms_need_make_no_sense, write_gpt2  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/library.md"


@pytest.fixture(scope="module")
def with_an_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with local weights in `my-lm`, as a user's may be; MiniLM is there too."""
    real_encoder()
    folder = tmp_path_factory.mktemp("library")
    load(write_gpt2, folder / "my-lm")
    return folder


@pytest.mark.parametrize("name", replug.__all__)
def test_a_public_name_has_an_example_that_runs(name: str, with_an_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(with_an_lm)
    names = {name: getattr(replug, name) for name in replug.__all__}
    example = doctest.DocTestParser().get_doctest(names[name].__doc__, names, name, None, None)
    assert example.examples
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


def test_importing_replug_imports_nothing_that_takes_long() -> None:
    code = "import replug, sys; dir(replug); print(*sorted(name for name in sys.modules if name.startswith('replug')))"
    heavy = "print({'torch', 'transformers', 'numpy', 'ray', 'omegaconf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["replug", "set()"]


def test_every_public_name_is_where_the_module_says_and_on_the_page() -> None:
    assert replug.__all__ == sorted(replug._MODULES)
    assert set(replug.__all__) <= set(dir(replug))
    rows = re.findall(r"^\| `(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == replug.__all__


# The page's blocks ----------------------------------------------------------------------------------------

FENCE = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHRUNK = {
    "lm.path=package:smollm2": "lm.path=stand_in",
    "train.max_steps=10": "train.max_steps=2 train.batch_size=4 evaluate.max_examples=4",
    "label.dense=6": "label.dense=2",
    "num_train_epochs=3": "max_steps=2",
    "train.epochs=6": "train.epochs=1",
    "n_trials=8": "n_trials=2",
}


def blocks(heading: str) -> list[tuple[str, str]]:
    """Languages and texts of a section's blocks, with settings that take seconds instead of minutes."""
    _, _, section = PAGE.read_text().partition(f"\n## {heading}\n")
    found = FENCE.findall(section.partition("\n## ")[0])
    assert found
    shrunk = re.compile("|".join(map(re.escape, SHRUNK)))
    return [(language, shrunk.sub(lambda here: SHRUNK[here[0]], text)) for language, text in found]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reader types what the page shows: the rows of the first command stay for the second use."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def type_in(shell: str, typed: CommandLine) -> None:
    for line in shell.replace("\\\n", "").splitlines():
        if line.startswith("replug "):  # not a push: tests/models/test_hub_push.py has a hub
            ended = typed(*shlex.split(line)[1:])
            assert ended.status == 0, ended.printed


@pytest.mark.slow
def test_a_tuned_model_is_loaded_back_as_the_page_shows(
    reader: Path, replug: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_encoder()
    monkeypatch.chdir(reader)
    for language, text in blocks("Tune a sentence-transformers model, and load it back"):
        type_in(text, replug) if language == "bash" else exec(text, {})
    basel = re.search(r"\[\[([\d.]+), ([\d.]+)\]\]", capsys.readouterr().out)
    assert basel and float(basel[2]) > float(basel[1])
    card = ModelCard.load(reader / "models/mine/README.md")
    assert card.data.license == "apache-2.0" and "| lsr |" in card.text and "95% interval" in card.text


@pytest.mark.slow
def test_a_corpus_is_labelled_and_trained_on_as_the_page_shows(
    reader: Path, replug: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reader)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the trainer writes a card, for which it asks the hub
    if not (reader / "mine").exists():
        type_in("replug prepare --example mine", replug)
    for language, text in blocks("Label a corpus, and train with sentence-transformers alone"):
        here = text.replace("sentence-transformers/all-MiniLM-L6-v2", real_encoder())
        type_in(here, replug) if language == "bash" else exec(here, {})
    before, after = (Encoder(path).encode(["a text"]).numpy() for path in (real_encoder(), "models/distilled"))
    assert 1e-6 < np.abs(before - after).max() < 0.1


@pytest.mark.nightly
def test_settings_are_searched_for_as_the_page_shows(
    reader: Path, replug: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_encoder()
    monkeypatch.chdir(reader)
    if not (reader / "mine").exists():
        type_in("replug prepare --example mine", replug)
    for language, text in blocks("Search for settings"):
        type_in(text, replug) if language == "bash" else exec(text, {})
    assert re.search(r"\{'train.lr': [\d.e-]+, 'loss.gamma': 0\.\d+\}", capsys.readouterr().out)
    ended = replug("report", "runs/search/0", "runs/search/1")
    assert ended.status == 0 and "development texts" in ended.output


def test_other_libraries_are_shown_a_server_as_replug_serve_starts_it() -> None:
    port = inspect.signature(serve).parameters["port"].default
    shown = [text for _, text in blocks("LangChain and LlamaIndex")]
    assert len(shown) == 2
    for text in shown:
        assert f'"http://127.0.0.1:{port}/v1"' in text and f'model="{LM_NAME}"' in text
        assert f'os.environ.get("{TOKEN_VARIABLE}", "none")' in text
        compile(text, "docs/library.md", "exec")
