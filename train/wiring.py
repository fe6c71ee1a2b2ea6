"""From a configuration to the parts of a run: one function for each part, each a thin translation."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.errors import UserError
from configs.paths import check_paths
from configs.schema import Config, LMConfig, Rerank, Swap, TooLong
from data.files import file_sha256
from data.local_pool import LocalPool
from data.prepare import Origin, Tokenizers, import_corpus, prepare_raw, prepare_rows, repair
from data.records import Window
from data.store import Corpus, PreparedSet, read_manifest
from data.tokenizing import TokenIds, word_tokenizer
from data.units import source_fingerprint
from data.work import require_same as require_same_origin
from index_workers.faiss_index import check_kind
from index_workers.kinds import IndexKind, resolve_kind
from index_workers.service import IndexService, IndexSettings
from index_workers.version_store import BuildPlan, VersionStore, weights_sha256
from models.caching_lm import CachingLM
from models.encoder import TOKENS_PER_BATCH, Encoder
from models.hardware import TOKENS_PER_PASS_GPU, resolve_dtype
from models.hf_lm import load_tokenizer
from models.http_lm import HttpLM, ServerSpec
from models.packaged import resolve_encoder_path, resolve_lm_path
from models.prompt import PromptTemplate
from models.score_cache import ScoreCache
from models.scorer_pool import LMSpec, ScorerPool
from models.server_probe import connect
from models.spending import Spending
from models.stand_in_lm import WORD
from train.pipeline import IndexState
from train.ray_pool import RayPool
from train.rerank import LIVE_OVERRETRIEVE, LiveReranker, Search

ROW_KEYS = ("corpus", "queries", "heldout")
RAW_KEYS = (
    *("source", "text_field", "id_field", "domain_field", "tokenizer", "document_tokens", "window"),
    *("num_documents", "num_queries", "num_heldout", "query_share", "heldout_share", "corpus_share"),
    *("new_text_at", "max_text_characters", "ngram_overlap"),
)


@dataclass(frozen=True, slots=True)
class Workers:
    """The two services that live beside the trainer, and how texts are put to the LM."""

    pool: ScorerPool | HttpLM
    lm: CachingLM  # round the pool
    index: IndexService
    template: PromptTemplate


def lm_source(lm: LMConfig, ledger: Path, cache: Path) -> LMSpec | HttpLM:
    """The LM before anything heavy starts: where local weights are, or the server, which is asked and probed now.

    What a server is sent is booked in `ledger`; `cache` knows it again by its probe.
    """
    if lm.url is None:
        path = str(lm.path)
        resolved = path if LMSpec(path).is_stand_in else resolve_lm_path(path)
        return LMSpec(resolved, _dtype_name(lm.dtype.value), lm.tokens_per_batch, lm.compile)
    server = connect(_server_spec(lm), Spending(ledger, lm.max_requests, lm.max_tokens_sent))
    with closing(ScoreCache(cache_path(lm, cache))) as scores:
        server.identity = scores.identity_like(str(lm.model), server.fingerprint)
    return server


def _server_spec(lm: LMConfig) -> ServerSpec:
    return ServerSpec(
        url=str(lm.url),
        model=str(lm.model),
        api=lm.api.value,
        tokenizer=resolve_lm_path(lm.tokenizer) if lm.tokenizer else None,
        api_key=os.environ.get(lm.api_key_env),
        api_key_env=lm.api_key_env,
        max_concurrency=lm.max_concurrency,
        prompts_per_request=lm.prompts_per_request,
        timeout_seconds=lm.timeout_seconds,
        max_attempts=lm.max_attempts,
    )


def cache_path(lm: LMConfig, default: Path) -> Path:
    return Path(lm.cache).expanduser() if lm.cache else default


def open_lm(lm: LMConfig, source: LMSpec | HttpLM) -> ScorerPool | HttpLM:
    """The LM at work; Ray must run where its weights are local."""
    if isinstance(source, HttpLM):
        return source
    return ScorerPool(
        source, lm.num_replicas, lm.threads_per_replica, lm.gpus_per_replica, lm.timeout_seconds, lm.max_attempts
    )


def prompt_template(lm: LMConfig, source: LMSpec | HttpLM) -> PromptTemplate:
    """How documents and texts are joined, and cut where `lm.too_long` asks for it."""
    if lm.too_long is TooLong.error or source.max_tokens is None:
        return PromptTemplate(lm.separator)
    return PromptTemplate(lm.separator, load_tokenizer(lm_tokenizer_path(lm)), source.max_tokens)


def lm_tokenizer_path(lm: LMConfig) -> str:
    """Folder or hub name of the LM's own tokenizer. Raises UserError for a server whose tokenizer is not given."""
    name = lm.tokenizer or lm.path
    if name is None:
        raise UserError("lm.tokenizer is missing; expected the server's tokenizer, whose tokens are to be counted")
    return resolve_lm_path(name)


