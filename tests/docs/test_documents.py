"""README, CONTRIBUTING and docs/ against what is there: links, paths, commands with their options, keys, and examples.

Commands of comments and help texts are looked at too. Of these nothing runs: a command's configuration is composed as
the command does it, and its rules are checked; words in capitals stand for what the reader has. The examples of
`replug` as a library run: those of its names, of docs/library.md and of the notebook.
"""

import doctest
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from huggingface_hub import constants
from sentence_transformers import SentenceTransformerTrainingArguments

import replug
from replug import StandInLM
from replug.commands.cli import command_line
from replug.commands.command import with_short_keys
from replug.config.evaluation_schema import AskConfig, EvaluationConfig
from replug.config.keys import keys_of
from replug.config.load import load_ask_config, load_config, load_evaluation_config, names_evaluation
from replug.config.paths import find_config
from replug.config.schema import Config
from replug.data.sources.built_in_texts import stand_in_texts
from replug.evals.kinds import check_evaluation
from replug.models.packaged import resolve_encoder_path
from tests.support.command_line import ROOT, CommandLine
from tests.support.real_models import real_encoder
from tests.support.small_index import write_small_index
from tests.support.tiny_lms import load, random_lms_need_make_no_sense, write_gpt2  # noqa: F401

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
KEY = re.compile(r"(?<![\w./-])([a-z_]+\.[a-z_]\w*)(?==)")
BARE_KEY = re.compile(r"([a-z_]+)\.([a-z_]+)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/(?:[\w.-]+\.(?:py|md|yaml|sbatch|svg|png))?")
OF_FILES = ("json", "jsonl", "sqlite", "sbatch", "md", "py", "yaml")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def _inline_code(text: str) -> Iterator[str]:
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        yield " ".join(code.split())


def _shown(text: str) -> Iterator[str]:
    """Yield what a reader may type: shell lines, joined and without their comments, and inline code."""
    for language, block in FENCE.findall(text):
        if language in ("", "bash"):
            yield from (re.sub(r"\s#\s.*", "", line) for line in block.replace("\\\n", " ").splitlines())
    yield from _inline_code(text)


KEYS = {known.path: known.kind for schema in (Config, EvaluationConfig, AskConfig) for known in keys_of(schema)}
TABLES = {path for path, kind in KEYS.items() if "dict" in str(kind)}  # of names that users choose


def _is_known(key: str) -> bool:
    return key in KEYS or key.split(".")[0] in TABLES


@every_document
def test_every_relative_link_and_every_path_named_exists(document: Path) -> None:
    """Paths that begin with a folder of the repository; what a run writes is not there."""
    text = document.read_text()
    targets = [target for target in LINK.findall(FENCE.sub("", text)) if "://" not in target]
    assert not [target for target in targets if not (document.parent / target).exists()]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs"}
    words = [word.rstrip(":,;") for code in _shown(text) for word in code.split()]
    named = [word for word in words if PATH.fullmatch(word) and word.split("/")[0] in folders]
    assert not [name for name in named if not (ROOT / name).exists()]


@every_document
def test_every_key_shown_is_known(document: Path) -> None:
    """With a value, and alone in inline code: `section.key` of a section that there is."""
    text, sections = document.read_text(), {key.split(".")[0] for key in KEYS if "." in key}
    shown = [key for code in _shown(text) for key in KEY.findall(code)]
    named = [match for code in _inline_code(text) if (match := BARE_KEY.fullmatch(code))]
    shown += [match[0] for match in named if match[1] in sections and match[2] not in OF_FILES]
    assert not [key for key in shown if not _is_known(key)]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_in_a_comment_of_a_configuration_is_known(path: Path) -> None:
    comments = "\n".join(re.findall(r"#(.*)", path.read_text()))
    assert not [key for key in KEY.findall(comments) if not _is_known(key)]


@every_document
def test_python_imports_only_what_there_is(document: Path) -> None:
    for language, block in FENCE.findall(document.read_text()):
        if language == "python":
            compile(block, str(document), "exec")
            for names in re.findall(r"^from replug import (.*)$", block, re.MULTILINE):
                assert set(names.split(", ")) <= set(replug.__all__)
            for line in re.findall(r"^from replug\..*$", block, re.MULTILINE):
                exec(line, {})


# Whole commands ------------------------------------------------------------------------------------------------------

INLINE = re.compile(r"`(replug [a-z]+[^`]*)`")
ASSIGNED = re.compile(r"^([A-Z_]+)=(.*)$")
LOOP = re.compile(r"^for (\w+) in (\S+)")
OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-zA-Z_][\w-]*)*=.*", re.DOTALL)


