"""Index versions on disk. A version is its encoder, its vectors in blocks, and a manifest that is written last.

    INDEX/v000003/encoder/          the snapshot of the retriever that embedded it, loadable by AutoModel
    INDEX/v000003/block-00000.npy   float16 [rows, D]
    INDEX/v000003/block-00000.json  written after the block: its checksum
    INDEX/v000003/manifest.json     written when every block is there: the version is published

What is not published is never searched. A build that was interrupted goes on after its last marked block,
if it is by the same weights over the same corpus; otherwise it starts anew.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from configs.errors import UserError
from data.store import file_sha256, write_json


@dataclass(frozen=True)
class BuildPlan:
    """What is to be embedded, by which weights. Two equal plans give the same bytes."""

    version: int
    step: int
    weights_sha256: str
    corpus_path: str
    corpus_sha256: str
    num_documents: int
    block_documents: int
    similarity: str
    max_tokens: int
    dim: int
    dtype: str
    tokens_per_batch: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_documents // self.block_documents)

    def rows_of_block(self, block: int) -> range:
        start = block * self.block_documents
        return range(start, min(start + self.block_documents, self.num_documents))


class VersionStore:
    """The versions under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: int) -> Path:
        return self.root / f"v{version:06d}"

    def encoder_folder(self, version: int) -> Path:
        return self.folder(version) / "encoder"

    def published(self) -> list[int]:
        """Versions that can be searched, oldest first."""
        return sorted(int(path.parent.name[1:]) for path in self.root.glob("v*/manifest.json"))

    def is_published(self, version: int) -> bool:
        return (self.folder(version) / "manifest.json").is_file()

    def plan(self, version: int) -> BuildPlan:
        """The plan of a published version; raises UserError for any other."""
        if not self.is_published(version):
            raise UserError(
                f"index version {version} is not published: {self.folder(version)}/manifest.json is missing"
            )
        return BuildPlan(**json.loads((self.folder(version) / "manifest.json").read_text())["plan"])

    def pending_plan(self, version: int) -> BuildPlan:
        """The plan of a build that was begun, whether it ended or not."""
        return BuildPlan(**json.loads((self.folder(version) / "plan.json").read_text()))

    def save_snapshot(self, version: int, save: Callable[[Path], None]) -> str:
        """Write the encoder of a version, beside and renamed; returns the hash of its weights.

        An unfinished build by other weights is removed.
        """
        partial = self.root / f"encoder-v{version:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        save(partial)
        digest = weights_sha256(partial)
        target = self.encoder_folder(version)
        if target.exists() and weights_sha256(target) == digest:
            shutil.rmtree(partial)
            return digest
        shutil.rmtree(self.folder(version), ignore_errors=True)
        target.parent.mkdir(parents=True)
        partial.rename(target)
        return digest

    def begin(self, plan: BuildPlan) -> list[int]:
        """Blocks still to be embedded. Blocks of another plan are removed."""
        folder = self.folder(plan.version)
        record = folder / "plan.json"
        if not record.exists() or BuildPlan(**json.loads(record.read_text())) != plan:
            self.discard_blocks(plan.version)
        write_json(record, asdict(plan))
        return [block for block in range(plan.num_blocks) if not self._mark(plan.version, block).is_file()]

    def discard_blocks(self, version: int) -> None:
        """Remove all of a version but its encoder; first what says that it may be searched."""
        (self.folder(version) / "manifest.json").unlink(missing_ok=True)
        for path in self.folder(version).iterdir():
            if path.is_file():
                path.unlink()

    def write_block(self, version: int, block: int, vectors: np.ndarray) -> None:
        """Write vectors [rows, D] as float16, then the mark that makes them count."""
        path = self._block(version, block)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, vectors.astype(np.float16), allow_pickle=False)
        partial.replace(path)
        write_json(self._mark(version, block), {"sha256": file_sha256(path), "rows": len(vectors)})

    def publish(self, plan: BuildPlan) -> None:
        """Mark a version as searchable; every block must be marked."""
        blocks = {}
        for block in range(plan.num_blocks):
            blocks[self._block(plan.version, block).name] = json.loads(self._mark(plan.version, block).read_text())
        write_json(self.folder(plan.version) / "manifest.json", {"plan": asdict(plan), "blocks": blocks})

    def read_blocks(self, version: int, blocks: Iterable[int]) -> Iterator[np.ndarray]:
        """Vectors [rows, D] float16 of published blocks; raises UserError naming a damaged file."""
        marks = json.loads((self.folder(version) / "manifest.json").read_text())["blocks"]
        for block in blocks:
            path = self._block(version, block)
            yield _read_checked(path, marks[path.name]["sha256"])

    def remove_all_but(self, keep: set[int]) -> None:
        """Remove versions and half-written snapshots that nothing needs any more."""
        for path in self.root.glob("v*"):
            if int(path.name[1:]) not in keep:
                shutil.rmtree(path)
        for path in self.root.glob("*.partial"):
            shutil.rmtree(path)

    def blocks_of_shard(self, plan: BuildPlan, shard: int, num_shards: int) -> range:
        """The contiguous blocks that a shard serves."""
        bounds = np.linspace(0, plan.num_blocks, num_shards + 1).round().astype(int)
        return range(bounds[shard], bounds[shard + 1])

    def _block(self, version: int, block: int) -> Path:
        return self.folder(version) / f"block-{block:05d}.npy"

    def _mark(self, version: int, block: int) -> Path:
        return self.folder(version) / f"block-{block:05d}.json"


def weights_sha256(folder: Path) -> str:
    """Hash of an encoder folder's weights, by which snapshots are told apart."""
    return file_sha256(folder / "model.safetensors")


def _read_checked(path: Path, sha256: str) -> np.ndarray:
    mend = f"remove {path.parent} and build the index again"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {mend}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is damaged, its checksum differs from manifest.json's; {mend}")
    return np.load(io.BytesIO(content), allow_pickle=False)
