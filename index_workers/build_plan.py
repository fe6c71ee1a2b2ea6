"""The plan of an index version: its documents, its weights, and the layout of its rows in files and shards. Pure.

Two equal plans give the same bytes. A builder embeds a file of vectors at a time; each file has a checksum. A small
corpus has many files of one block, for even shares; 36 million documents make 550 files.
"""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.errors import UserError
from replug.data.files import json_sha256
from replug.index_workers.kinds import IndexKind

BLOCK_DOCUMENTS = 1024  # embedded together; files hold whole blocks
FILES = 512  # target; each file holds at least a block and at most MOST_ROWS
MOST_ROWS = 1 << 16  # 100 MB in 768 dimensions; embedded in 8 s by an A100


def rows_per_file(num_documents: int, block_documents: int) -> int:
    """Return the rows of every file but the last, in whole blocks, by the size of the corpus alone."""
    wanted = -(-num_documents // (FILES * block_documents))
    return block_documents * max(1, min(wanted, MOST_ROWS // block_documents))


ENCODER = "encoder"


def version_folder(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def version_numbers(root: Path) -> list[int]:
    """Return versions that were begun, oldest first."""
    names = (path.name for path in root.glob("v*") if path.is_dir())
    return sorted(int(name[1:]) for name in names if re.fullmatch(r"v\d{6,}", name))


def index_folder(directory: Path) -> Path:
    """Return the index of a run directory, or the directory itself."""
    return directory / "index" if (directory / "index").is_dir() else directory


def missing_index(root: Path) -> UserError:
    """Return the error for a folder without an index; for a run without one it names the command that builds it."""
    if (root / "config.yaml").is_file() and (root / "retriever").is_dir():
        again = f"replug prepare {root}/config.yaml --index retriever.path={root}/retriever run_dir={root}-index"
        return UserError(f"{root} is a run without its index; make one of its retriever: {again}")
    return UserError(
        f"{root} holds no published index; expected a run directory, as `replug prepare --index` writes it"
    )


@dataclass(frozen=True, slots=True)
class IndexState:
    """The index at a step boundary: its version and the step of its weights."""

    version: int
    step: int


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """The documents, weights and kind of an index version: the inputs of its folder (`data.folder`).

    Two equal plans give the same bytes.
    """

    version: int
    step: int
    weights_sha256: str
    corpus_path: str  # from the index's folder if it lies in the same run directory, which may be moved
    corpus_sha256: str
    num_documents: int
    block_documents: int
    similarity: str
    max_tokens: int
    dim: int
    dtype: str
    tokens_per_batch: int
    kind: IndexKind = field(default_factory=IndexKind)
    num_shards: int = 1
    modules: str = "mean"  # the modules after the encoder's backbone, in words
    query_prompt: str = ""
    document_prompt: str = ""
    dims: int | None = None  # vectors keep the encoder's first `dims` numbers; None: all

    @property
    def retriever(self) -> str:
        """Identify the retriever and documents: equal ones give equal similarities, except for an index's kind."""
        reading = reading_identity(self.modules, self.query_prompt, self.document_prompt)
        dims = f":first {self.dims}" if self.dims else ""
        return (
            f"{self.weights_sha256[:16]}:{self.similarity}:{self.max_tokens}:{self.corpus_sha256[:16]}{reading}{dims}"
        )

    @property
    def rows_per_file(self) -> int:
        return rows_per_file(self.num_documents, self.block_documents)

    @property
    def num_files(self) -> int:
        return 0 if self.kind.store else -(-self.num_documents // self.rows_per_file)

    def rows_of_file(self, file: int) -> range:
        """Return the rows of the corpus that a file of vectors holds."""
        return range(file * self.rows_per_file, min((file + 1) * self.rows_per_file, self.num_documents))

    def blocks_of_file(self, file: int) -> list[range]:
        """Return the rows of each block, the unit of embedding: blocks do not depend on the size of the files."""
        rows, size = self.rows_of_file(file), self.block_documents
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def files_of_shard(self, shard: int, num_shards: int | None = None) -> range:
        """Return the contiguous files that a shard serves."""
        bounds = np.linspace(0, self.num_files, (num_shards or self.num_shards) + 1).round().astype(int)
        return range(bounds[shard], bounds[shard + 1])

    def rows_of_shard(self, shard: int, num_shards: int | None = None) -> range:
        """Return the contiguous rows that a shard serves."""
        files = self.files_of_shard(shard, num_shards)
        start, stop = (min(file * self.rows_per_file, self.num_documents) for file in (files.start, files.stop))
        return range(start, stop)

    def vectors(self) -> dict[str, object]:
        """Return the fields that determine the vectors; the corpus counts by its hash, not its path."""
        others = ("kind", "num_shards", "corpus_path")
        return {name: value for name, value in asdict(self).items() if name not in others}

    def built(self) -> tuple:
        """Return the fields that, with the vectors, determine the files of a lossy kind."""
        return self.kind.factory, self.num_shards


def plan_from_json(content: dict[str, Any]) -> BuildPlan:
    return BuildPlan(**{**content, "kind": IndexKind(**content["kind"])})


def reading_identity(modules: str, query_prompt: str, document_prompt: str) -> str:
    """Return the suffix of an identity for pooling and prompts. Empty for a mean without prompts."""
    reading = [modules, query_prompt, document_prompt]
    return "" if reading == ["mean", "", ""] else f":{json_sha256({'reading': reading})[:8]}"
