"""Real texts that arrive with Python packages, so that the quickstart needs no download of its own.

`package:numpy_docstrings+transformers_code+wikipedia` names one or more of them; each is a domain.
"""

import ast
import bz2
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path

from replug.config.errors import UserError
from replug.data.sources.records import SourceText

GENSIM = "gensim==4.4.0"
WIKIPEDIA_FILE = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
MIN_CHARACTERS = 1000
# A corpus of the size of the other texts: the whole library would be nine tenths of every sample.
MODEL_FAMILIES = [
    "albert",
    "bert",
    "bloom",
    "codegen",
    "distilbert",
    "electra",
    "gemma",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "roberta",
    "roformer",
    "stablelm",
    "starcoder2",
    "vit",
    "xglm",
]

NUMPY_FOLDERS = ("lib", "linalg", "polynomial")


def read_package_texts(names: str) -> Iterator[SourceText]:
    """The texts of `a+b`, in the order named; short ones are left out."""
    for name in names.split("+"):
        if name not in PACKAGE_TEXTS:
            raise UserError(f"data.source: package:{name} is unknown; expected {', '.join(PACKAGE_TEXTS)}")
        for identifier, text in PACKAGE_TEXTS[name]():
            if len(text) >= MIN_CHARACTERS:
                yield SourceText(f"{name}/{identifier}", text, name)


def numpy_docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of the installed numpy library, one text for each module."""
    root = _package_folder("numpy")
    for folder in NUMPY_FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            yield str(path.relative_to(root)), _docstrings(path.read_text(encoding="utf-8"))


def transformers_code() -> Iterator[tuple[str, str]]:
    """The definitions of well-known models in the installed transformers library, one text for each."""
    folder = _package_folder("transformers") / "models"
    for name in MODEL_FAMILIES:
        yield name, (folder / name / f"modeling_{name}.py").read_text(encoding="utf-8")


def wikipedia() -> Iterator[tuple[str, str]]:
    """A hundred articles of the English Wikipedia, from gensim's test data."""
    try:
        path = Path(str(importlib.metadata.distribution("gensim").locate_file(WIKIPEDIA_FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the package gensim is not installed: pip install --no-deps {GENSIM}") from None
    with bz2.open(path, "rt", encoding="utf-8") as file:
        pages = file.read()
    for page in re.finditer(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", pages, re.DOTALL):
        yield unescape(page[1]), _plain_text(unescape(page[2]))


PACKAGE_TEXTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "numpy_docstrings": numpy_docstrings,
    "transformers_code": transformers_code,
    "wikipedia": wikipedia,
}


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} is a dependency of ours"
    return Path(spec.origin).parent


def _docstrings(code: str) -> str:
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.ClassDef))
    pairs = ((node.name, ast.get_docstring(node) or "") for node in nodes)
    return "\n\n".join(f"{name}\n{doc}" for name, doc in pairs if doc)


# Templates, tables, references and tags of wikitext; what stays is prose.
_WIKITEXT = (
    (r"<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->", ""),
    (r"\{\{[^{}]*\}\}", ""),
    (r"\{\{[^{}]*\}\}", ""),
    (r"\{\|.*?\|\}", ""),
    (r"<[^>]+>", ""),
    (r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1"),
    (r"'{2,}", ""),
)


def _plain_text(wikitext: str) -> str:
    for pattern, replacement in _WIKITEXT:
        wikitext = re.sub(pattern, replacement, wikitext, flags=re.DOTALL)
    return wikitext.strip()
