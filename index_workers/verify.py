"""`replug doctor`: compare every file of an index with its manifest, and the corpus with what was embedded."""

from collections.abc import Iterator
from pathlib import Path

from replug.config.errors import UserError
from replug.data.shards import OWN_CORPUS, corpus_sha256, prepared_folder, shard_paths
from replug.index_workers.version_store import VersionStore


def verify_index(root: Path) -> tuple[list[str], list[str]]:
    """Return a line for each version, and one for each file that is missing, damaged or surplus."""
    store = VersionStore(root.absolute())
    versions = store.versions()
    lines: list[str] = []
    missing = f"{root} holds no index; expected a run directory, as `replug prepare --index` writes it"
    problems = [] if versions else [missing]
    for version in versions:
        if not store.is_published(version):
            lines.append(f"v{version:06d}: unfinished, not searched")
            continue
        wrong = list(_problems(store, version))
        lines.append(f"v{version:06d}: {_describe(store, version) if not wrong else f'wrong in {len(wrong)} places'}")
        problems += wrong
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
    yield from store.verify(version)
    corpus = store.corpus_path(plan)
    if not shard_paths(corpus):
        yield f"the corpus {corpus} is gone"
    elif corpus_sha256(corpus) != plan.corpus_sha256:
        yield f"the corpus {corpus} is not the one that was embedded: its checksum differs"
