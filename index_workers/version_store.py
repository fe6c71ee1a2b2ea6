"""Index versions on disk. A version is its encoder, its vectors, and a manifest that is written last.

    INDEX/v000003/encoder/            the snapshot of the retriever that embedded it, loadable by AutoModel
    INDEX/v000003/vectors-00000.npy   float16 [rows, D], whole blocks (`build_plan` says how many)
    INDEX/v000003/vectors-00000.json  written after the file: its checksum
    INDEX/v000003/quantizer.faiss     the trained, empty index of a lossy kind
    INDEX/v000003/shard-00000.faiss   a lossy kind's index over the files of one shard, and its mark
    INDEX/v000003/inputs.json         the plan that it is built by
    INDEX/v000003/manifest.json       written when everything is there: the version is published
    INDEX/v000002.0a1b.stale/         obsolete, deleted in the background

Unpublished versions are never searched. An interrupted build resumes after its last marked file if its weights and
corpus are the same. The calls that delay a training step (`save_snapshot`, `begin`, `set_aside_all_but`) list and
rename folders, and read, write or remove no file of vectors.
"""

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from replug.config.errors import RunError, UserError
from replug.data.files import file_sha256, json_sha256, read_json, reading, writing
from replug.data.folder import INPUTS, MANIFEST, FileSum, Folder, file_sum, require_file
from replug.data.shards import corpus_sha256, shard_paths
from replug.data.store import CorpusStore, open_corpus
from replug.index_workers.build_plan import (
    ENCODER,
    BuildPlan,
    plan_from_json,
    version_folder,
    version_numbers,
)

MEND = "remove it and run the command that built the index: it makes only the missing files"
ITEM_BYTES, HEADER_BYTES = 2, 128  # of float16; of a .npy file with two dimensions
FORMAT = 8
WEIGHTS = "model.safetensors"
READERS = 4  # files checked in parallel: one stream does not use a disk's whole bandwidth


# The missing parts of a build: files of vectors, whether the quantizer, and shards.
Missing = tuple[list[int], bool, list[int]]