def load_encoder(config: Config, path: str | Path | None = None) -> Encoder:
    """The retriever of the configuration, or another one of its kind."""
    folder = str(path) if path is not None else resolve_encoder_path(config.retriever.path)
    return Encoder(folder, config.retriever.similarity.value, config.retriever.max_tokens)


def encoder_location(config: Config) -> str:
    """What `load_encoder` reads by default; an absolute path where it is a folder, for processes elsewhere."""
    location = resolve_encoder_path(config.retriever.path)
    return str(Path(location).absolute()) if Path(location).exists() else location


def prepared_set(config: Config, default_out: Path) -> PreparedSet:
    """The prepared set that the configuration names, made now, or gone on with, if it is not there yet."""
    check_paths(config)
    data = config.data
    if data.prepared:
        return PreparedSet(Path(data.prepared).expanduser())
    out, origin = data_folder(config, default_out), data_origin(config)
    if (out / "manifest.json").is_file():
        prepared = PreparedSet(out)
        require_same_origin(prepared.manifest.get("origin", {}), origin, out)
        return prepared
    with preparing_pool(config) as pool:
        if data.source:
            return prepare_raw(data, config.seed, _tokenizers(config), out, origin, pool)
        files = {name: Path(getattr(data, name)).expanduser() for name in ROW_KEYS}
        return prepare_rows(**files, out=out, origin=origin, pool=pool, token_ids=_token_ids(config))


def data_folder(config: Config, default_out: Path) -> Path:
    """Where the prepared set of the configuration lies, or will."""
    folder = config.data.prepared or config.data.out
    return Path(folder).expanduser() if folder else default_out


def repair_prepared(config: Config, default_out: Path) -> None:
    """Make a finished set unfinished where it is damaged, so that `prepared_set` makes the damaged files again."""
    check_paths(config)
    out = data_folder(config, default_out)
    if (out / "manifest.json").is_file() and not config.data.prepared:
        origin = data_origin(config)
        require_same_origin(read_manifest(out).get("origin", {}), origin, out)
        repair(out, origin)


def data_origin(config: Config) -> Origin:
    """What a prepared set follows from: the keys, and hashes of the files."""
    data = config.data
    if data.source:
        origin = {**_data_keys(config, RAW_KEYS), "seed": config.seed, **_tokenizer_key(config)}
        found = source_fingerprint(data.source)
        return {**origin, "data.source (files)": found} if found else origin
    files = {name: Path(getattr(data, name)).expanduser() for name in ROW_KEYS}
    return {f"data.{name} (sha256)": file_sha256(path) for name, path in files.items()}


def preparing_pool(config: Config) -> LocalPool | RayPool:
    """Processes of this machine, or tasks of the Ray cluster that the configuration names."""
    if config.ray.address is None:
        return LocalPool(config.data.num_workers)
    return RayPool(config, config.data.num_workers)


def corpus_to_index(config: Config, default_out: Path, index_root: Path) -> Corpus:
    """The documents of the prepared set; where nothing but `data.corpus` is given, that file's."""
    data = config.data
    if data.corpus and not (data.queries or data.heldout):
        check_paths(config, corpus_only=True)
        return import_corpus(Path(data.corpus).expanduser(), index_root / "corpus")
    return prepared_set(config, default_out)


def _tokenizer_key(config: Config) -> dict[str, object]:
    """Which model's tokens the texts were cut by."""
    paths = {"lm": config.lm.tokenizer or config.lm.path, "retriever": config.retriever.path}
    name = config.data.tokenizer
    return {f"{name}.path": paths[name]} if name in paths else {}


def _data_keys(config: Config, names: tuple[str, ...]) -> dict[str, object]:
    return {f"data.{name}": getattr(config.data, name) for name in names}


