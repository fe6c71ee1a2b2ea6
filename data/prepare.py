"""`replug prepare`: raw texts, or the user's own rows, to a prepared set with its proof of disjointness.

Raw texts go through in two passes over bounded pieces, each on any number of workers. `cutting` deals the source texts
to the sides by keyed hashes of their ids and cuts them into sorted runs; `assembly` merges the runs by ranges of keys
into the set. Neither depends on the order of files, the number of workers, or interruptions (docs/decisions.md).
The user's own rows are never changed: an overlap there is refused.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from configs.errors import UserError
from configs.schema import DataConfig
from data.assembly import AssemblyRules, ShardReport, choose_windows, load_rules, write_ids_of_shard, write_shard
from data.cutting import CutRules, UnitReport, cut_unit
from data.disjoint import DisjointProof, prove_disjoint, prove_shard, prove_windows, require_disjoint
from data.duplicates import find_duplicates, rejected_duplicates
from data.files import file_sha256, write_json
from data.guard import Guard, write_guard
from data.local_pool import Pool
from data.progress import Progress, format_duration, say
from data.records import Document
from data.rejected import ENOUGH_ROWS, Rejected, require_few_rejected, write_rejected
from data.rows import read_documents, read_windows
from data.sampling import SIDES, KeyCounts, Shares, key_ranges
from data.shards import (
    corpus_sha256,
    read_documents_of,
    read_windows_of,
    shard_paths,
    token_paths,
    write_documents,
    write_token_rules,
    write_windows,
)
from data.sources import FieldMap
from data.store import ImportedCorpus, PreparedSet, read_manifest
from data.tokenizing import TokenIds
from data.units import Unit, plan_units
from data.work import Work, wrong_files

PIECES_PER_SHARD = 1 << 15
Origin = dict[str, object]  # the keys, and hashes of files, that a set was made from


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """What cuts the texts (JSON), and how the retriever reads documents, where that is known."""

    cut: str
    token_ids: TokenIds | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """How many of each side; None is all."""

    documents: int | None
    queries: int | None
    heldout: int | None


def prepare_raw(
    config: DataConfig, seed: int, tokenizers: Tokenizers, out: Path, origin: Origin, pool: Pool
) -> PreparedSet:
    """Cut `data.source` into a prepared set under `out`, or go on with it; `origin` is written down with it.

    Raises UserError where too much of the source is unreadable, or it gives nothing for a side.
    """
    assert config.source is not None
    asked = Asked(config.num_documents, config.num_queries, config.num_heldout)
    units = plan_units(config.source, in_one_piece=config.new_text_at is not None)
    work = Work(out, origin)
    write_json(work.rules, asdict(_cut_rules(config, seed, tokenizers)))
    cut = _cut_source(work, units, asked, pool, config.max_rejected_share)
    _find_duplicates(work, cut, config.max_rejected_share)
    _write_assembly_rules(work, len(units), tokenizers)
    dropped = Counter(cut.dropped)
    windows = _write_windows(work, cut, asked, dropped, config.ngram_overlap, seed)
    shards = _write_shards(work, cut, asked, pool)
    for report in shards:
        dropped.update(report.dropped)
    _require_some(config.source, windows, shards, dropped)
    proof = _prove(work, windows, shards, seed, pool)
    return _finish(work, cut, windows, shards, dropped, proof, tokenizers.token_ids, origin)


def repair(out: Path, origin: Origin) -> bool:
    """Make a finished set unfinished where files are damaged, which are named; the rest serves again. True if so."""
    manifest = read_manifest(out)
    wrong = wrong_files(out, manifest["files"])
    if not wrong:
        shutil.rmtree(out / "work", ignore_errors=True)  # a run that was killed after its last mark leaves it
        return False
    marks = out / "work" / "shards"
    marks.mkdir(parents=True, exist_ok=True)
    for row in manifest.get("shards", []):
        ShardReport(**row).write(marks / f"{row['number']:05d}.json")
    rules = {name: sha256 for name, sha256 in manifest["files"].items() if name == "documents/tokens.json"}
    if wrong_files(out, rules):
        (out / "documents/tokens.json").unlink(missing_ok=True)
    write_json(out / "work" / "plan.json", origin)
    (out / "manifest.json").unlink()
    for line in wrong:
        say(f"{line}; making it again")
    return True


# Cutting ------------------------------------------------------------------------------------------------


class Cut:
    """What all units gave, added up as they come in."""

    def __init__(self, units: Sequence[Unit], asked: Asked) -> None:
        self.units = units
        self.reports: dict[int, UnitReport] = {}
        self.counts = {side: KeyCounts(getattr(asked, side)) for side in SIDES}
        self.domains: dict[str, Counter] = {side: Counter() for side in SIDES}
        self.dropped, self.rejected = Counter[str](), Counter[str]()
        self.texts = self.tokens = 0

    def add(self, report: UnitReport) -> None:
        self.reports[report.number] = report
        self.texts += report.texts
        self.tokens += report.tokens
        self.dropped.update(report.dropped)
        self.rejected.update(report.rejected)
        for side in SIDES:
            self.counts[side].add(report.counts[side])
            self.domains[side].update(report.domains[side])

    def limits(self) -> dict[str, int]:
        """Buckets of keys above which a piece can no longer be among those asked for."""
        return {side: self.counts[side].limit for side in SIDES}

    def ranges(self, side: str) -> list[tuple[int, int]]:
        counts = self.counts[side]
        return key_ranges(counts.end(), counts.candidates(), PIECES_PER_SHARD)

    def absolute(self, unit: int, line: int) -> int:
        """A line counted from its unit's first, as the file counts it; 0 stays 0."""
        before = 0
        while line and unit and self.units[unit - 1].names == self.units[unit].names:
            unit -= 1
            before += self.reports[unit].lines
        return line + before

    def examples(self) -> Iterator[Rejected]:
        """The listed cases in the order of the files."""
        for number in sorted(self.reports):
            for case in self.reports[number].examples:
                known = all(unit in self.reports for unit in range(number))
                yield replace(case, line=self.absolute(number, case.line)) if known else case


