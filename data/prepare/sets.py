"""`replug prepare`: raw texts, or the user's own rows, to a prepared set with its proof of disjointness.

Raw texts are prepared in two passes, each on any number of workers in bounded memory. `cutting` deals the source texts
to the splits by keyed hashes of their ids and cuts them into sorted runs. `assembly` merges the runs by ranges of keys
into the set. Neither depends on the order of files, the number of workers, or interruptions (docs/decisions.md).
The user's own rows are never changed: an overlap there is refused.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from replug.config.errors import UserError
from replug.config.schema import DEV_SHARE, DataConfig
from replug.data.files import file_sha256, write_json
from replug.data.folder_lock import sole_writer
from replug.data.manifest import write_mark
from replug.data.prepare.assembly import (
    ShardReport,
    write_assembly_rules,
    write_ids_of_shard,
    write_shards,
    write_texts,
)
from replug.data.prepare.cutting import CutRules, LMBound
from replug.data.prepare.disjoint import DisjointProof, OverlapFilter, prove_disjoint, prove_shard, require_disjoint
from replug.data.prepare.local_pool import Pool
from replug.data.prepare.reading import Cut, SplitSizes, cut_source, reject_duplicates
from replug.data.prepare.work import WorkFolder
from replug.data.progress import Progress
from replug.data.records import Document
from replug.data.rows import read_documents, read_examples
from replug.data.sampling import Shares
from replug.data.shards import (
    combined_sha256,
    read_documents_of,
    shard_paths,
    token_paths,
    write_documents,
    write_examples,
    write_token_rules,
)
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import plan_source_shards
from replug.data.store import ImportedCorpus, PreparedSet
from replug.data.tokenizing import TokenIds

log = logging.getLogger(__name__)

Origin = dict[str, object]  # the keys, and hashes of files, that a set was made from


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """What cuts the texts (JSON), how the retriever reads documents, and what the LM holds, where that is known."""

    cut: str
    token_ids: TokenIds | None = None
    bound: LMBound | None = None


@dataclass(frozen=True, slots=True)
class Splits:
    """What was cut, and what of it was written."""

    cut: Cut
    domains: dict[str, dict[str, int]]  # of texts
    files: dict[str, str]  # of texts, names and sha256
    proof: tuple[list[str], list[str]]  # of texts: shared sources, equal texts
    shards: list[ShardReport]
    dropped: Counter

    @property
    def counts(self) -> dict[str, int]:
        texts = {split: sum(count.values()) for split, count in self.domains.items()}
        return {"documents": sum(report.rows for report in self.shards), **texts}

    def falls_short(self, asked: SplitSizes) -> bool:
        """True where a split has fewer than asked for, although the source may have more."""
        wanted = {split: getattr(asked, split) for split in asked.splits}
        return any(
            number is not None and self.counts[split] < number and self.cut.left_out(split)
            for split, number in wanted.items()
        )


def prepare_raw(
    config: DataConfig, seed: int, tokenizers: Tokenizers, out: Path, origin: Origin, pool: Pool
) -> PreparedSet:
    """Cut `data.source` into a prepared set under `out`, or go on with it; `origin` is written down with it.

    Raises UserError where too much of the source is unreadable, or it gives nothing for a split.
    """
    asked = SplitSizes(config.num_documents, config.num_queries, config.num_heldout, config.num_dev)
    with WorkFolder(out, origin) as work:
        write_json(work.rules, asdict(_cut_rules(config, seed, tokenizers)))
        splits = _make_splits(work, config, seed, asked, tokenizers.token_ids, pool)
        while splits.falls_short(asked):  # most of what was kept repeated or overlapped the rest
            work.widen()
            log.info(f"too few are left of what was kept; cutting again and keeping {work.margin} for one asked for")
            splits = _make_splits(work, config, seed, asked, tokenizers.token_ids, pool)
        _require_some(str(config.source), splits)
        _say_short(splits, asked)
        proof = _prove(work, splits, seed, pool)
        return _finish(work, splits, proof, tokenizers.token_ids, origin)


def _make_splits(
    work: WorkFolder, config: DataConfig, seed: int, asked: SplitSizes, token_ids: TokenIds | None, pool: Pool
) -> Splits:
    assert config.source is not None
    source_shards = plan_source_shards(config.source, in_one_piece=config.new_text_at is not None)
    cut = cut_source(work, source_shards, asked, pool, config.max_rejected_share)
    reject_duplicates(work, cut, config.max_rejected_share)
    write_assembly_rules(work, len(source_shards), token_ids)
    dropped = Counter(cut.dropped)
    domains, files, proof = write_texts(work, cut, asked, dropped, config.ngram_overlap, seed)
    shards = write_shards(work, cut, asked, pool)
    for report in shards:
        dropped.update(report.dropped)
    return Splits(cut, domains, files, proof, shards, dropped)


def _cut_rules(config: DataConfig, seed: int, tokenizers: Tokenizers) -> CutRules:
    return CutRules(
        FieldMap(config.text_field, config.id_field, config.domain_field, config.new_text_at),
        tokenizers.cut,
        config.context_tokens,
        config.document_tokens or config.context_tokens,
        seed,
        Shares(config.query_share, config.heldout_share, config.corpus_share, DEV_SHARE if config.num_dev else 0.0),
        tokenizers.bound,
    )


def _require_some(source: str, splits: Splits) -> None:
    said = _counts(splits.counts, splits.dropped)
    if not all(splits.counts.values()):
        raise UserError(
            f"data.source: {source} gives {said}; expected some of each: give more or longer "
            "texts, a smaller data.context_tokens, or other shares"
        )
    log.info(f"cut into {said}")
    if further := splits.cut.cut_further:
        log.info(f"{further} pieces held more tokens of the LM than it has room for, and were cut further")


def _say_short(splits: Splits, asked: SplitSizes) -> None:
    """Fewer than asked for is no mistake: it may be all that there is."""
    shares = {"queries": "query_share", "heldout": "heldout_share"}
    for split in asked.splits:
        wanted, found = getattr(asked, split), splits.counts[split]
        if wanted is not None and found < wanted:
            share = f", a larger data.{shares[split]}" if split in shares else ""
            log.warning(
                f"data.num_{split} asks for {wanted:,}, but the source gives {found:,}: give more texts{share}, or ask "
                "for fewer"
            )


def _counts(counts: dict[str, int], dropped: Counter) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()) if count)
    said = f"{counts['documents']} documents, {counts['queries']} queries, {counts['heldout']} held-out texts"
    said += f", {counts['dev']} development texts" if "dev" in counts else ""
    return f"{said} (dropped: {reasons})" if reasons else said


def _prove(work: WorkFolder, splits: Splits, seed: int, pool: Pool) -> DisjointProof:
    """Compare the files as they were written; raises UserError where they overlap."""
    sources, texts = (list(found) for found in splits.proof)
    paths = [work.documents / f"{report.number:05d}.arrow" for report in splits.shards]
    overlap_filter = work.overlap_filters / "examples"
    progress = Progress("proving that no text is in two splits", len(paths))
    for shared, equal in pool.run(prove_shard, ((path, overlap_filter, seed) for path in paths)):
        sources += shared
        texts += equal
        progress.advance()
    found = tuple(sorted(sources)), tuple(sorted(texts))
    counts, ngram = splits.counts, OverlapFilter.load(overlap_filter).n
    numbers = (counts["documents"], counts["queries"], counts["heldout"])
    proof = DisjointProof(*numbers, *found, counts.get("dev", 0), ngram)
    log.info(str(proof))
    require_disjoint(proof)
    return proof


def _finish(
    work: WorkFolder, splits: Splits, proof: DisjointProof, token_ids: TokenIds | None, origin: Origin
) -> PreparedSet:
    """Write the manifest, last of all, and remove the work."""
    cut, documents = splits.cut, Counter[str]()
    files = dict(splits.files)
    for report in splits.shards:
        documents.update(report.domains)
        files |= {f"documents/{name}": sha256 for name, sha256 in report.files.items()}
    if token_ids is not None:
        files["documents/tokens.json"] = file_sha256(work.documents / "tokens.json")
    domains = {"documents": dict(sorted(documents.items())), **splits.domains}
    _say_domains(cut, domains)
    pieces = {split: dict(sorted(cut.domains[split].items())) for split in splits.counts}
    manifest = {
        "counts": splits.counts,
        "domains": domains,
        "source": {"texts": cut.texts, "tokens": cut.tokens, "pieces": pieces, "cut_further": cut.cut_further},
        "dropped": dict(sorted(splits.dropped.items())),
        "rejected": dict(sorted(cut.rejected.items())),
        "origin": origin,
        "disjoint": proof.to_json(),
        "files": files,
    }
    write_mark(work.out / "manifest.json", manifest)
    work.end()
    return PreparedSet(work.out)


def _say_domains(cut: Cut, domains: dict[str, dict[str, int]]) -> None:
    """How far the domains kept their proportions."""
    for split in domains:
        before, after = cut.domains[split].total(), sum(domains[split].values())
        if len(cut.domains[split]) > 1:
            parts = (
                f"{name} {100 * domains[split].get(name, 0) / after:.1f}% ({100 * count / before:.1f}%)"
                for name, count in cut.domains[split].most_common(10)
            )
            log.info(f"{split} by domain, in brackets of what the source gives: {', '.join(parts)}")


# The user's own rows ------------------------------------------------------------------------------------


def prepare_rows(
    corpus: Path,
    queries: Path,
    heldout: Path,
    out: Path,
    origin: Origin,
    pool: Pool,
    token_ids: TokenIds | None = None,
    dev: Path | None = None,
) -> PreparedSet:
    """Check and import the user's own documents and texts; not one is dropped."""
    with WorkFolder(out, origin, go_on=False) as work:
        examples = {"queries": read_examples(queries), "heldout": read_examples(heldout)}
        examples |= {"dev": read_examples(dev)} if dev else {}
        write_documents(work.documents, read_documents(corpus))
        for split, rows in examples.items():
            write_examples(out / f"{split}.arrow", rows)
        proof = prove_disjoint(_documents_of(work.documents), **examples)
        log.info(str(proof))
        require_disjoint(proof)
        names = [path.relative_to(out) for path in shard_paths(work.documents)]
        names += [*_write_ids(work, token_ids, pool), *(Path(f"{split}.arrow") for split in examples)]
        domains = {split: dict(Counter(example.domain for example in rows)) for split, rows in examples.items()}
        manifest = {
            "counts": {"documents": proof.num_documents, **{split: len(rows) for split, rows in examples.items()}},
            "domains": {"documents": dict(Counter(doc.domain for doc in _documents_of(work.documents))), **domains},
            "dropped": {},
            "rejected": {},
            "origin": origin,
            "disjoint": proof.to_json(),
            "files": {str(name): file_sha256(out / name) for name in names},
        }
        write_mark(out / "manifest.json", manifest)
        work.end()
        return PreparedSet(out)


