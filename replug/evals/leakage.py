"""What of an evaluation's examples the corpus holds: retrieval that finds it copies and predicts nothing.

An example is in the corpus where a document comes from its source, equals one of its texts (white space and case
aside), or shares as many words in a row with one, as preparing a set has it (`data.prepare.disjoint`). N-grams have 13
words (Brown et al. 2020); a text of fewer words, down to 8, is compared whole. What is compared is the task's to say:
a window with its continuation, a question, its choices, its answers.

The hashes of the examples are held in memory, and the corpus streams past once.

The overlap of an evaluation with its corpus, measured once and kept: the whole corpus is read for it.

found/overlaps.jsonl   what was found, as JSON; of other texts or documents it is measured again
leakage.json           the same of the examples that results are of
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig
from replug.data.files import read_json, write_json
from replug.data.hashing import WORD, content_hash, is_known, ngram_hashes
from replug.data.progress import Progress
from replug.data.records import Document
from replug.data.store import Corpus
from replug.evals.loop import ComparedTask, Measured

MOST_WORDS, LEAST_WORDS = 13, 8  # of an n-gram
SOURCE, EQUAL, NGRAM = "source", "equal text", "n-gram"
REASONS = (SOURCE, EQUAL, NGRAM)


@dataclass(frozen=True, slots=True)
class ComparedTexts:
    """An example: texts that no document should hold, and the text that it was cut from, where that is known."""

    id: str
    texts: tuple[str, ...]
    source: str | None


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Why examples are in the corpus, by their ids; those that are not are left out.

    `num_with_source` of `num_examples` name a source, and `num_short` are too short for n-grams. `num_named` of
    `num_documents` come from a source of another name than their own id. `num_own` examples come from the source of a
    document; with `excludes_own` such documents count for nothing, since the example cannot retrieve them.
    """

    reasons: Mapping[str, Sequence[str]]
    num_examples: int
    num_with_source: int
    num_short: int
    num_documents: int
    num_named: int
    num_own: int = 0
    excludes_own: bool = False

    def of(self, ids: Sequence[str]) -> np.ndarray:
        """Whether each example is in the corpus, [N]."""
        return np.array([identifier in self.reasons for identifier in ids], dtype=bool)


class _Rows:
    """Rows of examples by hash."""

    def __init__(self, hashes: Sequence[np.ndarray], rows: Sequence[int]) -> None:
        together = np.concatenate([np.empty(0, np.uint64), *hashes])
        of = np.repeat(np.array(rows, dtype=np.int64), [len(some) for some in hashes])
        order = np.argsort(together, kind="stable")
        self._hashes, self._rows = together[order], of[order]

    def of(self, hashes: np.ndarray) -> list[int]:
        """Of the examples that have one of them."""
        known = hashes[is_known(hashes, self._hashes)]
        if not len(known):
            return []
        known = np.unique(known)
        first, last = (np.searchsorted(self._hashes, known, side) for side in ("left", "right"))
        return [int(row) for start, end in zip(first, last, strict=True) for row in self._rows[start:end]]


@dataclass(slots=True)
class _Search:
    """The examples by what documents are looked up for, and what was found of each."""

    examples: Sequence[ComparedTexts]
    excludes_own: bool
    by_source: dict[str, list[int]] = field(default_factory=dict)
    by_text: dict[bytes, list[int]] = field(default_factory=dict)
    by_ngram: dict[int, _Rows] = field(default_factory=dict)
    num_short: int = 0
    found: dict[str, set[int]] = field(default_factory=lambda: {reason: set() for reason in REASONS})

    def __post_init__(self) -> None:
        hashes: dict[int, list[tuple[np.ndarray, int]]] = {}
        for row, example in enumerate(self.examples):
            if example.source:
                self.by_source.setdefault(example.source, []).append(row)
            lengths = [self._add(row, text, hashes) for text in example.texts]
            self.num_short += not any(lengths)
        for n, some in hashes.items():
            self.by_ngram[n] = _Rows([of for of, _ in some], [row for _, row in some])

    def _add(self, row: int, text: str, hashes: dict[int, list[tuple[np.ndarray, int]]]) -> int:
        """The words of the n-grams that the text is compared by; 0 where it has too few."""
        self.by_text.setdefault(content_hash(text), []).append(row)
        n = min(MOST_WORDS, len(WORD.findall(text.casefold())))
        if n < LEAST_WORDS:
            return 0
        hashes.setdefault(n, []).append((ngram_hashes(text, n), row))
        return n

    def look_up(self, document: Document) -> None:
        self.found[SOURCE].update(self.by_source.get(document.source, ()))
        self._note(EQUAL, self.by_text.get(content_hash(document.text), ()), document)
        for n, rows in self.by_ngram.items():
            self._note(NGRAM, rows.of(ngram_hashes(document.text, n)), document)

    def _note(self, reason: str, rows: Iterable[int], document: Document) -> None:
        self.found[reason].update(
            row for row in rows if not (self.excludes_own and self.examples[row].source == document.source)
        )


