"""Search: each source of documents searches once for the examples of an evaluation, and a file keeps the result.

A question that is a document too (ArguAna) does not find itself.

GenRead: the LM writes a document for a question, and reads it like a retrieved one (Yu et al. 2023). The prompt and the
cut of the document follow the official code of PopQA (Mallen et al. 2023).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from replug.config.choices import Similarity
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import BM25, RANDOM, REPLUG, WITHOUT_RETRIEVER, Method
from replug.config.schema import RetrieveConfig, RetrieverConfig
from replug.data.folder import sole_writer
from replug.data.progress import Progress
from replug.data.rows import one_line
from replug.data.store import Corpus
from replug.evals.evidence import RetrievedDocuments, WrittenDocument, random_documents
from replug.evals.loop import PromptedLM, in_order
from replug.evals.questions import first_line
from replug.evals.retrieval import RECALL_DEPTH
from replug.index_workers.bm25 import search_bm25, without_words
from replug.index_workers.build import build_version, require_same_index
from replug.index_workers.build_plan import IndexState, index_folder
from replug.index_workers.exact_search import search_excluding
from replug.index_workers.local_index import LocalIndex, query_encoder_folder
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import VersionStore
from replug.models.build import load_encoder
from replug.models.encoder import Encoder, require_finite_vectors
from replug.models.encoder_side import require_known
from replug.models.ensemble_temperature import PAPER, temperature_in
from replug.models.generation import GenerationOptions
from replug.models.hardware import available_cores
from replug.models.packaged import resolve_encoder_path

log = logging.getLogger(__name__)

Find = Callable[[int], RetrievedDocuments]  # the k best documents of every example
Embed = Callable[[Encoder], np.ndarray]  # vectors [B, D] of the queries, given the encoder of the documents


def find_others(find: Find, corpus: Corpus, own: Sequence[str | None], k: int) -> RetrievedDocuments:
    """Find the k best documents outside each example's own source, or fewer if the corpus has no more."""

    def search(queries: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        found = find(min(wanted, len(corpus.corpus)))
        return found.doc_rows, found.similarities

    return RetrievedDocuments(*search_excluding(search, corpus.corpus.sources, np.empty(0), k, own, 1))


def find_all(
    config: EvaluationConfig,
    corpus: Corpus,
    queries: Sequence[str],
    methods: Sequence[Method],
    out: Path,
    *,
    own: Sequence[str | None] = (),
    texts: str = "",
) -> dict[str, RetrievedDocuments]:
    """Find rows and similarities [N, K] by source, with K enough for all its methods and for recall. Ray must run.

    `own` is the excluded source of each query. Results are kept in `out`, or in its folder `texts` for texts outside
    the evaluation.
    """
    (out / texts).mkdir(parents=True, exist_ok=True)
    found = {}
    for source in dict.fromkeys(method.source for method in methods if method.takes_from_corpus):
        needed = max(method.k for method in methods if method.source == source)
        k = min(len(corpus.corpus), max(RECALL_DEPTH, needed))
        path = out / texts / f"{source}.npz"
        if not path.exists():
            find = partial(_find, config, corpus, queries, source, out)
            of_source = find_others(find, corpus, own, k) if any(own) else find(k)
            saved = None if source in WITHOUT_RETRIEVER else temperature_in(query_folder(config, source))
            replace(of_source, temperature=saved or PAPER).save(path)
        found[source] = RetrievedDocuments.load(path)
    return found


def _find(
    config: EvaluationConfig, corpus: Corpus, queries: Sequence[str], source: str, out: Path, k: int
) -> RetrievedDocuments:
    if source == RANDOM:
        return random_documents(len(corpus.corpus), len(queries), k, config.seed)
    log.info(f"searching for {len(queries)} texts: {source}")
    if source == BM25:
        rows, scores = search_bm25(partial(_texts, corpus), queries, k)
        if problem := without_words(scores):
            raise UserError(f"methods: {problem}; expected methods without bm25 for this corpus")
        return RetrievedDocuments(rows, scores)
    path = _retriever_path(config, source)
    embed = partial(_query_vectors, queries)
    if _is_indexed(path):
        return _find_in_index(config, corpus, source, embed, k)
    keys, dims = config.retriever, config.index.dims
    own = keys if source == REPLUG else RetrieverConfig(path, max_tokens=keys.max_tokens)
    encoder = load_encoder(own, dims=dims)
    if source != REPLUG and encoder.own_similarity is None and keys.similarity is not None:
        own = replace(own, similarity=keys.similarity)
        encoder = load_encoder(own, dims=dims)
    run, root = replace(config.run_config(), retrieve=RetrieveConfig(k), retriever=own), out / "index" / source
    require_known(encoder, corpus.corpus, queries, path)
    warn_of_similarity(encoder, path, own.similarity)
    with sole_writer(root), closing(IndexService(root)) as index:
        require_same_index(run, encoder, corpus, index.store)
        build_version(run, encoder, corpus, index, IndexState(0, 0))
        result = index.search(0, embed(encoder), k)
    return RetrievedDocuments(result.doc_rows, result.similarities)


def warn_of_similarity(encoder: Encoder, path: str, given: Similarity | None) -> None:
    """Warn if the similarity differs from the one in the encoder's folder, or neither folder nor key names one."""
    used, own = encoder.similarity, encoder.own_similarity
    if given is None and own is None:
        log.warning(
            f"retriever.similarity is not given, and {path} does not say how its vectors are compared: {used} is used; "
            "REPLUG uses cosine, and Contriever and DPR were trained with dot"
        )
    elif own not in (None, used):
        log.warning(f"retriever.similarity: {used} is used, but {path} says {own}")


def _texts(corpus: Corpus) -> Iterator[str]:
    return (document.text for document in corpus.corpus.iterate())


def _query_vectors(queries: Sequence[str], encoder: Encoder) -> np.ndarray:
    """Embed queries [B, D]."""
    vectors = encoder.encode_query(queries).numpy()
    require_finite_vectors(vectors, [repr(query[:40]) for query in queries])
    return vectors


def needs_building(config: EvaluationConfig, source: str) -> bool:
    """Return whether a source is a retriever without an index in its folder."""
    return source not in WITHOUT_RETRIEVER and not _is_indexed(_retriever_path(config, source))


def _is_indexed(path: str) -> bool:
    """Return whether a retriever's path is a run directory or an index folder, with vectors of the documents."""
    return bool(VersionStore(index_folder(Path(path).expanduser())).published())


def _find_in_index(config: EvaluationConfig, corpus: Corpus, source: str, embed: Embed, k: int) -> RetrievedDocuments:
    """Search the newest version with the encoder that made it: only the queries are embedded.

    Raises UserError for a key that contradicts the index, which stores its encoder.
    """
    directory = Path(_retriever_path(config, source)).expanduser()
    index = LocalIndex(index_folder(directory), available_cores())
    plan, retriever = index.plan, config.retriever
    pairs: dict[str, tuple[object, object]] = {"index.dims": (config.index.dims, plan.dim)}
    if source == REPLUG:
        pairs["retriever.query_path"] = (retriever.query_path, None)
        for name in ("similarity", "query_prompt", "document_prompt"):
            pairs[f"retriever.{name}"] = (getattr(retriever, name), getattr(plan, name))
    for key, (given, own) in pairs.items():
        if given not in (None, own):
            raise UserError(
                f"{key} is {given}, but the index in {directory} was made with {own}; leave the key out, or name the "
                "retriever's own folder instead"
            )
    if plan.corpus_sha256 != corpus.corpus_sha256:
        raise UserError(
            f"the index in {directory} holds {plan.num_documents} documents that are not the evaluation's "
            f"{len(corpus.corpus)}; name the retriever's own folder instead (RUN_DIR/retriever, of a training run)"
        )
    log.info(f"{directory}: index version {plan.version}, from the weights of step {plan.step}")
    return RetrievedDocuments(*index.search(embed(index.query_encoder()), k))


def _retriever_path(config: EvaluationConfig, source: str) -> str:
    return config.retriever.path if source == REPLUG else config.retrievers[source]


def query_folder(config: EvaluationConfig, source: str) -> str:
    """Return the folder or hub name of a retriever's query encoder."""
    path = _retriever_path(config, source)
    if not _is_indexed(path):
        return resolve_encoder_path(path)
    root = index_folder(Path(path).expanduser()).absolute()
    store = VersionStore(root)
    return str(query_encoder_folder(root) or store.encoder_folder(store.published()[-1]))


# Documents that the LM writes ---------------------------------------------------------------------------------------

WRITING = GenerationOptions(150)  # tokens of a document
TEMPLATE = "Generate a background document from Wikipedia to answer the given question. {}"


def genread_prompt(question: str) -> str:
    """Return the prompt for writing a document."""
    return TEMPLATE.format(one_line(question))


def write_documents(lm: PromptedLM, questions: Sequence[str]) -> list[WrittenDocument]:
    """Write a document for each question that is not blank; equal questions share one. The LM's cache keeps them.

    Raises UnscorableText for a prompt that exceeds the LM's context.
    """
    distinct = list(dict.fromkeys(questions))
    progress, written = Progress("documents written by the LM", len(distinct)), dict[str, WrittenDocument]()

    def begin(question: str) -> Callable[[], WrittenDocument]:
        if not question.strip():
            return lambda: WrittenDocument(None, 0, 0)
        prompt = lm.template.fit(None, lm.template.around(lambda _: genread_prompt(question)), WRITING.max_new_tokens)
        future = lm.lm.submit_answer(prompt, WRITING)

        def finish() -> WrittenDocument:
            generated = future.result()
            text = first_line(generated.text) or None
            return WrittenDocument(text, generated.prompt_tokens, generated.num_tokens)

        return finish

    for question, document in zip(distinct, in_order(map(begin, distinct), lm.num_in_flight), strict=True):
        written[question] = document
        progress.advance()
    return [written[question] for question in questions]
