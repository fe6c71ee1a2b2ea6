"""Labels: candidate documents of each text with their LM scores, written once, for training without the LM.

OUT/queries.parquet, dev.parquet   the labels (`data.labels`), with inputs.json and manifest.json
OUT/scores.sqlite   the LM scores so far, unless `lm.cache` names another file; a training may read it too
OUT/index/          the corpus, embedded by the untuned retriever
OUT/lm_spent.json   requests and tokens sent to a server

Candidates are the retriever's nearest documents (with `label.hits` the user's own), BM25's and random ones. A search
skips the documents of earlier searches, so every text has the same number. Finished stages are skipped, so the same
command resumes an interrupted labelling.
"""

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replug.cluster.interruption import Interruption
from replug.config.errors import RunError, UserError
from replug.config.rules import labelling_problems
from replug.config.schema import Config, LabelConfig, LossConfig
from replug.data.files import file_sha256
from replug.data.folder import sole_writer
from replug.data.labels import TEXT_FIELDS, TOKENS, LabelOrigin, Labels, labels_folder, schema_of, write_labels
from replug.data.progress import Progress, Stages
from replug.data.records import Example
from replug.data.rows import read_run, rows_sha256
from replug.data.store import CorpusStore, ExampleStore, PreparedSet, StoredCorpus
from replug.index_workers.bm25 import search_bm25, without_words
from replug.index_workers.build import build_version, require_store_of
from replug.index_workers.build_plan import IndexState, reading_identity
from replug.index_workers.exact_search import BlockVectors
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import weights_sha256
from replug.models.black_box_lm import AsyncLM, ContinuationScore, sums_of
from replug.models.build import lm_source, load_encoder
from replug.models.encoder import Encoder, require_finite_vectors
from replug.models.encoder_side import query_sample, require_known
from replug.models.hardware import check_gpus
from replug.models.preparing import prepared_set
from replug.models.prompt import PromptTemplate
from replug.planning.stages import INDEX, LABELS
from replug.train.development import document_scores
from replug.train.outset import check_data
from replug.train.pipeline import score_in_calls
from replug.train.run_dir import RunDirectory
from replug.train.workers import Workers, start_workers

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

Scores = list[ContinuationScore] | np.ndarray  # scores of pairs [N], or their sums and numbers of tokens [N, 2]
Allowed = Callable[[int, np.ndarray], np.ndarray]  # row of a text, documents -> mask of the allowed documents

CALLS_IN_FLIGHT = 8
TEXTS_PER_SEARCH = 256
SMALL = 4096  # documents of a corpus that is drawn from in one permutation
ROWS = "rows"  # of label.hits: the candidates that the examples bring


def label(config: Config, out: Path, index: Path | None = None, stages: Stages | None = None) -> Labels:
    """Make the labels, or resume making them; finished labels of the same configuration are returned unchanged.

    The documents are embedded into `index`, by default in the folder of the labels. `stages` belong to the run that
    uses the labels.
    """
    for problem in labelling_problems(config):
        raise UserError(problem)
    check_gpus()
    index, scores, stages = index or out / "index", out / "scores.sqlite", stages or Stages()
    with sole_writer(out):
        source = lm_source(config.lm, out / "lm_spent.json", scores)
        data = prepared_set(config, RunDirectory(Path(config.run_dir).expanduser()).data)
        check_data(config, data, source)
        encoder = load_encoder(config.retriever, dims=config.index.dims)
        require_store_of(data.corpus, encoder)
        require_known(encoder, data.corpus, query_sample(data), str(config.retriever.path))
        folder = labels_folder(out)
        origin = asdict(label_origin(config, data, source.identity, encoder))
        folder.claim(origin, may_change=() if any(out.glob("*.parquet")) else origin)
        if folder.is_finished:
            log.info(f"{out} holds these labels already")
            return Labels(out)
        interruption = Interruption()
        with start_workers(config, ("index",), source, data, index, scores, interruption) as (laid_out, workers):
            with stages.stage(INDEX):
                build_version(laid_out, encoder, data, workers.index, IndexState(0, 0))
            with stages.stage(LABELS):
                _write_labels(laid_out, data, out, workers, encoder, interruption.check)
            counts = workers.lm.metrics()
            log.info(f"{counts['misses']:,.0f} pairs were scored, {counts['hits']:,.0f} were found in the cache")
        counts = {"queries": len(data.queries), "dev": len(data.dev) if data.dev is not None else 0}
        folder.finish([f"{split}.parquet" for split, count in counts.items() if count], {"counts": counts})
    return Labels(out)


