"""Leakage: examples in the corpus. Retrieving them means copying, not predicting.

An example is in the corpus if a document comes from its source, equals one of its texts (ignoring white space and
case), or shares an n-gram with one, as in preparing a set (`data.prepare.assembly`). N-grams have 13 words (Brown et
al. 2020); shorter texts, down to 8 words, are compared whole. An n-gram in half of the corpus's sources is no leak,
such as a footer. The task names the texts to compare: an example with its continuation, a question, its choices, its
answers. The hashes of the examples stay in memory during one pass over the corpus.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from replug.data.files import write_json
from replug.data.progress import Progress
from replug.data.records import Document
from replug.data.store import Corpus
from replug.data.words import common_from, compared_words, content_hash, hash64, ngram_hashes, without_common
from replug.evals.loop import Item, Task

MOST_WORDS, LEAST_WORDS = 13, 8  # in an n-gram
MOST_SOURCES = 1 << 20  # the largest count; in a larger corpus half of it makes an n-gram common
SOURCE, EQUAL, NGRAM = "source", "equal text", f"{MOST_WORDS} words in a row"

Reasons = Mapping[str, Sequence[str]]  # why an example is in the corpus, by its id


def find_overlaps(examples: Sequence[Item], texts: Sequence[Sequence[str]], documents: Iterable[Document]) -> Reasons:
    """Return the reasons by which examples are in the corpus, only for examples with a reason.

    `texts` has, for each example, its texts to compare.
    """
    equal = {content_hash(text) for own in texts for text in own}
    ngrams: list[list[tuple[int, np.ndarray]]] = []  # n, and the hashes of a text's n-grams, of each example
    known: defaultdict[int, set[int]] = defaultdict(set)  # n -> hashes
    for own in texts:
        lengths = [min(MOST_WORDS, len(compared_words(text))) for text in own]
        ngrams.append([(n, ngram_hashes(text, n)) for n, text in zip(lengths, own, strict=True) if n >= LEAST_WORDS])
        for n, hashes in ngrams[-1]:
            known[n].update(hashes.tolist())
    own_sources = {example.source for example in examples if example.source}
    met: set[str | None] = set()  # own sources of examples with documents
    sources: set[int] = set()
    holders: defaultdict[int | bytes, set[int]] = defaultdict(set)  # hash -> hashed sources of documents that hold it
    for document in documents:
        source, text_hash = hash64(document.source), content_hash(document.text)
        found: list[int | bytes] = [text_hash] if text_hash in equal else []
        for n, hashes_of_n in known.items():
            found += hashes_of_n.intersection(ngram_hashes(document.text, n).tolist())
        if document.source in own_sources:
            met.add(document.source)
        for some in (sources, *(holders[key] for key in found)):
            if len(some) < MOST_SOURCES:
                some.add(source)
    limit = common_from(len(sources))
    widely = sorted(key for key, some in holders.items() if isinstance(key, int) and len(some) >= limit)
    common, reasons = np.array(widely, np.uint64), {}
    for example, own, hashes_by_n in zip(examples, texts, ngrams, strict=True):
        rare = [key for n, hashes in hashes_by_n for key in without_common(hashes, n, common).tolist()]
        is_held = {
            SOURCE: example.source in met,
            EQUAL: any(content_hash(text) in holders for text in own),
            NGRAM: any(key in holders for key in rare),
        }
        if any(is_held.values()):
            reasons[example.id] = [reason for reason, is_one in is_held.items() if is_one]
    return reasons


def overlap_line(reasons: Reasons, num_examples: int) -> str:
    """Return the line about leakage below the table."""
    counts = Counter(reason for some in reasons.values() for reason in some)
    by = ", ".join(f"{counts[reason]} by {reason}" for reason in (SOURCE, EQUAL, NGRAM) if counts[reason])
    share = f"In the corpus: {len(reasons)} of {num_examples} examples ({len(reasons) / num_examples:.1%})"
    return f"{share}: {by}." if by else f"{share}."


def overlaps_with(corpus: Corpus, task: Task, path: Path) -> Reasons:
    """Compare every example of a task with the corpus, and write the reasons to a file."""
    progress = Progress("comparing with the corpus", len(corpus.corpus))

    def documents() -> Iterator[Document]:
        for document in corpus.corpus.iterate():
            yield document
            progress.advance()

    texts = [task.compared(row) for row in range(len(task.examples))]
    reasons = find_overlaps(task.examples, texts, documents())
    write_json(path, reasons)
    return reasons
