"""Every command of docs/reproduce.md is one that passes the rules of its configuration."""

import re
import shlex
from pathlib import Path

import pytest

from replug.configs.load import load_config, load_evaluation_config, names_evaluation
from replug.evals.kinds import check_evaluation
from tests.support.command_line import ROOT

TEXT = (ROOT / "docs/reproduce.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line)
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("replug ")
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command[1]} {Path(command[2]).stem}")
def test_a_command_composes(command: list[str]) -> None:
    path, overrides = ROOT / command[2], [word for word in command[3:] if "=" in word]
    if not names_evaluation(path):
        load_config(path, overrides, needs_lm=command[1] == "train")
        return
    config = load_evaluation_config(path, overrides)
    check_evaluation(config)
    assert "package:" not in str([config.lm.path, config.retriever.path, config.data.source, *config.lms.values()])


def test_every_configuration_of_the_papers_own_tables_is_named() -> None:
    ours = [path.name for path in (ROOT / "configs/paper_tables").glob("*.yaml")]
    wanted = [name for name in ours if not name.startswith(("internet_", "popqa_", "table1_language"))]
    assert not [name for name in wanted if name not in TEXT]