def _write_labels(
    config: Config, data: PreparedSet, out: Path, workers: Workers, encoder: Encoder, check: Callable[[], None]
) -> None:
    """Find and score the candidates of each split. An existing file is complete, and is skipped."""
    for split, store in (("queries", data.queries), ("dev", data.dev)):
        path, is_dev = out / f"{split}.parquet", split == "dev"
        if store is not None and not path.is_file():
            candidates = find_candidates(config, data, workers.index, encoder, store)
            rows = label_rows(workers.lm, workers.template, data.corpus, check, store, *candidates, is_dev)
            write_labels(path, rows, schema_of(is_dev, store.has_queries))


def label_origin(config: Config, data: PreparedSet, lm: str, encoder: Encoder) -> LabelOrigin:
    """Return the origin of a configuration's labels; `lm` is the LM's identity."""
    label = config.label
    return LabelOrigin(
        lm=lm,
        too_long=config.lm.too_long.value,
        retriever=retriever_identity(encoder),
        set_sha256=file_sha256(data.folder / "manifest.json"),
        corpus_sha256=data.corpus_sha256,
        dense=label.dense,
        bm25=label.bm25,
        random=label.random,
        exclude_own_source=config.retrieve.exclude_own_source,
        seed=config.seed,
        hits=rows_sha256(label.hits) if label.hits not in (None, ROWS) else label.hits or "",
    )


def retriever_identity(encoder: Encoder) -> str:
    """Return the identity of an encoder: equal identities give equal similarities."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        reading = reading_identity(encoder.pooling, encoder.prompt("query"), encoder.prompt("document"))
        dims = f":first {encoder.dims}" if encoder.dims else ""
        return f"{weights_sha256(Path(folder))[:16]}:{encoder.similarity}:{encoder.max_tokens}{reading}{dims}"


# Candidates --------------------------------------------------------------------------------------------------------


def mix_candidates(
    wanted: LabelConfig,
    *,
    dense: np.ndarray,
    bm25: np.ndarray,
    num_documents: int,
    seed: int,
    allowed: Allowed,
    spare: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return the candidates [N, K] of every text from search results: `dense` [N, dense], `bm25` [N, any number].

    BM25 gives -1 where no more documents share a word with a text; the nearest of `spare` [N, dense + bm25] replace
    them. Returns None where a deeper search of BM25 may give the missing documents. Raises UserError where the corpus
    has too few allowed documents for a text.
    """
    total = wanted.dense + wanted.bm25 + wanted.random
    texts = []
    for row in range(len(dense)):
        chosen: dict[int, None] = dict.fromkeys(dense[row][: wanted.dense].tolist())
        of_bm25 = bm25[row][bm25[row] >= 0]
        missing = _choose(chosen, [of_bm25], wanted.bm25, row, allowed)
        if missing and len(of_bm25) == bm25.shape[1] < num_documents:
            return None
        _choose(chosen, [] if spare is None else [spare[row]], missing, row, allowed)
        drawn = _drawn(num_documents, wanted.random, np.random.default_rng([seed, row]))
        _choose(chosen, drawn, wanted.random, row, allowed)
        if len(chosen) < total:
            raise UserError(f"label: {num_documents} documents are too few for {total} candidates of a text")
        texts.append([*chosen])
    return np.array(texts, np.int64)


def _choose(chosen: dict[int, None], offered: Iterable[np.ndarray], count: int, row: int, allowed: Allowed) -> int:
    """Choose the first `count` new and allowed documents; returns the number still missing."""
    for docs in offered if count else ():
        for doc, is_allowed in zip(docs.tolist(), allowed(row, docs).tolist(), strict=True):
            if is_allowed and doc not in chosen:
                chosen[doc] = None
                count -= 1
            if not count:
                return 0
    return count


