"""`replug verify`: is every file of an index what its manifest says?"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.data.files import file_sha256
from replug.data.progress import Progress
from replug.data.shards import corpus_sha256, shard_paths
from replug.data.store import CorpusStore
from replug.index_workers.block_files import require_intact
from replug.index_workers.build_plan import ENCODER, BuildPlan
from replug.index_workers.faiss_index import count_vectors
from replug.index_workers.version_store import VersionStore


def verify_index(root: Path) -> tuple[list[str], list[str]]:
    """A line for each version, and a line for each thing that is wrong: checksums, counts, dimensions, finiteness."""
    store = VersionStore(root.absolute())
    versions = store.versions()
    lines: list[str] = []
    problems = [] if versions else [f"{root} holds no index; expected a run directory or what `replug index` wrote"]
    for version in versions:
        if not store.is_published(version):
            lines.append(f"v{version:06d}: unfinished, not searched")
            continue
        found = list(_problems(store, version))
        lines.append(f"v{version:06d}: {_describe(store, version) if not found else f'wrong in {len(found)} places'}")
        problems += found
    if versions and not store.published():
        problems.append(f"{root} holds no finished version; run the command that was building it again")
    return lines, problems


def _describe(store: VersionStore, version: int) -> str:
    plan = store.plan(version)
    size = sum(path.stat().st_size for path in store.files(plan)) / 1e6
    kind = plan.kind.factory or "flat_fp16"
    return (
        f"{plan.num_documents} documents x {plan.dim}, {kind}, weights of step {plan.step}, {size:,.1f} MB, all intact"
    )


def _problems(store: VersionStore, version: int) -> Iterator[str]:
    try:
        manifest, plan = store.manifest(version), store.plan(version)
    except UserError as error:
        yield str(error)
        return
    if problem := store.pending_plan_problem(version):
        yield problem
    files = manifest["files"]
    yield from _encoder_problems(store, plan, files)
    yield from _corpus_problems(store.corpus_path(plan), plan)
    yield from _file_problems(store, plan, files)


def _file_problems(store: VersionStore, plan: BuildPlan, files: dict) -> Iterator[str]:
    progress = Progress(f"checking v{plan.version:06d}", len(files))
    found = 0
    for path in store.files(plan):
        for problem in _file_problem(store, plan, path, files[path.name]):
            found += 1
            yield problem
        progress.advance()
    if not found:
        yield from _count_problems(store, plan)


def _file_problem(store: VersionStore, plan: BuildPlan, path: Path, sha256: str) -> Iterator[str]:
    try:
        require_intact(path, sha256)
        if path.suffix == ".npy":
            (vectors,) = store.open_vectors(plan, [int(path.stem.partition("-")[2])])
            if not np.isfinite(vectors).all():
                yield f"{path} holds numbers that are not finite"
    except UserError as error:
        yield str(error)


def _count_problems(store: VersionStore, plan: BuildPlan) -> Iterator[str]:
    """A lossy kind's index holds as many vectors as its shard has documents."""
    for shard in range(0 if plan.kind.is_exact else plan.num_shards):
        held, expected = count_vectors(store.shard_path(plan.version, shard)), len(plan.rows_of_shard(shard))
        if held != expected:
            yield f"{store.shard_path(plan.version, shard)} holds {held} vectors, expected {expected}"


def _encoder_problems(store: VersionStore, plan: BuildPlan, files: dict[str, str]) -> Iterator[str]:
    """The weights that embedded the version, and the tokenizer and settings that queries are encoded with."""
    for name in files:
        try:
            if name.startswith(f"{ENCODER}/"):
                require_intact(store.folder(plan.version) / name, files[name])
        except UserError as error:
            yield str(error)
    weights = store.encoder_folder(plan.version) / "model.safetensors"
    if weights.is_file() and file_sha256(weights) != plan.weights_sha256:
        yield f"{weights} is not of the encoder that embedded this version"


def _corpus_problems(path: Path, plan: BuildPlan) -> Iterator[str]:
    if not shard_paths(path):
        yield f"the corpus {path} is gone"
    elif corpus_sha256(path) != plan.corpus_sha256:
        yield f"the corpus {path} is not the one that was embedded: its checksum differs"
    elif len(CorpusStore(path)) != plan.num_documents:
        yield f"the corpus {path} holds {len(CorpusStore(path))} documents, the index {plan.num_documents}"
