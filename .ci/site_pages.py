"""Give mkdocs pages from files of the repository, references from the code, links out of docs/, and doctests as code.

A link to a file that is not a page leads to the repository if REPO_URL is set, and is plain text otherwise.
"""

import os
import re
from pathlib import Path
from typing import Any

import griffe
from click import Context
from mkdocs.structure.files import File
from typer.cli import get_docs_for_click
from typer.main import get_command

from replug.commands.cli import command_line
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.keys import key_descriptions
from replug.config.schema import Config

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages, and the references that are made from the code."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    files.append(File.generated(config, "keys.md", content=keys_page()))
    return files


def commands_page() -> str:
    """Return the help of every command as Markdown."""
    command = get_command(command_line())
    return get_docs_for_click(obj=command, ctx=Context(command), name="replug", title="Commands")


def keys_page() -> str:
    """Return every key with its default and meaning, a table for training and one for what evaluations add."""
    lines, known = ["# Keys", ""], set[str]()
    for title, schema in (("Training", Config), ("Evaluations also read", EvaluationConfig)):
        lines += [f"## {title}", "", "| key | default | meaning |", "|---|---|---|"]
        for cells in key_descriptions(schema):
            if cells[0] not in known and not cells[0].startswith("rerank_lm."):
                key, default, meaning = (cell.replace("|", "\\|") for cell in cells)
                lines.append(f"| `{key}` | `{default}` | {meaning} |")
            known.add(cells[0])
        lines.append("")
    lines.append("`rerank_lm.*` are the keys of `lm.*` for a second LM that reranks answers.")
    return "\n".join(lines)


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