def _cut_rules(config: DataConfig, seed: int, tokenizers: Tokenizers) -> CutRules:
    return CutRules(
        FieldMap(
            config.text_field, config.id_field, config.domain_field, config.new_text_at, config.max_text_characters
        ),
        tokenizers.cut,
        config.window,
        config.document_tokens or config.window,
        seed,
        Shares(config.query_share, config.heldout_share, config.corpus_share),
    )


def _cut_source(work: Work, units: Sequence[Unit], asked: Asked, pool: Pool, max_rejected: float) -> Cut:
    """Every unit cut, those of an interrupted run included."""
    cut, progress = Cut(units, asked), CutProgress(units)
    for report in work.finished_units(len(units)):
        cut.add(report)
        progress.advance(report, before=True)
    todo = [unit for unit in units if unit.number not in cut.reports]
    jobs = ((work.rules, work.unit(unit.number), unit, cut.limits()) for unit in todo)  # limits as they are by then
    for report in pool.run(cut_unit, jobs):
        cut.add(report)
        progress.advance(report)
        if cut.texts >= ENOUGH_ROWS:
            _require_few(work, cut, cut.rejected, cut.examples(), max_rejected)
    _require_few(work, cut, cut.rejected, cut.examples(), max_rejected)
    return cut


def _require_few(work: Work, cut: Cut, rejected: Counter, examples: Iterable[Rejected], max_rejected: float) -> None:
    """Write `rejected.jsonl`; raises UserError where it holds too much."""
    path, listed = work.out / "rejected.jsonl", list(examples)
    if rejected:
        write_rejected(path, listed)
    require_few_rejected(rejected, listed, cut.texts, max_rejected, path)


def _find_duplicates(work: Work, cut: Cut, max_rejected: float) -> None:
    """Reject texts whose id another has, and count those without an id that occur again."""
    folders = [work.unit(unit.number) for unit in cut.units]
    named, unnamed, places = find_duplicates(folders, cut.texts, work.duplicates)
    if named:
        lines = [(unit, cut.absolute(unit, line)) for unit, line in places]
        cases = rejected_duplicates(lines, [unit.names[0] for unit in cut.units])
        cut.rejected["duplicate_id"] = named
        _require_few(work, cut, cut.rejected, [*cut.examples(), *cases], max_rejected)
    if unnamed:
        cut.dropped["repeated text"] = unnamed