def _drawn(num_documents: int, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield random documents, a few at a time: all of a small corpus in a random order, of a large one without end."""
    if num_documents <= SMALL:
        yield rng.permutation(num_documents)
        return
    while True:
        yield rng.integers(num_documents, size=2 * count)


def find_candidates(
    config: Config, data: PreparedSet, index: IndexService, encoder: Encoder, store: ExampleStore
) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidates [N, K] of all texts and their similarities [N, K] float32 to `encoder`'s queries.

    Index version 0 belongs to `encoder`. BM25 searches deeper until every text has enough candidates.
    """
    label, corpus, examples = config.label, data.corpus, store.examples()
    if len(corpus) < (total := label.dense + label.bm25 + label.random):
        raise UserError(f"label: {total} candidates a text are requested, but the corpus has {len(corpus)} documents")
    exclude = [example.source for example in examples] if config.retrieve.exclude_own_source else None
    queries = [example.query for example in examples]
    vectors = _in_parts(len(queries), lambda part: encoder.encode_query(queries[part]).numpy())
    require_finite_vectors(vectors, [example.id for example in examples])

    def allowed(row: int, doc_rows: np.ndarray) -> np.ndarray:
        if exclude is None:
            return np.ones(len(doc_rows), bool)
        return np.array([source != exclude[row] for source in corpus.sources(doc_rows)], bool)

    def nearest(k: int) -> np.ndarray:
        """Return the rows [N, k] of the nearest documents that are not of the text's own source."""
        if not k:
            return np.empty((len(vectors), 0), np.int64)
        return _in_parts(
            len(vectors),
            lambda part: index.search(0, vectors[part], k, None if exclude is None else exclude[part]).doc_rows,
        )

    dense = nearest(label.dense) if label.hits is None else hits_of(label, corpus, examples)
    depth, candidates = label.dense + label.bm25, None
    while candidates is None:
        bm25 = _bm25(corpus, queries, depth) if label.bm25 else np.empty((len(queries), 0), np.int64)
        candidates = mix_candidates(
            label,
            dense=dense,
            bm25=bm25,
            num_documents=len(corpus),
            seed=config.seed,
            allowed=allowed,
            spare=nearest(label.dense + label.bm25) if (bm25 < 0).any() else None,
        )
        depth *= 2
    plan = index.store.plan(0)
    take = BlockVectors(0, index.store.open_vectors(plan, range(plan.num_files)), plan.dim).take
    if isinstance(corpus, StoredCorpus):
        take = partial(corpus.vectors, similarity=encoder.similarity)

    def products(part: slice) -> np.ndarray:
        documents = take(candidates[part]).astype(np.float64)
        return np.einsum("bd,bkd->bk", vectors[part].astype(np.float64), documents).astype(np.float32)

    return candidates, _in_parts(len(vectors), products)


def _bm25(corpus: CorpusStore, queries: Sequence[str], depth: int) -> np.ndarray:
    """Return the rows [N, depth] of BM25's first documents, -1 where no more share a word with the query."""
    rows, scores = search_bm25(
        lambda: (document.text for document in corpus.iterate()), queries, min(depth, len(corpus))
    )
    if problem := without_words(scores):
        raise UserError(f"label.bm25: {problem}; expected label.bm25=0 for this corpus")
    return np.where(scores > 0, rows, -1)


def _in_parts(num_texts: int, of: Callable[[slice], np.ndarray]) -> np.ndarray:
    """Return the concatenated results of a few texts at a time."""
    starts = range(0, num_texts, TEXTS_PER_SEARCH)
    return np.concatenate([of(slice(start, start + TEXTS_PER_SEARCH)) for start in starts])


def hits_of(label: LabelConfig, corpus: CorpusStore, examples: Sequence[Example]) -> np.ndarray:
    """Return the rows [N, label.dense] of the documents that each example's row, or the run `label.hits`, ranks first.

    Raises UserError for an example with fewer, and for a document that the corpus does not have.
    """
    run = None if label.hits == ROWS else read_run(Path(str(label.hits)).expanduser())
    given = [(example.candidates if run is None else run.get(example.id, ()))[: label.dense] for example in examples]
    rows_of = corpus.rows_of(document for documents in given for document in documents)
    for example, documents in zip(examples, given, strict=True):
        if len(documents) < label.dense:
            raise UserError(
                f"label.hits: {label.hits} has {len(documents)} candidates of text {example.id}; expected label.dense="
                f"{label.dense} or more"
            )
        if unknown := [document for document in documents if document not in rows_of]:
            raise UserError(
                f"label.hits: document {unknown[0]} of text {example.id} is not in the corpus; expected ids of "
                "data.corpus, which may be the same rows"
            )
    rows = [[rows_of[document] for document in documents] for documents in given]
    return np.array(rows, np.int64).reshape(len(examples), label.dense)


# Scores ------------------------------------------------------------------------------------------------------------


def label_rows(
    lm: AsyncLM,
    template: PromptTemplate,
    corpus: CorpusStore,
    check: Callable[[], None],
    store: ExampleStore,
    candidates: np.ndarray,
    similarities: np.ndarray,
    with_tokens: bool,
) -> Iterator[dict[str, Any]]:
    """Let the LM score texts after their candidates, and yield a row of the labels for each text, in order.

    With `with_tokens`, rows also hold the log-probs of tokens. `check` is called while waiting; it may raise to end the
    wait.
    """

    def load(rows: range) -> tuple[Sequence[Example], list[list[str]]]:
        return store.examples(rows), [corpus.texts(candidates[row]) for row in rows]

    submit: Callable[..., Future] = lm.submit if with_tokens else lm.submit_sums
    calls = score_in_calls(submit, template, len(store), load, CALLS_IN_FLIGHT, check)
    what, k = "development texts" if with_tokens else "training texts", candidates.shape[1]
    progress = Progress(what, len(store), work=("pairs", k))
    for rows, scores in calls:
        for place, (row, example) in enumerate(zip(rows, store.examples(rows), strict=True)):
            own = scores[place * k : (place + 1) * k]
            yield {
                **{name: getattr(example, name) for name in (*TEXT_FIELDS, "query")},
                **_score_columns(corpus, example.id, candidates[row], own),
                "similarities": similarities[row],
            }
        progress.advance(len(rows))


def _score_columns(corpus: CorpusStore, text: str, doc_rows: np.ndarray, scores: Scores) -> dict[str, Any]:
    """Return the columns of one text's scores."""
    ids = [document.id for document in corpus.documents(doc_rows)]
    sums = scores if isinstance(scores, np.ndarray) else sums_of(scores)
    _require_comparable(text, ids, sums)
    columns: dict[str, Any] = {"num_tokens": int(sums[0, 1]), "doc_ids": ids, "doc_rows": doc_rows}
    if not isinstance(scores, np.ndarray):
        columns[TOKENS] = [score.token_logprobs for score in scores]
    return {**columns, "sum_logprobs": sums[:, 0].tolist()}


def _require_comparable(text: str, documents: Sequence[str], sums: np.ndarray) -> None:
    """Raise RunError for a score that is not finite, or for different numbers of tokens within a text."""
    for document, (total, num_tokens) in zip(documents, sums.tolist(), strict=True):
        if not np.isfinite(total):
            raise RunError(
                f"the LM's score of text {text} after document {document} is {total}; expected a finite number"
            )
        if num_tokens != sums[0, 1]:
            raise RunError(
                f"the LM counts {num_tokens:.0f} tokens of text {text} after document {document}, and "
                f"{sums[0, 1]:.0f} after document {documents[0]}; expected the same tokens"
            )


# Export for other trainers -----------------------------------------------------------------------------------------


def distill_kl_rows(labels: Labels, corpus: CorpusStore, loss: LossConfig) -> "Dataset":
    """Return the training texts for sentence-transformers' `DistillKLDivLoss`: a column for each passage.

        query, passage_1, …, passage_K, label (the K teacher scores)

    Passages stand in the candidates' order. That loss divides both sides by its temperature before the softmax, so a
    score is gamma * z / beta: with `temperature=gamma` and `similarity_fct=pairwise_cos_sim` the teacher is Q and the
    student P_R (REPLUG, section 4), and the loss ours times gamma².
    """
    rows = [*labels.rows("queries")]
    columns = zip(*(corpus.texts(np.array(row["doc_rows"])) for row in rows), strict=True)
    scores = document_scores(labels.scores("queries"), loss.lm_score.value) * loss.gamma / loss.beta
    from datasets import Dataset

    passages = {f"passage_{number}": [*texts] for number, texts in enumerate(columns, 1)}
    queries = [row.get("query") or row["context"] for row in rows]  # the queries of the retrieval
    return Dataset.from_dict({"query": queries, **passages, "label": scores.astype(np.float32)})
