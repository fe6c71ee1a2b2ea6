"""Real text for benchmarks: documentation and source code in Debian packages as JSON Lines (id, text, domain).

    apt-get download linux-doc-6.1 python3.11-doc dict-gcide manpages perl-doc linux-source-6.1 gcc-12-source ...
    python -m benchmarks.debian_texts FOLDER_OF_DEBS > texts.jsonl

Archives in a package, as packages of sources have them, are read too. Tags of HTML are taken out by an expression,
enough for text that is only to be cut and counted.
"""

import gzip
import html
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

DOCUMENTATION = (".html", ".txt", ".rst", ".pod", ".dict", ".mm", ".md", ".xml", ".tex", ".info", ".texi")
SOURCES = (".c", ".h", ".cc", ".cpp", ".hpp", ".S", ".py", ".java", ".rs", ".go", ".pas", ".pp", ".ads", ".adb", ".sh")
SUFFIXES = DOCUMENTATION + SOURCES
ARCHIVES = (".tar.xz", ".tar.gz", ".tar.bz2")
MANUAL_PAGE = re.compile(r"\.[1-9][a-z]*$")
NOT_TEXT = re.compile(r"(?s)<(script|style)\b.*?</\1>|<[^>]*>")


def texts_of(package: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each file of documentation in a package."""
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        inner = str(path.relative_to(folder))
        if inner.endswith(ARCHIVES):
            with tarfile.open(path) as archive:
                for member in archive:
                    if member.isfile() and is_text(member.name):
                        yield f"{inner}/{member.name}", text_of(member.name, archive.extractfile(member).read())
        elif is_text(name := path.name.removesuffix(".gz").removesuffix(".dz")):
            content = path.read_bytes()
            yield inner, text_of(name, gzip.decompress(content) if path.suffix in (".gz", ".dz") else content)


def is_text(name: str) -> bool:
    return name.endswith(SUFFIXES) or MANUAL_PAGE.search(name) is not None


def text_of(name: str, content: bytes) -> str:
    text = content.decode("utf-8", errors="replace").replace("\0", "")
    return html.unescape(NOT_TEXT.sub(" ", text)) if name.endswith((".html", ".xml")) else text


def main() -> None:
    for package in sorted(Path(sys.argv[1]).glob("*.deb")):
        domain = package.name.partition("_")[0]
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts_of(package, Path(folder)):
                if text.strip():
                    print(json.dumps({"id": f"{domain}/{name}", "text": text, "domain": domain}))


if __name__ == "__main__":
    main()
