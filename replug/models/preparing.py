"""From a configuration to its prepared set, made now where it is not there yet.

It stands in this package because texts are cut by the tokens of the LM or the retriever; the work is `data.prepare`'s.
"""

import logging
from pathlib import Path

from replug.cluster.ray_cluster import RayPool
from replug.config.choices import TooLong
from replug.config.errors import UserError
from replug.config.paths import check_paths
from replug.config.schema import Config
from replug.data.files import file_sha256
from replug.data.prepare.cutting import LMBound
from replug.data.prepare.local_pool import LocalPool
from replug.data.prepare.sets import Origin, Tokenizers, import_corpus, prepare_raw, prepare_rows
from replug.data.prepare.work import require_same
from replug.data.sources.shards import source_fingerprint
from replug.data.store import Corpus, PreparedSet, read_manifest
from replug.data.tokenizing import TokenIds
from replug.models.build import lm_max_tokens, lm_tokenizer_json, load_encoder
from replug.models.model_files import load_tokenizer
from replug.models.packaged import resolve_encoder_path, resolve_lm_path

log = logging.getLogger(__name__)

OF_THE_MODEL = 8  # tokens of an input that stand for no text: those that begin or end it, and what joins its parts
LM_TOKENS = "lm tokens (document, example)"  # in a set's origin: no piece has more
RETOKENIZED = 2  # times as many tokens as it was cut by has no piece that is tokenized alone: it differs at its ends
ROW_KEYS = ("corpus", "queries", "heldout")
DEV_KEYS = ("num_dev",)  # of sets that have development texts
RAW_KEYS = (
    *("source", "text_field", "id_field", "domain_field", "tokenizer", "document_tokens", "context_tokens"),
    *("num_documents", "num_queries", "num_heldout", "query_share", "heldout_share", "corpus_share"),
    *("new_text_at", "ngram_overlap"),
)


def prepared_set(config: Config, default_out: Path) -> PreparedSet:
    """The prepared set that the configuration names, made now, or gone on with, if it is not there yet."""
    check_paths(config)
    data = config.data
    if data.prepared:
        return PreparedSet(Path(data.prepared).expanduser())
    out, origin = data_folder(config, default_out), data_origin(config)
    if (out / "manifest.json").is_file():
        require_same(read_manifest(out).get("origin", {}), origin, out)
        return PreparedSet(out)
    with preparing_pool(config) as pool:
        if data.source:
            return prepare_raw(data, config.seed, _tokenizers(config), out, origin, pool)
        return prepare_rows(**_row_files(config), out=out, origin=origin, pool=pool, token_ids=_token_ids(config))


def data_folder(config: Config, default_out: Path) -> Path:
    """Where the prepared set of the configuration lies, or will."""
    folder = config.data.prepared or config.data.out
    return Path(folder).expanduser() if folder else default_out


def data_origin(config: Config) -> Origin:
    """What a prepared set follows from: the keys, and hashes of the files."""
    data = config.data
    if data.source:
        keys = RAW_KEYS + (DEV_KEYS if data.num_dev else ())
        lm_path = config.lm.tokenizer or config.lm.path
        origin: Origin = {**{f"data.{name}": getattr(data, name) for name in keys}, "seed": config.seed}
        paths = {"lm": lm_path, "retriever": config.retriever.path}
        if data.tokenizer in paths:  # which model's tokens the texts were cut by
            origin[f"{data.tokenizer}.path"] = paths[data.tokenizer]
        if limits := _lm_limits(config):  # which LM must hold the pieces, and how many of its tokens
            origin |= {"lm.path": lm_path, LM_TOKENS: list(limits)}
        found = source_fingerprint(data.source)
        return {**origin, "data.source (files)": found} if found else origin
    return {f"data.{name} (sha256)": file_sha256(path) for name, path in _row_files(config).items()}


def _row_files(config: Config) -> dict[str, Path]:
    """The user's own rows, by what they are."""
    names = (*ROW_KEYS, *(["dev"] if config.data.dev else []))
    return {name: Path(getattr(config.data, name)).expanduser() for name in names}


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


def tokens_at_most(config: Config, prepared: PreparedSet) -> tuple[int, int] | None:
    """The most tokens of this LM in a document, and in a context or continuation, by how the set was cut.

    None where it was not cut, or by another's tokens without a bound.
    """
    origin = prepared.manifest.get("origin", {})
    if origin.get("lm.path") != (config.lm.tokenizer or config.lm.path):
        return None
    if origin.get("data.tokenizer") == "lm":
        example = origin["data.context_tokens"]
        return RETOKENIZED * (origin["data.document_tokens"] or example), RETOKENIZED * example
    document, example = origin[LM_TOKENS]
    return document, example


def _lm_limits(config: Config) -> tuple[int, int] | None:
    """The LM's tokens in a document, and in a context or continuation, that one input may hold together.

    None where texts are cut by the LM's own tokens, and where what it holds is not known or has no limit.
    """
    data, limit = config.data, None if config.data.tokenizer == "lm" else lm_max_tokens(config.lm)
    if limit is None:
        return None
    room = limit - len(config.lm.separator.encode()) - OF_THE_MODEL
    if config.lm.too_long is TooLong.truncate:
        return room, room  # all but the continuation is cut where they do not fit together
    document = data.document_tokens or data.context_tokens
    parts = document + 2 * data.context_tokens
    if room < parts:
        raise UserError(
            f"data.context_tokens, data.document_tokens: a document of {document} tokens, a context and a continuation "
            f"of {data.context_tokens} each do not fit the LM, which holds {limit}; expected shorter ones, an LM with "
            "a longer context, or lm.too_long=truncate"
        )
    return room * document // parts, room * data.context_tokens // parts


def _tokenizers(config: Config) -> Tokenizers:
    """What cuts the texts, as `data.tokenizer` names it, and the retriever's."""
    name, ids = config.data.tokenizer, _token_ids(config)
    if name == "lm":
        return Tokenizers(lm_tokenizer_json(config.lm), ids)
    path = resolve_encoder_path(config.retriever.path) if name == "retriever" else resolve_lm_path(name)
    cut = load_tokenizer(path, "data.tokenizer").backend_tokenizer.to_str()
    return Tokenizers(str(cut), ids, _lm_bound(config))


def _lm_bound(config: Config) -> LMBound | None:
    if (limits := _lm_limits(config)) is not None:
        return LMBound(lm_tokenizer_json(config.lm), *limits)
    if config.lm.path is None:
        log.warning(
            f"data.tokenizer is {config.data.tokenizer}, and what the LM can hold is not known here: a piece with very "
            "long words may have more of its tokens than it takes. Give lm.path, or a server's lm.tokenizer"
        )
    return None


def _token_ids(config: Config) -> TokenIds | None:
    """How the retriever reads documents; `replug prepare` may not know it yet."""
    return load_encoder(config.retriever).token_rule if config.retriever.path else None