class VersionStore:
    """The versions under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._removing = threading.Lock()

    def folder(self, version: int) -> Path:
        return version_folder(self.root, version)

    def encoder_folder(self, version: int) -> Path:
        return self.folder(version) / ENCODER

    def corpus_path(self, plan: BuildPlan) -> Path:
        """Return the current path of a plan's corpus."""
        return (self.root / plan.corpus_path).resolve()

    def open_corpus(self, plan: BuildPlan) -> CorpusStore:
        """Open the corpus of a plan. Raises UserError if it is gone or of another size."""
        path = self.corpus_path(plan)
        if not shard_paths(path):
            raise UserError(f"the index's corpus {path} is gone; bring it back, or build the index again")
        corpus = open_corpus(path)
        if len(corpus) != plan.num_documents:
            raise UserError(
                f"{path} holds {len(corpus)} documents, but index version {plan.version} was begun over "
                f"{plan.num_documents}: put that corpus back, or remove {self.root} and build it again"
            )
        return corpus

    def published(self) -> list[int]:
        """Return versions that can be searched, oldest first."""
        return [version for version in self.versions() if self.is_published(version)]

    def versions(self) -> list[int]:
        """Return versions that were begun, oldest first."""
        return version_numbers(self.root)

    def is_published(self, version: int) -> bool:
        return self._version(version).is_finished

    def can_be_built(self, version: int) -> bool:
        """Return whether its plan and its encoder exist, enough to rebuild all the rest."""
        return (self.folder(version) / INPUTS).is_file() and (self.encoder_folder(version) / WEIGHTS).is_file()

    def plan(self, version: int) -> BuildPlan:
        """Return the plan of a published version; raises UserError for any other."""
        self.manifest(version)
        return self.pending_plan(version)

    def manifest(self, version: int) -> dict[str, FileSum]:
        """Return the size and checksum of each file. Raises UserError if the version is not published or damaged."""
        path = self.folder(version) / MANIFEST
        if not path.is_file():
            raise UserError(f"index version {version} is not published: {path} is missing")
        with reading(path):
            files = self._version(version).manifest()["files"]
            self._version(version).require(INPUTS)
        return files

    def fingerprint(self, version: int) -> str:
        """Return a hash that changes when a published version is rebuilt."""
        return file_sha256(self.folder(version) / MANIFEST)

    def pending_plan(self, version: int) -> BuildPlan:
        """Return the plan of a finished or unfinished build."""
        path = self.folder(version) / INPUTS
        with reading(path):
            inputs = self._version(version).inputs
        if inputs is None:
            raise RunError(f"{path} is missing")
        return plan_from_json(inputs)

    def corpus_problems(self, version: int) -> list[str]:
        """Return a line if the corpus of a published version is gone or changed."""
        plan = self.plan(version)
        corpus = self.corpus_path(plan)
        if shard_paths(corpus) and corpus_sha256(corpus) == plan.corpus_sha256:
            return []
        return [f"the corpus {corpus} is gone, or changed since it was embedded"]

    def save_snapshot(self, version: int, save: Callable[[Path], None]) -> str:
        """Write the encoder of a version, beside and renamed; returns the hash of its weights.

        An unfinished build by other weights is set aside. Raises RunError if the disk does not take the snapshot.
        """
        partial = self.root / f"encoder-v{version:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        target = self.encoder_folder(version)
        with writing(partial):
            save(partial)
            digest = weights_sha256(partial)
            if (target / WEIGHTS).is_file() and weights_sha256(target) != digest:
                self._set_aside(self.folder(version))
            shutil.rmtree(target, ignore_errors=True)  # also for the same weights: the old copy may be damaged
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(target)
        return digest

    def require_same_vectors(self, plan: BuildPlan) -> None:
        """Raise UserError if the version was begun with another corpus, other weights or other settings."""
        folder = self._version(plan.version)
        if folder.inputs is not None:
            folder.check(plan.vectors(), are_all=False)

    def begin(self, plan: BuildPlan) -> Missing:
        """Begin or resume a build; returns its missing parts. Sets aside other vectors, drops other kinds' files."""
        folder = self._version(plan.version)
        before = plan_from_json(folder.inputs) if folder.inputs else None
        if before != plan:
            self._discard_stale(before, plan)
        self._remove_partials(plan.version)
        folder.claim(asdict(plan), may_change=asdict(plan))
        lossy, version = not plan.kind.is_exact, plan.version
        names = {path.name for path in self.folder(version).iterdir()}  # one listing instead of many `stat` calls
        return (
            [file for file in range(plan.num_files) if not _is_marked(names, self.vectors_path(version, file))],
            lossy and not _is_marked(names, self.quantizer_path(version)),
            [s for s in range(plan.num_shards) if lossy and not _is_marked(names, self.shard_path(version, s))],
        )

    def _discard_stale(self, before: BuildPlan | None, plan: BuildPlan) -> None:
        """Drop another plan's unusable files, the manifest first, so that no search uses them. The encoder stays."""
        folder = self.folder(plan.version)
        self._version(plan.version).reopen()
        if before is not None and before.vectors() == plan.vectors():
            for path in folder.glob("*.faiss*") if before.built() != plan.built() else ():
                path.unlink()
        elif any(path.is_file() for path in folder.iterdir()):
            stale = self._set_aside(folder)
            folder.mkdir()
            (stale / "encoder").rename(self.encoder_folder(plan.version))

    def write_vectors(self, version: int, file: int, vectors: np.ndarray) -> None:
        """Write vectors [rows, D] as float16, then their mark. Raises RunError naming the file."""
        self.write_marked(self.vectors_path(version, file), lambda partial: write_vectors(partial, vectors))

    def write_marked(self, path: Path, save: Callable[[Path], object]) -> None:
        """Have `save` write a file beside `path`; then rename it, then mark it.

        The temporary name is unique: a builder that is believed dead may still be writing the same file.
        """
        partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
        with writing(partial):
            save(partial)
            mark = file_sum(partial)
            partial.replace(path)
            partial.write_text(json.dumps(mark))
            partial.replace(_mark(path))

    def publish(self, plan: BuildPlan) -> None:
        """Mark a version as searchable; raises RunError for a file without a mark."""
        marks = {path.name: _read_mark(path) for path in self.files(plan)}
        self._remove_partials(plan.version)
        encoder = self.encoder_folder(plan.version)
        snapshot = (path for path in sorted(encoder.rglob("*")) if path.is_file())
        files = {str(path.relative_to(encoder.parent)): file_sum(path) for path in snapshot}
        self._version(plan.version).finish(files | marks)

    def _remove_partials(self, version: int) -> None:
        """Remove the half-written files of killed builders."""
        for partial in self.folder(version).glob("*.partial"):
            partial.unlink()

    def files(self, plan: BuildPlan) -> list[Path]:
        """Return every file of vectors or index that a version needs."""
        vectors = self.vectors_paths(plan, range(plan.num_files))
        if plan.kind.is_exact:
            return vectors
        shards = [self.shard_path(plan.version, shard) for shard in range(plan.num_shards)]
        return [*vectors, self.quantizer_path(plan.version), *shards]

    def open_vectors(self, plan: BuildPlan, files: Iterable[int]) -> list[np.ndarray]:
        """Map vectors [rows, D] float16 of some files. Raises UserError naming a missing file."""
        shapes = [(file, (len(plan.rows_of_file(file)), plan.dim)) for file in files]
        return [map_vectors(self.vectors_path(plan.version, file), shape) for file, shape in shapes]

    def check(self, version: int, paths: Iterable[Path]) -> None:
        """Compare checksums of files of a version; raises UserError naming the first that is missing or damaged."""
        sum_of = self._sums(version)
        with ThreadPoolExecutor(READERS) as readers:
            for _ in readers.map(lambda path: require_file(path, sum_of(path), MEND), paths):
                pass

    def check_encoder(self, version: int) -> None:
        """Compare a published version's encoder with its manifest: it must have embedded the documents.

        Raises UserError naming a missing or changed file.
        """
        for name, known in self.manifest(version).items():
            if name.startswith(f"{ENCODER}/"):
                require_file(self.folder(version) / name, known, MEND)

    def _sums(self, version: int) -> Callable[[Path], FileSum]:
        """Return the lookup of a file's checksum: in the manifest, or in the file's mark until publication."""
        if not self.is_published(version):
            return _read_mark
        files = self.manifest(version)
        return lambda path: files[path.name]

    def set_aside_all_but(self, keep: set[int]) -> None:
        """Set aside all versions but `keep`, and half-written snapshots, by a rename each."""
        for version in set(self.versions()) - keep:
            self._set_aside(self.folder(version))
        for path in self.root.glob("*.partial"):
            self._set_aside(path)

    def remove_stale(self) -> None:
        """Delete folders that were set aside; raises RunError naming the first failure after trying all."""
        failed: list[tuple[Path, OSError]] = []
        with self._removing:
            for path in self.root.glob("*.stale"):
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    failed.append((path, error))
        if failed:
            path, cause = failed[0]
            raise RunError(f"{path} cannot be removed: {cause.strerror or cause}") from cause

    def remove_all_but(self, keep: set[int]) -> None:
        """Remove all other versions and half-written snapshots, with their files."""
        self.set_aside_all_but(keep)
        self.remove_stale()

    def _set_aside(self, folder: Path) -> Path:
        return folder.rename(self.root / f"{folder.name}.{uuid4().hex}.stale")

    def vectors_path(self, version: int, file: int) -> Path:
        return self.folder(version) / f"vectors-{file:05d}.npy"

    def vectors_paths(self, plan: BuildPlan, files: Iterable[int]) -> list[Path]:
        return [self.vectors_path(plan.version, file) for file in files]

    def shard_path(self, version: int, shard: int) -> Path:
        return self.folder(version) / f"shard-{shard:05d}.faiss"

    def quantizer_path(self, version: int) -> Path:
        return self.folder(version) / "quantizer.faiss"

    def _version(self, version: int) -> Folder:
        """Return the folder of a version. It may hold marks of files and the snapshot before its plan."""
        others = (ENCODER, "*.json", "*.partial")
        return Folder(self.folder(version), "index version", key="run_dir", fix_hint=MEND, others=others, format=FORMAT)