def import_corpus(corpus: Path, out: Path) -> ImportedCorpus:
    """The user's own documents alone, for an index without training; what was imported before serves again."""
    origin = file_sha256(corpus)
    if (out / "corpus.json").is_file():
        imported = ImportedCorpus(out)
        if imported.manifest["origin"] != origin:
            raise UserError(
                f"{out} was imported from other documents than {corpus}: remove it, or give another run_dir"
            )
        return imported
    with sole_writer(out):
        shutil.rmtree(out / "documents", ignore_errors=True)  # what an interrupted import left
        count = write_documents(out / "documents", read_documents(corpus))
        hashes = {path.name: file_sha256(path) for path in shard_paths(out / "documents")}
        files = {f"documents/{name}": sha256 for name, sha256 in hashes.items()}
        mark = {"sha256": combined_sha256(hashes), "origin": origin, "files": files, "counts": {"documents": count}}
        write_mark(out / "corpus.json", mark)
    return ImportedCorpus(out)


def _documents_of(folder: Path) -> Iterator[Document]:
    for path in shard_paths(folder):
        yield from read_documents_of(path)


def _write_ids(work: WorkFolder, token_ids: TokenIds | None, pool: Pool) -> list[Path]:
    """Token ids beside the documents' texts; returns the files."""
    if token_ids is None:
        return []
    shards = shard_paths(work.documents)
    for _ in pool.run(write_ids_of_shard, ((shard, token_ids) for shard in shards)):
        pass
    write_token_rules(work.documents, token_ids.fingerprint)
    paths = [path for shard in shards for path in token_paths(shard)] + [work.documents / "tokens.json"]
    return [path.relative_to(work.out) for path in paths]
