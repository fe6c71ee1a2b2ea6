"""`replug doctor`: is every file of an index what its manifest says?"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.data.shards import OWN_CORPUS, corpus_sha256, prepared_folder, shard_paths
from replug.data.store import open_corpus
from replug.index_workers.faiss_index import count_vectors
from replug.index_workers.version_store import VersionStore, weights_sha256


def verify_index(root: Path) -> tuple[list[str], list[str]]:
    """Return a line for each version, and one for each wrong checksum, count, dimension or infinite number."""
    store = VersionStore(root.absolute())
    versions = store.versions()
    lines: list[str] = []
    missing = f"{root} holds no index; expected a run directory, as `replug prepare --index` writes it"
    problems = [] if versions else [missing]
    for version in versions:
        if not store.is_published(version):
            lines.append(f"v{version:06d}: unfinished, not searched")
            continue
        found = list(_problems(store, version))
        lines.append(f"v{version:06d}: {_describe(store, version) if not found else f'wrong in {len(found)} places'}")
        problems += found
    own_corpus = prepared_folder(store.root / OWN_CORPUS)
    problems += own_corpus.verify() if own_corpus.is_finished else []
    if versions and not store.published():
        problems.append(f"{root} holds no finished version; run the command that was building it again")
    return lines, problems


def _describe(store: VersionStore, version: int) -> str:
    plan = store.plan(version)
    size = sum(path.stat().st_size for path in store.files(plan)) / 1e6
    kind = plan.kind.store or plan.kind.factory or "flat_fp16"
    return (
        f"{plan.num_documents} documents x {plan.dim}, {kind}, weights of step {plan.step}, {size:,.1f} MB, all intact"
    )


def _problems(store: VersionStore, version: int) -> Iterator[str]:
    try:
        plan = store.plan(version)
    except UserError as error:
        yield str(error)
        return
    damaged = store.verify(version)
    yield from damaged
    weights = store.encoder_folder(version) / "model.safetensors"
    if weights.is_file() and weights_sha256(weights.parent) != plan.weights_sha256:
        yield f"{weights} is not of the encoder that embedded this version"
    corpus = store.corpus_path(plan)
    if not shard_paths(corpus):
        yield f"the corpus {corpus} is gone"
    elif corpus_sha256(corpus) != plan.corpus_sha256:
        yield f"the corpus {corpus} is not the one that was embedded: its checksum differs"
    elif (found := len(open_corpus(corpus))) != plan.num_documents:
        yield f"the corpus {corpus} holds {found} documents, the index {plan.num_documents}"
    if damaged:
        return
    for file in range(plan.num_files):
        try:
            if not np.isfinite(store.open_vectors(plan, [file])[0]).all():
                yield f"{store.vectors_path(version, file)} holds numbers that are not finite"
        except UserError as error:
            yield str(error)
    for shard in range(0 if plan.kind.is_exact else plan.num_shards):
        held, expected = count_vectors(store.shard_path(version, shard)), len(plan.rows_of_shard(shard))
        if held != expected:
            yield f"{store.shard_path(version, shard)} holds {held} vectors, expected {expected}"