class CutProgress:
    """Texts, tokens, rate and time left; by bytes where the source says how many it has."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._sizes = [unit.size for unit in units] if all(unit.size for unit in units) else [1] * len(units)
        self._texts = self._tokens = self._done = self._before = self._tokens_before = 0
        self._start = self._last = time.monotonic()

    def advance(self, report: UnitReport, before: bool = False) -> None:
        """Count a unit; `before` says that an earlier run cut it."""
        self._texts += report.texts
        self._tokens += report.tokens
        self._done += self._sizes[report.number]
        if before:
            self._before, self._tokens_before = self._done, self._tokens
        now = time.monotonic()
        if now - self._last > 5 or self._done == sum(self._sizes):
            self._last = now
            self._say(max(now - self._start, 1e-9))

    def _say(self, seconds: float) -> None:
        total, since = sum(self._sizes), max(self._done - self._before, 1)
        left = seconds / since * (total - self._done)
        rate = (self._tokens - self._tokens_before) / seconds
        say(
            f"cutting the source: {100 * self._done / total:.0f}% · {self._texts:,} texts · {self._tokens:,} tokens · "
            f"{rate:,.0f} tokens/s · {format_duration(left)} left"
        )


# Putting together ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Windows:
    """Queries and held-out texts as written."""

    counts: dict[str, int]
    domains: dict[str, dict[str, int]]
    files: dict[str, str]
    proof: tuple[list[str], list[str]]  # shared sources, equal texts


def _write_assembly_rules(work: Work, num_units: int, tokenizers: Tokenizers) -> None:
    units = [str(work.unit(number)) for number in range(num_units)]
    rules = AssemblyRules(units, str(work.duplicates), str(work.guards), tokenizers.token_ids)
    write_json(work.assembly, asdict(rules))
    _forget_other_ids(work, tokenizers.token_ids)


def _forget_other_ids(work: Work, token_ids: TokenIds | None) -> None:
    """Shards that an earlier run wrote with the token ids of another retriever are written again."""
    path, fingerprint = work.documents / "tokens.json", token_ids.fingerprint if token_ids else None
    try:
        before = json.loads(path.read_text())["fingerprint"]
    except (OSError, ValueError):  # damaged; the shards have checksums of their own
        before = None
    for report in [ShardReport.read(mark) for mark in (work.folder / "shards").glob("*.json")]:
        has_ids = len(report.files) > 1
        if has_ids != (fingerprint is not None) or (has_ids and before not in (None, fingerprint)):
            work.shard_mark(report.number).unlink()
    if fingerprint is None:
        path.unlink(missing_ok=True)
    elif before != fingerprint:
        write_token_rules(work.documents, fingerprint)


def _write_windows(work: Work, cut: Cut, asked: Asked, dropped: Counter, ngram: int | None, seed: int) -> Windows:
    """Held-out texts, then queries that overlap none of them; and the guard that documents are held against."""
    rules, guard = load_rules(work.assembly), Guard.empty()
    for side in ("heldout", "queries"):
        path, made = work.out / f"{side}.arrow", work.folder / f"{side}.arrow"
        write_windows(made, choose_windows(rules, side, cut.ranges(side), getattr(asked, side), guard, dropped))
        if not path.is_file() or file_sha256(path) != file_sha256(made):  # one that is whole stays as it is
            made.replace(path)
        if side == "heldout":
            guard = write_guard(work.guards / side, read_windows_of(path), ngram, seed)
    paths = {side: work.out / f"{side}.arrow" for side in ("queries", "heldout")}
    both = (window for path in paths.values() for window in read_windows_of(path))
    write_guard(work.guards / "windows", both, ngram, seed)
    domains = {side: Counter(window.domain for window in read_windows_of(path)) for side, path in paths.items()}
    return Windows(
        {side: count.total() for side, count in domains.items()},
        {side: dict(sorted(count.items())) for side, count in domains.items()},
        {path.name: file_sha256(path) for path in paths.values()},
        prove_windows(read_windows_of(paths["queries"]), guard, seed),
    )


def _write_shards(work: Work, cut: Cut, asked: Asked, pool: Pool) -> list[ShardReport]:
    """Shards in the order of their keys until there are enough documents; the last is cut to the number asked for."""
    ranges = cut.ranges("documents")
    done = {report.number: report for report in work.finished_shards()}
    progress = Progress("writing shards of documents", _num_needed(cut, ranges, asked.documents), len(done))

    def jobs() -> Iterator[tuple]:
        for number, keys in enumerate(ranges):
            if _enough(done, asked.documents):
                return
            if number not in done:
                yield work.assembly, work.documents, number, keys, None, work.shard_mark(number)

    for report in pool.run(write_shard, jobs()):
        done[report.number] = report
        progress.advance(note=f"{sum(report.kept for report in done.values()):,} documents")
    shards = _trimmed(work, done, ranges, asked.documents)
    _remove_others(work, shards)
    return shards


def _num_needed(cut: Cut, ranges: list[tuple[int, int]], asked: int | None) -> int:
    """About how many shards there will be."""
    candidates = max(cut.counts["documents"].candidates(), 1)
    return len(ranges) if asked is None else min(len(ranges), -(-asked * len(ranges) // candidates))


def _enough(done: dict[int, ShardReport], asked: int | None) -> bool:
    """True where the shards before the first that is missing hold enough."""
    number, kept = 0, 0
    while number in done:
        kept += done[number].kept
        number += 1
    return asked is not None and kept >= asked


def _trimmed(
    work: Work, done: dict[int, ShardReport], ranges: list[tuple[int, int]], asked: int | None
) -> list[ShardReport]:
    """The shards that are needed, the last of them cut; the others' files are removed."""
    left = sum(report.kept for report in done.values()) if asked is None else asked
    shards: list[ShardReport] = []
    for number in sorted(done):
        report = done[number]
        rows = min(report.kept, left)
        if rows == 0:
            _remove(work, report)
            continue
        if rows != report.rows:
            mark = work.shard_mark(number)
            report = write_shard(work.assembly, work.documents, number, ranges[number], rows, mark)
        shards.append(report)
        left -= rows
    return shards