def find_overlaps(
    examples: Sequence[ComparedTexts], documents: Iterable[Document], excludes_own: bool = False
) -> Overlaps:
    """Compare every example with every document; documents are iterated once."""
    search = _Search(examples, excludes_own)
    num_documents = num_named = 0
    for document in documents:
        search.look_up(document)
        num_documents += 1
        num_named += document.source != document.id
    return Overlaps(
        reasons=dict(_reasons(search)),
        num_examples=len(examples),
        num_with_source=sum(bool(example.source) for example in examples),
        num_short=search.num_short,
        num_documents=num_documents,
        num_named=num_named,
        num_own=len(search.found[SOURCE]),
        excludes_own=excludes_own,
    )


def _reasons(search: _Search) -> Iterator[tuple[str, list[str]]]:
    counted = REASONS[1:] if search.excludes_own else REASONS
    for row, example in enumerate(search.examples):
        if own := [reason for reason in counted if row in search.found[reason]]:
            yield example.id, own


def overlap_counts(overlaps: Overlaps, ids: Sequence[str]) -> dict[str, int]:
    """How many of some examples are in the corpus, by reason."""
    own = [overlaps.reasons[identifier] for identifier in ids if identifier in overlaps.reasons]
    return {reason: sum(reason in reasons for reasons in own) for reason in REASONS}


def overlap_lines(overlaps: Overlaps, ids: Sequence[str]) -> str:
    """What a reader of the table is to know, in Markdown."""
    num, counts = int(overlaps.of(ids).sum()), overlap_counts(overlaps, ids)
    by = ", ".join(f"{counts[reason]} by {name}" for reason, name in _names(overlaps))
    lines = [f"In the corpus: {num} of {len(ids)} examples ({num / len(ids):.1%}): {by}."]
    if overlaps.excludes_own:
        lines.append(
            f"Documents of an example's own source are not retrieved, and not compared: {overlaps.num_own} of "
            f"{overlaps.num_examples} have some."
        )
    elif not overlaps.num_with_source:
        lines.append("Sources are not compared: no example names one.")
    elif overlaps.num_with_source < overlaps.num_examples or not overlaps.num_named:
        lines.append(
            f"{overlaps.num_with_source} of {overlaps.num_examples} examples name a source, and "
            f"{overlaps.num_named} of {overlaps.num_documents} documents one that is not their id."
        )
    if overlaps.num_short:
        lines.append(f"{overlaps.num_short} have fewer than {LEAST_WORDS} words: only documents equal to them count.")
    return "\n" + " ".join(lines) + "\n"


def _names(overlaps: Overlaps) -> list[tuple[str, str]]:
    names = [(EQUAL, "an equal text"), (NGRAM, f"{MOST_WORDS} words in a row")]
    compares = overlaps.num_with_source and not overlaps.excludes_own
    return [(SOURCE, "source"), *names] if compares else names


DOCUMENTS_PER_STEP = 1024


def overlaps_with(config: EvaluationConfig, corpus: Corpus, task: Measured, path: Path) -> Overlaps:
    """Of every example of a task, as the file has it where it is of the same texts and documents."""
    examples = compared_examples(task)
    digest = _digest(examples, corpus.corpus_sha256, config.exclude_own_source)
    kept = read_json(path, "remove it") if path.is_file() else None
    if kept is not None and kept.pop("digest", None) == digest:
        return Overlaps(**kept)
    progress = Progress("comparing with the corpus", len(corpus.corpus))
    found = find_overlaps(examples, _advancing(corpus, progress), config.exclude_own_source)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"digest": digest, **asdict(found)})
    return found


def compared_examples(task: Measured) -> list[ComparedTexts]:
    """What the task says of each example, or what is retrieved for."""
    says = task.compared if isinstance(task, ComparedTask) else lambda row: (task.examples[row].query,)
    return [ComparedTexts(example.id, says(row), example.source) for row, example in enumerate(task.examples)]


def write_leakage(path: Path, overlaps: Overlaps, ids: Sequence[str]) -> None:
    """Of the examples that results are of: their share in the corpus, how many for each reason, and which."""
    own = {identifier: overlaps.reasons[identifier] for identifier in ids if identifier in overlaps.reasons}
    said = {name: value for name, value in asdict(overlaps).items() if name not in ("reasons", "num_examples")}
    counts = overlap_counts(overlaps, ids)
    write_json(path, {"n": len(ids), "share": len(own) / len(ids), "by": counts, **said, "examples": own})


def _advancing(corpus: Corpus, progress: Progress) -> Iterator[Document]:
    for number, document in enumerate(corpus.corpus.iterate(), start=1):
        yield document
        if number % DOCUMENTS_PER_STEP == 0:
            progress.advance(DOCUMENTS_PER_STEP)


def _digest(examples: Sequence[ComparedTexts], corpus_sha256: str, excludes_own: bool) -> str:
    compared = [[example.id, example.texts, example.source] for example in examples]
    return hashlib.sha256(json.dumps([compared, corpus_sha256, excludes_own]).encode()).hexdigest()
