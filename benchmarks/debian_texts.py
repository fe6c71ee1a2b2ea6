"""Real text for benchmarks of preparing: the documentation in Debian packages as JSON Lines (id, text, domain).

    apt-get download linux-doc-6.1 python3.11-doc dict-gcide manpages perl-doc ...
    python -m benchmarks.debian_texts FOLDER_OF_DEBS > texts.jsonl

Tags of HTML are taken out by an expression, which is enough for text that is only to be cut and counted.
"""

import gzip
import html
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".html", ".txt", ".rst", ".pod", ".dict", ".mm", ".md", ".xml", ".tex", ".info")
MANUAL_PAGE = re.compile(r"\.[1-9][a-z]*$")
NOT_TEXT = re.compile(r"(?s)<(script|style)\b.*?</\1>|<[^>]*>")


def texts_of(package: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each file of documentation in a package."""
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        name = path.name.removesuffix(".gz").removesuffix(".dz")
        if not (name.endswith(SUFFIXES) or MANUAL_PAGE.search(name)):
            continue
        content = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
        text = content.decode("utf-8", errors="replace").replace("\0", "")
        if name.endswith((".html", ".xml")):
            text = html.unescape(NOT_TEXT.sub(" ", text))
        yield str(path.relative_to(folder)), text


def main() -> None:
    for package in sorted(Path(sys.argv[1]).glob("*.deb")):
        domain = package.name.partition("_")[0]
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts_of(package, Path(folder)):
                if text.strip():
                    print(json.dumps({"id": f"{domain}/{name}", "text": text, "domain": domain}))


if __name__ == "__main__":
    main()
