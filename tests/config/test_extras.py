"""The core install: what train, label, evaluate and the command line import is in pyproject.toml's dependencies."""

import subprocess
import sys

import pytest

from replug.config.errors import UserError, require_extra

# charset_normalizer and httpcore are missing here: huggingface_hub, which is core, brings both.
EXTRAS = (
    *("trafilatura", "lxml_html_clean", "protego", "sentencex", "sklearn"),
    *("fastapi", "uvicorn", "prometheus_client", "peft", "ddgs", "gguf", "accelerate", "lm_eval"),
)
IMPORTS = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys({extras})
import replug.commands, replug.evals.tasks
for room in (replug.commands, replug.evals.tasks):
    for module in pkgutil.iter_modules(room.__path__, f"{{room.__name__}}."):
        importlib.import_module(module.name)
for module in ("train.run", "train.labels.labelling", "evals.run", "commands.asking.ways"):
    importlib.import_module(f"replug.{{module}}")
from replug.web import require_web
require_web("evaluation=internet_qa")
"""


@pytest.mark.slow
def test_the_core_imports_no_module_of_an_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(extras=EXTRAS)], capture_output=True, text=True, timeout=120
    )
    assert done.stderr.splitlines()[-1].endswith(
        "UserError: evaluation=internet_qa needs trafilatura: pip install 'replug[web]'"
    ), done.stderr


def test_a_missing_module_is_refused_with_its_extra() -> None:
    require_extra("web", "json", "math", what="web.engine")
    with pytest.raises(UserError, match=r"^lora.rank needs no_such_module: pip install 'replug\[lora\]'$"):
        require_extra("lora", "json", "no_such_module", what="lora.rank")
