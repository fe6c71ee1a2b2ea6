"""Give mkdocs pages from files of the repository, links that lead out of docs/, and doctests as code.

A link to a file that is not a page leads to the repository if REPO_URL is set, and is plain text otherwise.
"""

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Make every link one from docs/, or one to the repository."""
    folder = ROOT if page.file.src_uri in PAGES.values() else ROOT / "docs"

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, hash_sign, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        path = os.path.relpath(folder / path, ROOT)
        if path in PAGES or path.startswith("docs/"):
            return f"{image}[{text}]({PAGES.get(path, path.removeprefix('docs/'))}{hash_sign}{anchor})"
        return f"[{text}]({config.repo_url}/blob/main/{path})" if config.repo_url else text

    return LINK.sub(link, markdown)


class Fences(griffe.Extension):
    """Puts the examples of docstrings into code blocks: to Markdown, `>>>` is a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object's docstring once it is read."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
