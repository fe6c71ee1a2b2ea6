"""Choose the documents that the LM scores for an example: the retriever's nearest, BM25's, random ones.

With `label.hits` the user's own candidates stand in the place of the nearest.

A search skips documents that an earlier search gave, so every example has equally many. Each candidate keeps which
search found it, and its rank there.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.config.schema import Config, LabelConfig
from replug.data.judgements import read_run
from replug.data.records import Example
from replug.data.store import CorpusStore, ExampleStore, PreparedSet, StoredCorpus
from replug.index_workers.bm25 import search_bm25, without_words
from replug.index_workers.service import IndexService
from replug.index_workers.vectors import BlockVectors
from replug.models.encoder import Encoder, require_finite_vectors

log = logging.getLogger(__name__)

DENSE, BM25, RANDOM, HITS = range(4)  # places in `data.labels.SEARCHES`
SMALL = 4096  # documents of a corpus that is drawn from in one permutation
TEXTS_PER_SEARCH = 256
ROWS = "rows"  # of label.hits: the candidates that the examples bring
Allowed = Callable[[int, np.ndarray], np.ndarray]  # of a text's row: which of these documents it may have


@dataclass(frozen=True, slots=True)
class Candidates:
    """Holds documents [N, K] of N texts, which search gave each, and at which rank from 1."""

    doc_rows: np.ndarray
    found_by: np.ndarray
    ranks: np.ndarray


class TooFewFound(ValueError):
    """BM25 found too few documents that are new."""


def mix_candidates(
    wanted: LabelConfig,
    *,
    dense: np.ndarray,
    bm25: np.ndarray,
    num_documents: int,
    seed: int,
    allowed: Allowed,
    spare: np.ndarray | None = None,
) -> Candidates:
    """Return the candidates of every text, by what searches gave, best first: [N, dense], the others [N, any number].

    BM25 gives -1 where no more documents share a word with a text; the nearest of `spare` [N, dense + bm25] then stand
    in. Raises TooFewFound where a deeper search of BM25 may give what is missing, ValueError where the corpus has too
    few documents that a text may have.
    """
    total = wanted.dense + wanted.bm25 + wanted.random
    texts = []
    for row in range(len(dense)):
        others = partial(_others, allowed=partial(allowed, row))
        nearest = dense[row][: wanted.dense].tolist()
        shared = bm25[row][bm25[row] >= 0]
        by_bm25, bm25_ranks = others([shared], wanted.bm25, {*nearest})
        missing = wanted.bm25 - len(by_bm25)
        if missing and len(shared) == bm25.shape[1]:
            raise TooFewFound(f"BM25 gave {len(by_bm25)} new documents, {wanted.bm25} are wanted")
        offered = [] if spare is None else [spare[row]]
        next_nearest, next_ranks = others(offered, missing, {*nearest, *by_bm25})
        drawn = _drawn(num_documents, wanted.random, np.random.default_rng([seed, row]))
        random, _ = others(drawn, wanted.random, {*nearest, *by_bm25, *next_nearest})
        found = [*nearest, *by_bm25, *next_nearest, *random]
        if len(found) < total:
            raise ValueError(f"the corpus has {num_documents} documents, too few for {total} candidates of a text")
        ranks = [*range(1, len(nearest) + 1), *bm25_ranks, *next_ranks, *range(1, len(random) + 1)]
        counts = [len(nearest), len(by_bm25), len(next_nearest), len(random)]
        texts.append((np.array(found), np.repeat([DENSE, BM25, DENSE, RANDOM], counts), np.array(ranks)))
    return Candidates(*(np.stack(column) for column in zip(*texts, strict=True)))


def any_document(row: int, doc_rows: np.ndarray) -> np.ndarray:
    """Allow all."""
    return np.ones(len(doc_rows), bool)


def other_sources(sources_of: Callable[[np.ndarray], list[str]], exclude: Sequence[str | None]) -> Allowed:
    """Allow what is not of the text's own source."""

    def allowed(row: int, doc_rows: np.ndarray) -> np.ndarray:
        return np.array([source != exclude[row] for source in sources_of(doc_rows)], bool)

    return allowed


def _others(
    offered: Iterable[np.ndarray], count: int, taken: set[int], allowed: Callable[[np.ndarray], np.ndarray]
) -> tuple[list[int], list[int]]:
    """Return the first `count` documents that are not taken and are allowed, and their ranks in the offers, from 1."""
    chosen: dict[int, int] = {}
    place = 0
    for rows in offered if count else ():
        for doc, is_allowed in zip(rows.tolist(), allowed(rows).tolist(), strict=True):
            place += 1
            if is_allowed and doc not in taken and doc not in chosen:
                chosen[doc] = place
            if len(chosen) == count:
                return list(chosen), list(chosen.values())
    return list(chosen), list(chosen.values())