def _remove_others(work: Work, shards: Sequence[ShardReport]) -> None:
    """What an interrupted run wrote and did not mark, and what is not needed now."""
    names = {name for report in shards for name in report.files} | {"tokens.json"}
    for path in work.documents.iterdir():
        if path.name not in names:
            path.unlink()


def _remove(work: Work, report: ShardReport) -> None:
    work.shard_mark(report.number).unlink()
    for name in report.files:
        (work.documents / name).unlink()


def _require_some(source: str, windows: Windows, shards: Sequence[ShardReport], dropped: Counter) -> None:
    counts = {"documents": sum(report.rows for report in shards), **windows.counts}
    said = _counts(counts, dropped)
    if not all(counts.values()):
        raise UserError(
            f"data.source: {source} gives {said}; expected some of each: give more or longer "
            "texts, a smaller data.window, or other shares"
        )
    say(f"cut into {said}")


def _counts(counts: dict[str, int], dropped: Counter) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()) if count)
    said = f"{counts['documents']} documents, {counts['queries']} queries, {counts['heldout']} held-out texts"
    return f"{said} (dropped: {reasons})" if reasons else said


def _prove(work: Work, windows: Windows, shards: Sequence[ShardReport], seed: int, pool: Pool) -> DisjointProof:
    """Compare the files as they were written; raises UserError where they overlap."""
    sources, texts = (list(found) for found in windows.proof)
    paths = [work.documents / f"{report.number:05d}.arrow" for report in shards]
    guard = work.guards / "windows"
    progress = Progress("proving that no text is on two sides", len(paths))
    for shared, equal in pool.run(prove_shard, ((path, guard, seed) for path in paths)):
        sources += shared
        texts += equal
        progress.advance()
    documents = sum(report.rows for report in shards)
    n = Guard.load(guard).n
    proof = DisjointProof(
        documents, windows.counts["queries"], windows.counts["heldout"], tuple(sorted(sources)), tuple(sorted(texts)), n
    )
    say(str(proof))
    require_disjoint(proof)
    return proof


