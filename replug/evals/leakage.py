"""Leakage: the examples that the corpus holds. Retrieval that finds them copies, and predicts nothing.

An example is in the corpus where a document comes from its source, equals one of its texts (white space and case
aside), or shares as many words in a row with one, as preparing a set has it (`data.prepare.disjoint`). N-grams have 13
words (Brown et al. 2020); a text of fewer words, down to 8, is compared whole. Words in a row that half of the corpus's
sources hold, such as a footer, are no leak. What is compared is the task's to say: an example with its continuation, a
question, its choices, its answers.

The hashes of the examples are held in memory, and the corpus streams past once. found/overlaps.jsonl keeps what was
found, and leakage.json holds it for the examples of the results.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig
from replug.data.files import read_json, write_json
from replug.data.hashing import content_hash, hash64, is_known, ngram_hashes, without_common
from replug.data.prepare.disjoint import LEAST_COMMON, common_from
from replug.data.progress import Progress
from replug.data.records import Document
from replug.data.store import Corpus
from replug.data.words import compared_words
from replug.evals.loop import Item, Task

MOST_WORDS, LEAST_WORDS = 13, 8  # of an n-gram
MOST_SOURCES = 1 << 20  # that are counted; in a larger corpus words must stand in half as many documents to be common
SOURCE, EQUAL, NGRAM = "source", "equal text", "n-gram"
REASONS = (SOURCE, EQUAL, NGRAM)


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Why examples are in the corpus, by their ids; those that are not are left out.

    `num_with_source` of `num_examples` name a source, and `num_short` are too short for n-grams. `num_own` examples
    come from the source of a document; with `excludes_own` such documents count for nothing, since the example cannot
    retrieve them.
    """

    reasons: Mapping[str, Sequence[str]]
    num_examples: int
    num_with_source: int
    num_short: int
    num_own: int = 0
    excludes_own: bool = False

    def of(self, ids: Sequence[str]) -> np.ndarray:
        """Return whether the corpus holds each example, [N]."""
        return np.array([identifier in self.reasons for identifier in ids], dtype=bool)


class _Rows:
    """The n-grams of examples, by row, and the documents that hold them."""

    def __init__(self, n: int, hashes: Sequence[tuple[np.ndarray, int]]) -> None:
        self._n, self._given = n, hashes
        together = np.concatenate([np.empty(0, np.uint64), *(some for some, _ in hashes)])
        of = np.repeat(np.array([row for _, row in hashes], np.int64), [len(some) for some, _ in hashes])
        order = np.argsort(together, kind="stable")
        self._hashes, self._rows = together[order], of[order]
        self._num_holding: Counter[int] = Counter()  # documents that hold a hash
        self._found: dict[int, set[int]] = {}  # rows that a hash was found for

    def find(self, text: str, is_own: Callable[[int], bool]) -> None:
        """Look for a document's n-grams; those of rows that it is the own source of count for nothing."""
        hashes = ngram_hashes(text, self._n)
        for known in np.unique(hashes[is_known(hashes, self._hashes)]).tolist():
            self._num_holding[known] += 1
            first, last = (np.searchsorted(self._hashes, np.uint64(known), side) for side in ("left", "right"))
            rows = self._found.setdefault(known, set())
            rows.update(row for row in self._rows[first:last].tolist() if not is_own(row))

    def rows(self, common_from: int) -> set[int]:
        """Return the rows with an n-gram that was found, apart from those that so many documents hold."""
        common = sorted(known for known, count in self._num_holding.items() if count >= common_from)
        among = np.array(common, np.uint64)
        own = ((row, without_common(hashes, self._n, among).tolist()) for hashes, row in self._given)
        return {row for row, hashes in own if any(row in self._found.get(one, ()) for one in hashes)}


