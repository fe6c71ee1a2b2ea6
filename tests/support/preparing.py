"""Sources made up for the tests of preparing, and how they are prepared."""

import json
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import replug.data.prepare.assembly
import replug.data.prepare.reading
import replug.data.sources.shards
from replug.config.load import load_config
from replug.config.schema import DataConfig
from replug.data.prepare.cutting import Tokenizers
from replug.data.prepare.sets import prepare_raw
from replug.data.sampling import Shares, split_of
from replug.data.store import PreparedSet
from replug.data.tokenizing import TokenIds, word_tokenizer
from replug.models.preparing import prepared_set
from tests.support.command_line import ROOT

WORDS = word_tokenizer(r"\s*\S+|\s+")
SHARES = Shares(0.2, 0.1)  # the schema's


def debug_set(folder: Path, *overrides: str) -> PreparedSet:
    """That of configs/debug.yaml, for tests that only read it."""
    config = load_config(ROOT / "configs/debug.yaml", [f"run_dir={folder}/run", *overrides])
    return prepared_set(config, folder / "set")


def prepare(
    out: Path,
    source: object,
    seed: int = 0,
    tokenizer: str = WORDS,
    token_ids: TokenIds | None = None,
    **keys: object,
) -> PreparedSet:
    """Prepare a set by words, four to an example. `keys` are those of the schema's `data`."""
    config = DataConfig(**{"source": str(source), "context_tokens": 4} | keys)
    prepare_raw(config, seed, Tokenizers(tokenizer, token_ids), out, {"seed": seed})
    return PreparedSet(out)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(number: int, seed: int = 0, words: int = 40) -> list[dict]:
    """Rows of made-up texts in three domains; no two share a piece."""
    rng = random.Random(seed)
    return [
        {
            "id": f"{seed}-{i}",
            "text": " ".join(f"w{rng.randrange(10**6)}" for _ in range(rng.randrange(words, 2 * words))),
            "domain": rng.choice(["books", "news", "web"]),
        }
        for i in range(number)
    ]


def jsonl(rows: Iterable[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_jsonl(path: Path, rows: Iterable[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl(rows))
    return path


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def parquet(content: list[dict] | pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(content if isinstance(content, pa.Table) else pa.Table.from_pylist(content), sink, **options)
    return sink.getvalue().to_pybytes()


def ids_on(split: str, count: int, shares: Shares = SHARES) -> list[str]:
    """Ids of source texts that fall to a split with seed 0."""
    names = (name for name in map(str, range(100_000)) if split_of(name, 0, shares) == split)
    return [name for _, name in zip(range(count), names, strict=False)]


def texts_of(prepared: PreparedSet) -> dict[str, list[str]]:
    """The texts of each split, in the order of the rows."""
    examples = {"queries": prepared.queries.examples(), "heldout": prepared.heldout.examples()}
    texts = {split: [example.context + example.continuation for example in rows] for split, rows in examples.items()}
    return {"documents": [doc.text for doc in prepared.corpus.iterate()], **texts}


def prepare_apart(out: str, source: str, num_workers: int, sizes: Sequence[int], keys: dict) -> None:
    """In a process and a process group of its own, with small source shards and shards."""
    os.setpgrp()
    replug.data.sources.shards.SOURCE_SHARD_BYTES, replug.data.prepare.assembly.PIECES_PER_SHARD = sizes
    replug.data.prepare.reading.num_processes = lambda *_: num_workers
    prepare(Path(out), source, **keys)
