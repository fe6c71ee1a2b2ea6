"""Counts of a cache of an LM's results, as another program reads the file."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path


def num_cached(path: Path) -> Counter[str]:
    """Count a file's scores, those with their tokens, answers, and prompts with samples."""
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT kind, content IS NOT NULL FROM cached").fetchall()
    names = {0: "scores", 1: "answers", 2: "samples"}
    counts = Counter(names[kind] for kind, _ in rows)
    counts.update("with tokens" for kind, has_tokens in rows if kind == 0 and has_tokens)
    return counts