def find_overlaps(
    examples: Sequence[Item],
    texts: Sequence[Sequence[str]],
    documents: Iterable[Document],
    excludes_own: bool = False,
) -> Overlaps:
    """Compare every example with every document. `texts` are those of each example that no document should hold."""
    by_source: dict[str, list[int]] = {}
    by_text: dict[bytes, list[int]] = {}
    hashes: dict[int, list[tuple[np.ndarray, int]]] = {}
    num_short = 0
    for row, (example, own) in enumerate(zip(examples, texts, strict=True)):
        if example.source:
            by_source.setdefault(example.source, []).append(row)
        is_short = True
        for text in own:
            by_text.setdefault(content_hash(text), []).append(row)
            n = min(MOST_WORDS, len(compared_words(text)))
            if n >= LEAST_WORDS:
                hashes.setdefault(n, []).append((ngram_hashes(text, n), row))
                is_short = False
        num_short += is_short
    by_ngram = [_Rows(n, some) for n, some in hashes.items()]
    found: dict[str, set[int]] = {reason: set() for reason in REASONS}
    sources: set[int] = set()
    for document in documents:
        if len(sources) < MOST_SOURCES:
            sources.add(hash64(document.source))

        def is_own(row: int, source: str = document.source) -> bool:
            return excludes_own and examples[row].source == source

        found[SOURCE].update(by_source.get(document.source, ()))
        equal = by_text.get(content_hash(document.text), ())
        found[EQUAL].update(row for row in equal if not is_own(row))
        for ngrams in by_ngram:
            ngrams.find(document.text, is_own)
    for ngrams in by_ngram:
        found[NGRAM] |= ngrams.rows(common_from(len(sources)))
    counted = REASONS[1:] if excludes_own else REASONS
    reasons = {e.id: [reason for reason in counted if row in found[reason]] for row, e in enumerate(examples)}
    return Overlaps(
        reasons={name: some for name, some in reasons.items() if some},
        num_examples=len(examples),
        num_with_source=sum(bool(example.source) for example in examples),
        num_short=num_short,
        num_own=len(found[SOURCE]),
        excludes_own=excludes_own,
    )


def overlap_counts(overlaps: Overlaps, ids: Sequence[str]) -> dict[str, int]:
    """Count the examples that are in the corpus, by reason."""
    own = [overlaps.reasons[identifier] for identifier in ids if identifier in overlaps.reasons]
    return {reason: sum(reason in reasons for reasons in own) for reason in REASONS}


def overlap_line(overlaps: Overlaps, ids: Sequence[str]) -> str:
    """Return what a reader of the table must know."""
    num, counts = int(overlaps.of(ids).sum()), overlap_counts(overlaps, ids)
    names = {EQUAL: "an equal text", NGRAM: f"{MOST_WORDS} words in a row"}
    if overlaps.num_with_source and not overlaps.excludes_own:
        names = {SOURCE: "source", **names}
    by = ", ".join(f"{counts[reason]} by {name}" for reason, name in names.items())
    lines = [f"In the corpus: {num} of {len(ids)} examples ({num / len(ids):.1%}): {by}."]
    if overlaps.excludes_own:
        lines.append(
            f"Documents of an example's own source are not retrieved, and not compared: {overlaps.num_own} of "
            f"{overlaps.num_examples} have some."
        )
    elif not overlaps.num_with_source:
        lines.append("Sources are not compared: no example names one.")
    elif overlaps.num_with_source < overlaps.num_examples:
        lines.append(f"{overlaps.num_with_source} of {overlaps.num_examples} examples name a source.")
    if overlaps.num_short:
        lines.append(f"{overlaps.num_short} have fewer than {LEAST_WORDS} words: only documents equal to them count.")
    return " ".join(lines)


def overlaps_with(config: EvaluationConfig, corpus: Corpus, task: Task, path: Path) -> Overlaps:
    """Compare every example of a task with the corpus, or read what the file has of the same comparison."""
    texts = [task.compared(row) for row in range(len(task.examples))]
    compared = [[example.id, own, example.source] for example, own in zip(task.examples, texts, strict=True)]
    rule = [MOST_WORDS, LEAST_WORDS, LEAST_COMMON]
    inputs = json.dumps([compared, corpus.corpus_sha256, config.exclude_own_source, *rule])
    digest = hashlib.sha256(inputs.encode()).hexdigest()
    kept = read_json(path, "remove it") if path.is_file() else None
    if kept is not None and kept.pop("digest", None) == digest:
        return Overlaps(**kept)
    progress = Progress("comparing with the corpus", len(corpus.corpus))

    def documents() -> Iterator[Document]:
        for document in corpus.corpus.iterate():
            yield document
            progress.advance()

    found = find_overlaps(task.examples, texts, documents(), config.exclude_own_source)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"digest": digest, **asdict(found)})
    return found


def write_leakage(path: Path, overlaps: Overlaps, ids: Sequence[str]) -> None:
    """Write the share of the results' examples that the corpus holds, how many for each reason, and which."""
    own = {identifier: overlaps.reasons[identifier] for identifier in ids if identifier in overlaps.reasons}
    said = {name: value for name, value in asdict(overlaps).items() if name not in ("reasons", "num_examples")}
    counts = overlap_counts(overlaps, ids)
    write_json(path, {"n": len(ids), "share": len(own) / len(ids), "by": counts, **said, "examples": own})
