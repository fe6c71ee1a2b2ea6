"""Every command of docs/reproduce.md is one that passes the rules of its configuration; its plans print its table."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replug.commands.cli import command_line
from replug.config.load import load_config, load_evaluation_config, names_evaluation
from replug.evals.kinds import check_evaluation
from tests.support.command_line import ROOT
from tests.support.documented_commands import of_page, overrides_of

PAGE = ROOT / "docs/reproduce.md"
TEXT = PAGE.read_text()
COMMANDS = [words for words in of_page(PAGE) if len(words) > 1 and words[0] != "report"]
PLANS = [words for words in COMMANDS if words[0] == "plan" and "--price" in words]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command[0]} {Path(command[1]).stem}")
def test_a_command_composes(command: list[str]) -> None:
    path, overrides = ROOT / command[1], overrides_of(command[2:])
    if not names_evaluation(path):
        load_config(path, overrides, needs_lm=command[0] == "train")
        return
    config = load_evaluation_config(path, overrides)
    check_evaluation(config)
    assert "package:" not in str([config.lm.path, config.retriever.path, config.data.source])


def test_every_configuration_of_the_papers_own_tables_is_named() -> None:
    ours = [path.name for path in (ROOT / "configs/paper_tables").glob("*.yaml")]
    wanted = [name for name in ours if not name.startswith(("internet_", "popqa_", "table1_language"))]
    assert not [name for name in wanted if name not in TEXT]


def row_of(plan: dict) -> tuple[str, ...]:
    """Hours of the LM, of embedding, of all devices, and dollars."""
    total = plan["dollars"] / plan["price"]
    hours = (plan["hours"]["score"], plan["hours"]["embed"], total)
    return (*(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in hours), f"{max(1, plan['dollars']):.0f}")


def test_hours_and_dollars_are_what_the_plans_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = [row[1:] for row in ROW.findall(TEXT[TEXT.index("| step | LM h") :])][1:]
    app = command_line()
    outputs = [CliRunner().invoke(app, [*words, "--json"]) for words in PLANS]
    assert [output.exception for output in outputs] == [None] * len(PLANS)
    assert rows == [row_of(json.loads(output.stdout)) for output in outputs]
