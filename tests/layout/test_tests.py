"""Tests stand alone: what several of them need is in tests/support."""

import re

from tests.support.command_line import ROOT

OTHER_TESTS = re.compile(r"^\s*(from|import) (tests\.(?!support\b)|test_|conftest)|sys\.path\b", re.MULTILINE)


def test_no_test_imports_a_test_or_changes_where_modules_are_looked_for():
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "test_tests.py"]
    assert len(files) > 100
    assert [str(path) for path in files if OTHER_TESTS.search(path.read_text())] == []