def check_data(config: Config, data: PreparedSet, source: LMSpec | HttpLM) -> None:
    """What the parts must agree on, before anything heavy starts."""
    wanted = max(config.retrieve.k, config.evaluate.k)
    if len(data.corpus) < wanted:
        raise UserError(
            f"retrieve.k or evaluate.k asks for {wanted} documents, but the corpus holds {len(data.corpus)}"
        )
    windows = [*data.queries.windows(), *data.heldout.windows()]
    _check_gold(data, windows)
    if source.max_tokens is None or (config.lm.url and not config.lm.tokenizer):
        return  # no limit, or nothing to count with: a server refuses what it cannot hold
    tokenizer = load_tokenizer(source.path if isinstance(source, LMSpec) else lm_tokenizer_path(config.lm))
    if config.lm.too_long is TooLong.error:
        _check_lengths(data, windows, tokenizer, source.max_tokens, config.lm.separator)
    else:
        _check_continuations(windows, tokenizer, source.max_tokens)


@contextmanager
def start_workers(
    config: Config, source: LMSpec | HttpLM, data: PreparedSet, index_root: Path, scores: Path
) -> Iterator[Workers]:
    """LM behind its cache, and index service; Ray must run. All are stopped at the end."""
    # First: scorers may wait for room, its actors may not.
    index = IndexService(index_root, index_settings(config, data))
    pool = open_lm(config.lm, source)
    lm = CachingLM(pool, cache_path(config.lm, scores))
    try:
        yield Workers(pool, lm, index, prompt_template(config.lm, source))
    finally:
        index.close()
        pool.close()
        lm.close()  # last: the pool's answers are stored until it is closed


def index_settings(config: Config, data: PreparedSet | None = None) -> IndexSettings:
    """With `data`, its first training texts measure every refresh."""
    index, count = config.index, config.refresh.watch_queries
    watched = data.queries.windows(range(min(count, len(data.queries)))) if data else []
    return IndexSettings(
        num_shards=index.num_shards,
        num_builders=index.num_builders,
        threads=index.threads_per_worker,
        gpus_per_builder=index.gpus_per_builder,
        gpus_per_searcher=index.gpus_per_searcher,
        max_attempts=index.max_attempts,
        timeout_seconds=index.timeout_seconds,
        blue_green=index.swap is Swap.blue_green,
        watch_texts=tuple(window.context for window in watched),
        watch_k=config.retrieve.k,
    )


def index_kind(config: Config, dim: int, num_documents: int) -> IndexKind:
    """What is built and how it is searched; raises UserError where FAISS cannot build it of so many vectors."""
    index = config.index
    stored = index.rerank is Rerank.stored
    kind = resolve_kind(index.kind, dim, num_documents, index.nprobe, stored, index.overretrieve)
    check_kind(kind, dim, num_documents)
    return kind


def publish_snapshot(
    config: Config, encoder: Encoder, data: Corpus, store: VersionStore, index: IndexState
) -> BuildPlan:
    """Write the weights as they are as a version's snapshot, and say what is to be built of them."""
    return build_plan(config, encoder, data, store, index, store.save_snapshot(index.version, encoder.save))


def build_plan(
    config: Config, encoder: Encoder, data: Corpus, store: VersionStore, index: IndexState, weights_sha256: str
) -> BuildPlan:
    kind = index_kind(config, encoder.dim, len(data.corpus))
    retrain = config.index.retrain_every is not None and index.version % config.index.retrain_every == 0
    return BuildPlan(
        version=index.version,
        step=index.step,
        weights_sha256=weights_sha256,
        corpus_path=str(data.corpus_path.absolute()),
        corpus_relative=os.path.relpath(data.corpus_path.absolute(), store.root.absolute()),
        corpus_sha256=data.corpus_sha256,
        num_documents=len(data.corpus),
        block_documents=config.index.block_documents,
        similarity=encoder.similarity,
        max_tokens=encoder.max_tokens,
        dim=encoder.dim,
        dtype=_dtype_name(config.index.dtype.value),
        tokens_per_batch=config.index.tokens_per_batch or _tokens_per_pass(config),
        kind=kind,
        num_shards=1 if kind.is_exact else config.index.num_shards,  # any number of searchers share exact vectors
        quantizer_from=None if retrain else store.latest_quantizer(kind.factory, index.version),
    )