def _drawn(num_documents: int, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield random documents, a few at a time: all of a small corpus in a random order, of a large one without end."""
    if num_documents <= SMALL:
        yield rng.permutation(num_documents)
        return
    while True:
        yield rng.integers(num_documents, size=2 * count)


def find_candidates(
    config: Config, data: PreparedSet, index: IndexService, encoder: Encoder, store: ExampleStore
) -> tuple[Candidates, np.ndarray]:
    """Return the candidates of all texts and their similarities [N, K] float32 to `encoder`'s queries.

    Index version 0 is that of `encoder`.
    """
    label, corpus, examples = config.label, data.corpus, store.examples()
    depth = label.dense + label.bm25
    if len(corpus) < (total := depth + label.random):
        raise UserError(f"label: {total} candidates of a text are wanted, but the corpus has {len(corpus)}")
    exclude = [example.source for example in examples] if config.retrieve.exclude_own_source else None
    vectors = _query_vectors(examples, encoder)
    given = None if label.hits is None else hits_of(label, corpus, examples)
    mix = partial(
        mix_candidates,
        label,
        dense=_nearest(index, vectors, label.dense, exclude) if given is None else given,
        num_documents=len(corpus),
        seed=config.seed,
        allowed=any_document if exclude is None else other_sources(corpus.sources, exclude),
    )
    candidates = None
    while candidates is None:
        bm25, spare = np.empty((len(examples), 0), np.int64), None
        if label.bm25:
            queries = [example.query for example in examples]
            rows, scores = search_bm25(partial(_texts, corpus), queries, min(depth, len(corpus)))
            if problem := without_words(scores):
                raise UserError(f"label.bm25: {problem}; expected label.bm25=0 for this corpus")
            bm25 = np.where(scores > 0, rows, -1)
            if (bm25 < 0).any():
                spare = _nearest(index, vectors, label.dense + label.bm25, exclude)
        try:
            candidates = mix(bm25=bm25, spare=spare)
        except TooFewFound as error:
            if depth >= len(corpus):
                raise UserError(f"label.bm25: {error}; expected a larger corpus, or fewer") from error
            depth *= 2
    if label.hits is not None:
        candidates.found_by[:, : label.dense] = HITS
    wanted, given_by_bm25 = label.bm25 * len(examples), int((candidates.found_by == BM25).sum())
    if given_by_bm25 < wanted:
        log.info(
            f"{wanted - given_by_bm25:,} of {wanted:,} candidates of BM25 are the next nearest documents instead: no "
            "more documents share a word with their texts"
        )
    plan = index.store.plan(0)
    take = BlockVectors(0, index.store.open_vectors(plan, range(plan.num_files)), plan.dim).take
    if isinstance(corpus, StoredCorpus):
        take = partial(corpus.vectors, similarity=encoder.similarity)
    return candidates, similarities(vectors, candidates.doc_rows, take)


def hits_of(label: LabelConfig, corpus: CorpusStore, examples: Sequence[Example]) -> np.ndarray:
    """Return the rows [N, label.dense] of the documents that each example's row, or the run `label.hits`, ranks first.

    Raises UserError for an example with fewer, and for a document that the corpus does not have.
    """
    run = None if label.hits == ROWS else read_run(Path(str(label.hits)).expanduser())
    given = [example.candidates if run is None else run.get(example.id, ()) for example in examples]
    for example, documents in zip(examples, given, strict=True):
        if len(documents) < label.dense:
            raise UserError(
                f"label.hits: {label.hits} has {len(documents)} candidates of text {example.id}; expected label.dense="
                f"{label.dense} or more"
            )
    rows_of = corpus.rows_of(document for documents in given for document in documents[: label.dense])
    for example, documents in zip(examples, given, strict=True):
        if unknown := [document for document in documents[: label.dense] if document not in rows_of]:
            raise UserError(
                f"label.hits: document {unknown[0]} of text {example.id} is not in the corpus; expected ids of "
                "data.corpus, which may be the same rows"
            )
    rows = [[rows_of[document] for document in documents[: label.dense]] for documents in given]
    return np.array(rows, np.int64).reshape(len(examples), label.dense)


def _query_vectors(examples: list[Example], encoder: Encoder) -> np.ndarray:
    """Return vectors [N, D], computed a few texts at a time."""
    parts = []
    for start in range(0, len(examples), TEXTS_PER_SEARCH):
        batch = examples[start : start + TEXTS_PER_SEARCH]
        parts.append(encoder.encode_query([example.query for example in batch]).numpy())
        require_finite_vectors(parts[-1], [example.id for example in batch])
    return np.concatenate(parts)


def _nearest(index: IndexService, vectors: np.ndarray, k: int, exclude: list[str | None] | None) -> np.ndarray:
    """Return the rows [N, k] of the nearest documents that are not of the text's own source."""
    if not k:
        return np.empty((len(vectors), 0), np.int64)
    parts = []
    for start in range(0, len(vectors), TEXTS_PER_SEARCH):
        part = slice(start, start + TEXTS_PER_SEARCH)
        parts.append(index.search(0, vectors[part], k, None if exclude is None else exclude[part]).doc_rows)
    return np.concatenate(parts)


def similarities(queries: np.ndarray, doc_rows: np.ndarray, take: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return inner products [N, K] float32 of query vectors [N, D] and the stored ones of their documents."""
    parts = []
    for start in range(0, len(queries), TEXTS_PER_SEARCH):
        some = slice(start, start + TEXTS_PER_SEARCH)
        documents = take(doc_rows[some]).astype(np.float64)
        parts.append(np.einsum("bd,bkd->bk", queries[some].astype(np.float64), documents))
    return np.concatenate(parts).astype(np.float32)


def _texts(corpus: CorpusStore) -> Iterator[str]:
    return (document.text for document in corpus.iterate())
