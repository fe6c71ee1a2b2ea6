"""Print the code lines of each room, beside those of the last release or of a given commit: `size.py [COMMIT]`.

Blank lines, comments and docstrings do not count.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path, PurePath

ROOMS = ("train", "data", "index_workers", "slurm", "replug")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def git(*arguments: str) -> str:
    """Return what a git command prints; raise CalledProcessError if it fails."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, encoding="utf-8").stdout


def count_code(source: str) -> int:
    """Return the lines of a module that hold code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node)
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def count_rooms(commit: str | None) -> tuple[Counter[str], Counter[str]]:
    """Return code lines and files by room, of a commit or (None) of the files that git tracks here."""
    paths = (
        git("ls-tree", "-r", "--name-only", commit)
        if commit
        else git("ls-files", "--cached", "--others", "--exclude-standard")
    )
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in map(PurePath, paths.splitlines()):
        if path.parts[0] in ROOMS and path.suffix == ".py" and (commit or Path(path).exists()):
            room = path.parts[0] if path.parts[0] != "replug" else "/".join(path.parts[:2])
            source = git("show", f"{commit}:{path}") if commit else Path(path).read_text(encoding="utf-8")
            lines[room] += count_code(source)
            files[room] += 1
    return lines, files


def main() -> None:
    """Print the table, with the last release's lines where there is one."""
    tags = git("tag", "--list", "--sort=-creatordate").split()
    base = sys.argv[1] if len(sys.argv) > 1 else next(iter(tags), None)
    lines, files = count_rooms(None)
    before = count_rooms(base)[0] if base else Counter()
    print(f"{'room':24} {'files':>6} {'code lines':>11}" + (f" {base:>14}" if base else "  (no release yet)"))
    for room in (*sorted(lines | before), "all"):
        if room == "all":
            number, now, then = files.total(), lines.total(), before.total()
        else:
            number, now, then = files[room], lines[room], before[room]
        print(f"{room:24} {number:6,} {now:11,}" + (f" {then:8,} {now - then:+6,}" if base else ""))


if __name__ == "__main__":
    main()