def require_same_index(config: Config, encoder: Encoder, data: Corpus, store: VersionStore) -> None:
    """Raise UserError where version 0 of an index is of another corpus or encoder, before anything is overwritten."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        digest = weights_sha256(Path(folder))
    store.require_same_vectors(build_plan(config, encoder, data, store, IndexState(0, 0), digest))


def build_version(config: Config, encoder: Encoder, data: Corpus, index: IndexService, at: IndexState) -> None:
    """Embed, publish and load a version now, or what of it is not there yet."""
    index.build(publish_snapshot(config, encoder, data, index.store, at)).result()
    index.prepare(at.version)


def document_search(config: Config, encoder: Encoder, data: PreparedSet, index: IndexService) -> Search:
    """The index's answer, or the live encoder's order of it."""
    if config.index.rerank is not Rerank.live:
        return index.search
    return LiveReranker(index.search, encoder.encode, data.corpus, config.index.overretrieve or LIVE_OVERRETRIEVE)


def _tokens_per_pass(config: Config) -> int:
    """Of the builders; long passes keep a GPU busy, short ones stay in a processor's cache."""
    return TOKENS_PER_PASS_GPU if config.index.gpus_per_builder else TOKENS_PER_BATCH


def _dtype_name(name: str) -> str:
    return str(resolve_dtype(name)).removeprefix("torch.")


def lm_tokenizer_json(lm: LMConfig) -> str:
    """The LM's own tokenizer as JSON; the stand-in's tokens are words."""
    if lm.path and LMSpec(lm.path).is_stand_in:
        return word_tokenizer(WORD.pattern)
    return str(load_tokenizer(lm_tokenizer_path(lm)).backend_tokenizer.to_str())


def _tokenizers(config: Config) -> Tokenizers:
    """What cuts the texts, as `data.tokenizer` names it, and the retriever's."""
    name, ids = config.data.tokenizer, _token_ids(config)
    if name == "lm":
        return Tokenizers(lm_tokenizer_json(config.lm), ids)
    path = resolve_encoder_path(config.retriever.path) if name == "retriever" else resolve_lm_path(name)
    return Tokenizers(str(AutoTokenizer.from_pretrained(path).backend_tokenizer.to_str()), ids)


def _token_ids(config: Config) -> TokenIds | None:
    """How the retriever reads documents; `replug prepare` may not know it yet."""
    return load_encoder(config).token_rule if config.retriever.path else None


def _check_gold(data: PreparedSet, windows: list[Window]) -> None:
    named = {doc: window.id for window in windows for doc in window.gold}
    missing = set(named) - set(data.corpus.rows_of(named))
    if missing:
        doc = min(missing)
        raise UserError(
            f"text {named[doc]} names gold document {doc!r}, which is not in the corpus ({len(missing)} such ids)"
        )


def _check_continuations(windows: list[Window], tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
    """Documents and contexts are cut to fit, continuations never."""
    for window in windows:
        text = window.continuation
        if len(text.encode()) >= limit and len(tokenizer(text, verbose=False)["input_ids"]) >= limit:
            raise UserError(f"text {window.id}: its continuation alone fills the LM, which holds {limit} tokens")


def _check_lengths(
    data: PreparedSet, windows: list[Window], tokenizer: PreTrainedTokenizerBase, limit: int, separator: str
) -> None:
    """No document, with the longest text after it, may exceed the LM's context.

    A token is at least one byte, so only what is longer in bytes is tokenized.
    """

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    rest, longest = 0, ""
    for window in sorted(windows, key=_num_bytes, reverse=True):
        if _num_bytes(window) <= rest:
            break
        rest, longest = max((rest, longest), (count(window.context) + count(window.continuation), window.id))
    rest += count(separator) + 2
    for doc in data.corpus.iterate():
        if len(doc.text.encode()) + rest > limit and count(doc.text) + rest > limit:
            raise UserError(
                f"document {doc.id} has {count(doc.text)} tokens and text {longest} up to {rest}, but the LM "
                f"holds {limit}: cut the documents (data.source does it), take an LM with a longer context, or set "
                "lm.too_long=truncate"
            )


def _num_bytes(window: Window) -> int:
    return len((window.context + window.continuation).encode())