def of_shell(block: str) -> Iterator[list[str]]:
    """The words of each command, with variables as they were set before."""
    known: dict[str, str] = {}
    for line in block.replace("\\\n", "").splitlines():
        text = re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], match[0]), line.strip())
        if assigned := ASSIGNED.match(text):
            known[assigned[1]] = "".join(shlex.split(assigned[2]))
        elif loop := LOOP.match(text):
            known[loop[1]] = loop[2]
        elif text.startswith("replug "):
            yield shlex.split(text, comments=True)[1:]


def of_page(path: Path) -> Iterator[list[str]]:
    text = path.read_text()
    blocks = [block for language, block in FENCE.findall(text) if language in ("", "bash")]
    yield from of_shell("".join(blocks))  # a page's blocks are typed one after the other
    for code in INLINE.findall(FENCE.sub("", text)):
        yield shlex.split(" ".join(code.replace("…", "").split()))[1:]


SHORT = ("--source", "--retriever", "--lm")
TAKES_CONFIG = ("train", "evaluate", "prepare", "plan", "slurm")


def documented() -> Iterator[list[str]]:
    for document in DOCUMENTS:
        yield from of_page(document)
    for path in sorted((ROOT / "replug/commands").rglob("*.py")):  # help texts
        lines = path.read_text().splitlines()
        yield from (shlex.split(line)[1:] for line in lines if line.startswith("    replug "))


COMMANDS = {" ".join(words): words for words in documented()}


@cache
def options_of(name: str, inner: str) -> set[str]:
    """Return the options of a command, or of one of its own commands. Raises KeyError for an unknown name."""
    command = dict(typer.main.get_command(command_line()).commands)[name]  # type: ignore[attr-defined]
    if own := getattr(command, "commands", {}):
        command = own[inner] if inner else command
    return {option for param in command.params for option in param.opts}


def compose(words: list[str]) -> None:
    """Raises UserError where the configuration of a command is refused."""
    short = [words[words.index(option) + 1] if option in words else None for option in SHORT]
    name, overrides = words[0], with_short_keys([word for word in words[1:] if OVERRIDE.fullmatch(word)], *short)
    if name == "ask" and not any(word.startswith("--index") for word in words):
        engines = [f"web.engine={words[place + 1]}" for place, word in enumerate(words) if word == "--engine"]
        load_ask_config([*overrides, *engines])
    elif name in TAKES_CONFIG and len(words) > 1 and (path := ROOT / find_config(words[1])).is_file():
        if names_evaluation(path):
            check_evaluation(load_evaluation_config(path, overrides))
            return
        needs_lm = name != "prepare" or "--labels" in words  # as the commands have it
        load_config(path, overrides, needs_lm=needs_lm, needs_retriever=needs_lm or "--index" in words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_has_its_options_and_a_configuration_that_is_not_refused(command: str) -> None:
    name, *words = COMMANDS[command]
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    assert given <= options_of(name, words[0] if words else "")
    if "=" in command or given:  # a whole command, not the name of one
        compose(COMMANDS[command])


# The library ----------------------------------------------------------------------------------------------------------


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


NUMBERED = re.compile(r"^## (\d+)\..*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: CommandLine) -> Path:
    """The folder in which a reader types what the page shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # a trainer writes a card, for which it asks the hub
    assert here("prepare", "--example", "mine").status == 0
    return tmp_path


@pytest.mark.slow  # ten examples, five of which train
def test_the_ten_examples_of_the_page_run(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (reader / "texts").mkdir()
    for number, text in enumerate(stand_in_texts()):
        if number < 40:
            (reader / f"texts/{number}.txt").write_text(text.text)
    short = SentenceTransformerTrainingArguments("checkpoints", max_steps=2, report_to="none")
    names: dict[str, object] = {"ENCODER": resolve_encoder_path("stand_in"), "SHORT": short, "StandInLM": StandInLM}
    names["__name__"] = "__main__"  # as a class of a script or a notebook travels to the scorers
    examples = NUMBERED.findall((ROOT / "docs/library.md").read_text())
    assert [number for number, _ in examples] == [str(number) for number in range(1, 11)]
    for number, code in examples:
        exec(compile(shrunk(code), f"example {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "| lsr |" in printed and "tensor([[" in printed
    results = names["trainer"].train()  # type: ignore[attr-defined] # finished: it is read again
    assert dict(results) == json.loads((reader / "runs/mine/results.json").read_text())
    assert "train/loss" in (reader / "logs/lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]


def test_the_notebook_runs(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples/tune.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in code:
        exec(shrunk(cell), names)
    assert "The market of" in capsys.readouterr().out
