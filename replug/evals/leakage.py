"""Leakage: examples in the corpus. Retrieving them means copying, not predicting.

An example is in the corpus if a document comes from its source, equals one of its texts (ignoring white space and
case), or shares an n-gram with one, as in preparing a set (`data.prepare.assembly`). N-grams have 13 words (Brown et
al. 2020); shorter texts, down to 8 words, are compared whole. An n-gram in half of the corpus's sources is no leak,
such as a footer. The task names the texts to compare: an example with its continuation, a question, its choices, its
answers.

The hashes of the examples stay in memory during one pass over the corpus. leakage.json has the result.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig
from replug.data.files import read_json, write_json
from replug.data.progress import Progress
from replug.data.records import Document
from replug.data.store import Corpus
from replug.data.words import (
    LEAST_COMMON,
    common_from,
    compared_words,
    content_hash,
    hash64,
    ngram_hashes,
    without_common,
)
from replug.evals.loop import Item, Task

MOST_WORDS, LEAST_WORDS = 13, 8  # in an n-gram
MOST_SOURCES = 1 << 20  # the largest count; in a larger corpus half of it makes an n-gram common
SOURCE, EQUAL, NGRAM = "source", "equal text", "n-gram"
REASONS = (SOURCE, EQUAL, NGRAM)


@dataclass(frozen=True, slots=True)
class Overlaps:
    """The reasons by which examples are in the corpus, by id, only for examples with a reason.

    `num_with_source` examples name a source, and `num_short` are too short for n-grams. With `excludes_own` documents
    of an example's own source are ignored, since it cannot retrieve them.
    """

    reasons: Mapping[str, Sequence[str]]
    num_with_source: int
    num_short: int
    excludes_own: bool = False

    def of(self, ids: Sequence[str]) -> np.ndarray:
        """Return whether the corpus holds each example, [N]."""
        return np.array([identifier in self.reasons for identifier in ids], dtype=bool)


def find_overlaps(
    examples: Sequence[Item],
    texts: Sequence[Sequence[str]],
    documents: Iterable[Document],
    excludes_own: bool = False,
) -> Overlaps:
    """Compare every example with every document. `texts` has, for each example, its texts to compare."""
    by_source: dict[str, list[int]] = {}
    by_text: dict[bytes, list[int]] = {}
    given: list[tuple[int, np.ndarray, int]] = []  # n, the hashes of a text's n-grams, and its row
    num_short = 0
    for row, (example, own) in enumerate(zip(examples, texts, strict=True)):
        if example.source:
            by_source.setdefault(example.source, []).append(row)
        lengths = [min(MOST_WORDS, len(compared_words(text))) for text in own]
        for text, n in zip(own, lengths, strict=True):
            by_text.setdefault(content_hash(text), []).append(row)
            if n >= LEAST_WORDS:
                given.append((n, ngram_hashes(text, n), row))
        num_short += max(lengths, default=0) < LEAST_WORDS
    rows_of: dict[int, dict[int, set[int]]] = {}  # by n and hash
    for n, hashes, row in given:
        for known in hashes.tolist():
            rows_of.setdefault(n, {}).setdefault(known, set()).add(row)
    sources_of: defaultdict[int, set[int]] = defaultdict(set)  # hash -> hashed sources with it
    holds: set[tuple[int, int]] = set()  # (row, hash of it in some document)
    matches: dict[str, set[int]] = {reason: set() for reason in REASONS}
    sources: set[int] = set()
    for document in documents:
        source = hash64(document.source)
        if len(sources) < MOST_SOURCES:
            sources.add(source)
        own_rows = set(by_source.get(document.source, ()))
        left_out = own_rows if excludes_own else set()
        matches[SOURCE] |= own_rows
        matches[EQUAL] |= set(by_text.get(content_hash(document.text), ())) - left_out
        for n, known_rows in rows_of.items():
            for known in known_rows.keys() & set(ngram_hashes(document.text, n).tolist()):
                if len(sources_of[known]) < MOST_SOURCES:
                    sources_of[known].add(source)
                holds.update((row, known) for row in known_rows[known] - left_out)
    limit = common_from(len(sources))
    common = np.array(sorted(known for known, own in sources_of.items() if len(own) >= limit), np.uint64)
    for n, hashes, row in given:
        if any((row, known) in holds for known in without_common(hashes, n, common).tolist()):
            matches[NGRAM].add(row)
    counted = REASONS[1:] if excludes_own else REASONS
    reasons = {e.id: [reason for reason in counted if row in matches[reason]] for row, e in enumerate(examples)}
    return Overlaps(
        reasons={name: some for name, some in reasons.items() if some},
        num_with_source=sum(bool(example.source) for example in examples),
        num_short=num_short,
        excludes_own=excludes_own,
    )


def overlap_line(overlaps: Overlaps, ids: Sequence[str]) -> str:
    """Return the line about leakage below the table."""
    own = [overlaps.reasons[identifier] for identifier in ids if identifier in overlaps.reasons]
    num = len(own)
    names = {EQUAL: "an equal text", NGRAM: f"{MOST_WORDS} words in a row"}
    if overlaps.num_with_source and not overlaps.excludes_own:
        names = {SOURCE: "source", **names}
    by = ", ".join(f"{sum(reason in of for of in own)} by {name}" for reason, name in names.items())
    lines = [f"In the corpus: {num} of {len(ids)} examples ({num / len(ids):.1%}): {by}."]
    if overlaps.excludes_own:
        lines.append("Documents of an example's own source are not retrieved, and not compared.")
    elif overlaps.num_with_source < len(ids):
        lines.append(f"{overlaps.num_with_source} examples name a source; the others are not compared by source.")
    if overlaps.num_short:
        lines.append(f"{overlaps.num_short} have fewer than {LEAST_WORDS} words: only documents equal to them count.")
    return " ".join(lines)


def overlaps_with(config: EvaluationConfig, corpus: Corpus, task: Task, path: Path) -> Overlaps:
    """Compare every example of a task with the corpus, or read the result of the same comparison from a file."""
    texts = [task.compared(row) for row in range(len(task.examples))]
    compared = [[example.id, own, example.source] for example, own in zip(task.examples, texts, strict=True)]
    rule = [MOST_WORDS, LEAST_WORDS, LEAST_COMMON, *Overlaps.__slots__]
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

    overlaps = find_overlaps(task.examples, texts, documents(), config.exclude_own_source)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"digest": digest, **asdict(overlaps)})
    return overlaps