def _finish(
    work: Work,
    cut: Cut,
    windows: Windows,
    shards: Sequence[ShardReport],
    dropped: Counter,
    proof: DisjointProof,
    token_ids: TokenIds | None,
    origin: Origin,
) -> PreparedSet:
    """Write the manifest, last of all, and remove the work."""
    documents = Counter[str]()
    files = dict(windows.files)
    for report in shards:
        documents.update(report.domains)
        files |= {f"documents/{name}": sha256 for name, sha256 in report.files.items()}
    if token_ids is not None:
        files["documents/tokens.json"] = file_sha256(work.documents / "tokens.json")
    domains = {"documents": dict(sorted(documents.items())), **windows.domains}
    _say_domains(cut, domains)
    manifest = {
        "counts": {"documents": proof.num_documents, **windows.counts},
        "domains": domains,
        "source": {
            "texts": cut.texts,
            "tokens": cut.tokens,
            "pieces": {side: dict(sorted(cut.domains[side].items())) for side in SIDES},
        },
        "dropped": dict(sorted(dropped.items())),
        "rejected": dict(sorted(cut.rejected.items())),
        "origin": origin,
        "disjoint": proof.to_json(),
        "shards": [asdict(report) for report in shards],
        "files": files,
    }
    write_json(work.out / "manifest.json", manifest)
    work.end()
    return PreparedSet(work.out)


def _say_domains(cut: Cut, domains: dict[str, dict[str, int]]) -> None:
    """How far the domains kept their proportions."""
    for side in SIDES:
        before, after = cut.domains[side].total(), sum(domains[side].values())
        if len(cut.domains[side]) > 1:
            parts = (
                f"{name} {100 * domains[side].get(name, 0) / after:.1f}% ({100 * count / before:.1f}%)"
                for name, count in cut.domains[side].most_common(10)
            )
            say(f"{side} by domain, in brackets of what the source gives: {', '.join(parts)}")


# The user's own rows ------------------------------------------------------------------------------------


def prepare_rows(
    corpus: Path,
    queries: Path,
    heldout: Path,
    out: Path,
    origin: Origin,
    pool: Pool,
    token_ids: TokenIds | None = None,
) -> PreparedSet:
    """Check and import the user's own documents and texts; not one is dropped."""
    work = Work(out, origin, go_on=False)
    windows = {"queries": read_windows(queries), "heldout": read_windows(heldout)}
    write_documents(work.documents, read_documents(corpus))
    for side, rows in windows.items():
        write_windows(out / f"{side}.arrow", rows)
    proof = prove_disjoint(_documents_of(work.documents), windows["queries"], windows["heldout"])
    say(str(proof))
    require_disjoint(proof)
    names = [path.relative_to(out) for path in shard_paths(work.documents)]
    names += [*_write_ids(work, token_ids, pool), Path("queries.arrow"), Path("heldout.arrow")]
    domains = {side: dict(Counter(window.domain for window in rows)) for side, rows in windows.items()}
    manifest = {
        "counts": {"documents": proof.num_documents, **{side: len(rows) for side, rows in windows.items()}},
        "domains": {"documents": dict(Counter(doc.domain for doc in _documents_of(work.documents))), **domains},
        "dropped": {},
        "rejected": {},
        "origin": origin,
        "disjoint": proof.to_json(),
        "files": {str(name): file_sha256(out / name) for name in names},
    }
    write_json(out / "manifest.json", manifest)
    work.end()
    return PreparedSet(out)


def import_corpus(corpus: Path, out: Path) -> ImportedCorpus:
    """The user's own documents alone, for an index without training; what was imported before serves again."""
    origin = file_sha256(corpus)
    if (out / "corpus.json").is_file():
        imported = ImportedCorpus(out)
        if imported.manifest["origin"] != origin:
            raise UserError(
                f"{out} was imported from other documents than {corpus}: remove it, or give another index.out"
            )
        return imported
    shutil.rmtree(out / "documents", ignore_errors=True)  # what an interrupted import left
    write_documents(out / "documents", read_documents(corpus))
    write_json(out / "corpus.json", {"sha256": corpus_sha256(out / "documents"), "origin": origin})
    return ImportedCorpus(out)


def _documents_of(folder: Path) -> Iterator[Document]:
    for path in shard_paths(folder):
        yield from read_documents_of(path)


def _write_ids(work: Work, token_ids: TokenIds | None, pool: Pool) -> list[Path]:
    """Token ids beside the documents' texts; returns the files."""
    if token_ids is None:
        return []
    shards = shard_paths(work.documents)
    for _ in pool.run(write_ids_of_shard, ((shard, token_ids) for shard in shards)):
        pass
    write_token_rules(work.documents, token_ids.fingerprint)
    paths = [path for shard in shards for path in token_paths(shard)] + [work.documents / "tokens.json"]
    return [path.relative_to(work.out) for path in paths]
