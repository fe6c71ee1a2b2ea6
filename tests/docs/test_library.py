"""What `replug` offers as a library: its names, their examples, and the page that tells of them."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replug
from tests.support.real_models import real_encoder
from tests.support.tiny_lms import load, random_lms_need_make_no_sense, write_gpt2  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/library.md"


@pytest.fixture(scope="module")
def with_an_lm(tmp_path_factory: pytest.TempPathFactory, random_lms_need_make_no_sense: None) -> Path:
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