def write_vectors(path: Path, vectors: np.ndarray) -> None:
    """Write vectors [rows, D] as float16. Raises OSError if the disk does not take all of it."""
    vectors = np.ascontiguousarray(vectors, dtype=np.float16)
    with path.open("wb") as file:  # given a file, np.save ignores a failure to write the last bytes
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(vectors))
        file.write(vectors.data)


def map_vectors(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Map the vectors of a file, which are read when they are first used. Raises UserError for another size.

    By torch, since each of Python's own maps keeps a descriptor open.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; {MEND}")
    size = path.stat().st_size
    if size != HEADER_BYTES + ITEM_BYTES * math.prod(shape):
        raise UserError(f"{path} is damaged, it has {size} bytes for float16 {list(shape)}; {MEND}")
    # Private and writable: torch warns of read-only arrays.
    whole = torch.from_file(str(path), shared=False, size=size // ITEM_BYTES, dtype=torch.float16)
    return whole[HEADER_BYTES // ITEM_BYTES :].view(shape).numpy()


def weights_sha256(folder: Path) -> str:
    """Return a hash of an encoder folder's weights, including its modules, to tell snapshots apart."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob(WEIGHTS)}
    if list(files) == [WEIGHTS]:
        return file_sha256(folder / WEIGHTS)
    return json_sha256({name: file_sha256(path) for name, path in files.items()})


def _is_marked(names: set[str], path: Path) -> bool:
    return path.name in names and _mark(path).name in names


def _mark(path: Path) -> Path:
    return path.with_name(path.name + ".json") if path.suffix == ".faiss" else path.with_suffix(".json")


def _read_mark(path: Path) -> dict[str, Any]:
    """Return the mark of a file. Raises RunError if the file is not marked."""
    mark = _mark(path)
    if not mark.is_file():
        raise RunError(f"{mark} is missing")
    with reading(mark):
        return read_json(mark, MEND)
