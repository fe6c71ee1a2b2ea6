"""Real texts that arrive with Python packages, so that the quickstart needs no download of its own.

`package:python_reference+transformers_code+wikipedia` names one or more of them; each is a domain.
"""

import ast
import bz2
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path

from configs.errors import UserError
from data.sources import SourceText

GENSIM = "gensim==4.4.0"
WIKIPEDIA_FILE = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
MIN_CHARACTERS = 1000


def read_package_texts(names: str) -> Iterator[SourceText]:
    """The texts of `a+b`, in the order named; short ones are left out."""
    for name in names.split("+"):
        if name not in PACKAGE_TEXTS:
            raise UserError(f"data.source: package:{name} is unknown; expected {', '.join(PACKAGE_TEXTS)}")
        for identifier, text in PACKAGE_TEXTS[name]():
            if len(text) >= MIN_CHARACTERS:
                yield SourceText(f"{name}/{identifier}", text, name)


def python_reference() -> Iterator[tuple[str, str]]:
    """The topics of Python's language reference, as `help()` prints them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("this Python lacks pydoc_data; on Debian: apt-get install libpython3-stdlib") from None
    yield from sorted(topics.items())


def transformers_code() -> Iterator[tuple[str, str]]:
    """The model definitions of the installed transformers library, one text for each model."""
    for path in sorted((_package_folder("transformers") / "models").glob("*/modeling_*.py")):
        yield path.stem, path.read_text(encoding="utf-8")


def torch_docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of the installed torch library, one text for each module."""
    root = _package_folder("torch")
    for path in sorted(root.rglob("*.py")):
        text = _docstrings(path.read_text(encoding="utf-8"))
        if text:
            yield str(path.relative_to(root)), text


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
    "python_reference": python_reference,
    "transformers_code": transformers_code,
    "torch_docstrings": torch_docstrings,
    "wikipedia": wikipedia,
}


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} is a dependency of ours"
    return Path(spec.origin).parent


def _docstrings(code: str) -> str:
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.ClassDef))
    pairs = ((node.name, ast.get_docstring(node) or "") for node in nodes)
    return "\n\n".join(f"{name}\n{doc}" for name, doc in pairs if len(doc) >= 150)


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
