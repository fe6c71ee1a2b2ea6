"""`replug` as a library: its names, their examples, the page that tells of them, and the notebook."""

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from huggingface_hub import constants
from sentence_transformers import SentenceTransformerTrainingArguments

import replug
from replug import StandInLM
from replug.data.sources.built_in_texts import stand_in_texts
from replug.models.packaged import resolve_encoder_path
from tests.support.command_line import CommandLine
from tests.support.real_models import real_encoder
from tests.support.small_index import write_small_index
from tests.support.tiny_lms import load, random_lms_need_make_no_sense, write_gpt2  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/library.md"


@pytest.fixture(scope="module")
def with_an_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with local weights in `my-lm` and an index in `my-run`, as a user's may be; MiniLM is there too."""
    real_encoder()
    folder = tmp_path_factory.mktemp("library")
    load(write_gpt2, folder / "my-lm")
    write_small_index(folder / "my-run", ["the market on Friday", "the boat on the lake"])
    return folder


@pytest.mark.parametrize("name", sorted({*replug.__all__} - {"label", "evaluate", "search"}))  # examples 6, 8 and 9
def test_a_public_name_has_an_example_that_runs(name: str, with_an_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(with_an_lm)
    names = {name: getattr(replug, name) for name in replug.__all__}
    example = doctest.DocTestParser().get_doctest(names[name].__doc__, names, name, None, None)
    assert example.examples
    printed: list[str] = []
    assert doctest.DocTestRunner().run(example, out=printed.append).failed == 0, "".join(printed)


def test_importing_replug_imports_nothing_that_takes_long() -> None:
    code = "import replug, sys; dir(replug); print(*sorted(name for name in sys.modules if name.startswith('replug')))"
    heavy = "print({'torch', 'transformers', 'numpy', 'ray', 'omegaconf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["replug", "set()"]


# The page's examples, and the notebook --------------------------------------------------------------------

FENCE = re.compile(r"^## (\d+)\..*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHRUNK = {  # settings that take seconds instead of minutes
    "HuggingFaceTB/SmolLM2-135M": "stand_in",
    "sentence-transformers/all-MiniLM-L6-v2": "stand_in",
    '"package:minilm"': '"stand_in"',
    '"package:smollm2"': '"stand_in"',
    'HuggingFaceLM("package:smollm2")': "StandInLM()",
    "SentenceTransformer(": "SentenceTransformer(ENCODER or ",
    '"label.dense": 4, "label.bm25": 2': '"label.dense": 2, "label.bm25": 1',
    '"evaluate.k": 5': '"evaluate.k": 2, "evaluate.max_examples": 4',
    '"label.dense": 6': '"label.dense": 2',
    "train_dataset=labelled,": "train_dataset=labelled, args=SHORT,",
    '"data.context_tokens": 32, "data.num_heldout": 20': (
        '"data.context_tokens": 8, "data.query_share": 0.4, "data.heldout_share": 0.3, "data.num_heldout": 4'
    ),
    '"train.max_steps": 20, "refresh.every_steps": 10': (
        '"train.max_steps": 2, "refresh.every_steps": 1, "evaluate.max_examples": 4, "evaluate.k": 2'
    ),
    '"train.epochs": 3': '"train.epochs": 1',
    "n_trials=8": "n_trials=2",
}


def shrunk(code: str) -> str:
    wanted = re.compile("|".join(map(re.escape, sorted(SHRUNK, key=len, reverse=True))))
    return wanted.sub(lambda here: SHRUNK[here[0]], code)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replug: CommandLine) -> Path:
    """The folder in which a reader types what the page shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # a trainer writes a card, for which it asks the hub
    assert replug("prepare", "--example", "mine").status == 0
    return tmp_path


@pytest.mark.slow  # ten examples, five of which train
def test_the_ten_examples_of_the_page_run(reader: Path, ray_session: None, capsys: pytest.CaptureFixture[str]) -> None:
    (reader / "texts").mkdir()
    for number, text in enumerate(stand_in_texts()):
        if number < 40:
            (reader / f"texts/{number}.txt").write_text(text.text)
    short = SentenceTransformerTrainingArguments("checkpoints", max_steps=2, report_to="none")
    names: dict[str, object] = {"ENCODER": resolve_encoder_path("stand_in"), "SHORT": short, "StandInLM": StandInLM}
    names["__name__"] = "__main__"  # as a class of a script or a notebook travels to the scorers
    examples = FENCE.findall(PAGE.read_text())
    assert [number for number, _ in examples] == [str(number) for number in range(1, 11)]
    for number, code in examples:
        exec(compile(shrunk(code), f"example {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "| lsr |" in printed and "tensor([[" in printed
    results = names["trainer"].train()  # type: ignore[attr-defined] # finished: it is read again
    assert dict(results) == json.loads((reader / "runs/mine/results.json").read_text())
    assert "train/loss" in (reader / "logs/lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]
    assert ray.is_initialized()


@pytest.mark.slow
def test_the_notebook_runs(reader: Path, ray_session: None, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples/tune.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in code:
        exec(shrunk(cell), names)
    assert "The market of" in capsys.readouterr().out
