"""Make or open the prepared set of a configuration.

It is in this package because texts are cut by the tokens of the LM or the retriever; `data.prepare` does the work.
"""

from pathlib import Path

from replug.config.choices import TooLong
from replug.config.errors import UserError
from replug.config.paths import check_paths
from replug.config.schema import Config, DataConfig
from replug.data.prepare.cutting import Tokenizers
from replug.data.prepare.sets import Inputs, import_corpus, prepare_raw, prepare_rows, row_inputs
from replug.data.shards import OWN_CORPUS, prepared_folder
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import source_fingerprint
from replug.data.store import Corpus, PreparedSet
from replug.data.tokenizing import TokenIds, inside_rules
from replug.models.build import lm_max_tokens, lm_tokenizer_json, load_encoder, tokens_added
from replug.models.model_files import load_tokenizer
from replug.models.packaged import resolve_lm_path

OF_THE_MODEL = 8  # tokens of an input without text: its begin and end tokens, and joints of its parts
LM_TOKENS = "lm tokens (document, example)"  # in a set's inputs: the most tokens of a piece
RETOKENIZED = 2  # a piece tokenized alone differs at its ends: at most twice the tokens that it was cut by
ROW_KEYS = ("corpus", "train", "heldout")
DEV_KEYS = ("num_dev",)  # of sets that have development texts
RAW_KEYS = (
    *("source", "fields", "tokenizer", "document_tokens", "context_tokens"),
    *("num_documents", "num_queries", "num_heldout", "query_share", "heldout_share"),
    *("new_text_at", "ngram_overlap"),
)


def prepared_set(config: Config, default_out: Path) -> PreparedSet:
    """Return the prepared set of the configuration; make or complete it if necessary."""
    check_paths(config)
    data = config.data
    if data.prepared:
        return PreparedSet(Path(data.prepared).expanduser())
    out, inputs = data_folder(config, default_out), data_inputs(config)
    if (folder := prepared_folder(out)).is_finished:
        folder.check(inputs)
        return PreparedSet(out)
    if data.source:
        _prepare_source(config, out, _row_sources(config) if data.train else None)
        return PreparedSet(out)
    rows, token_ids = _row_sources(config), _token_ids(config)
    return prepare_rows(**rows, out=out, inputs=inputs, token_ids=token_ids, fields=data.fields)


def _prepare_source(config: Config, out: Path, rows: dict[str, str] | None) -> None:
    """Cut `data.source` into a prepared set; `rows` are the user's own examples."""
    prepare_raw(config.data, config.seed, _tokenizers(config), out, data_inputs(config), rows)


def data_folder(config: Config, default_out: Path) -> Path:
    """Return the folder of the prepared set of the configuration."""
    folder = config.data.prepared or config.data.out
    return Path(folder).expanduser() if folder else default_out


def data_inputs(config: Config) -> Inputs:
    """Return the inputs of a prepared set: the keys, and hashes of the files."""
    data = config.data
    if data.source:
        keys = RAW_KEYS + (DEV_KEYS if data.num_dev else ())
        lm_path = config.lm.tokenizer or config.lm.path
        inputs: Inputs = {**{f"data.{name}": getattr(data, name) for name in keys}, "seed": config.seed}
        paths = {"lm": lm_path, "retriever": config.retriever.path}
        if data.tokenizer in paths:  # the model of the tokens that cut the texts
            inputs[f"{data.tokenizer}.path"] = paths[data.tokenizer]
        if limits := _lm_limits(config):  # the LM that must hold the pieces, and their limits in its tokens
            inputs |= {"lm.path": lm_path, LM_TOKENS: list(limits)}
        fingerprint = source_fingerprint(data.source, FieldMap.of(data.fields))
        inputs |= row_inputs(_row_sources(config)) if data.train else {}
        return {**inputs, "data.source (files)": fingerprint} if fingerprint else inputs
    return row_inputs(_row_sources(config), data.fields)


def _row_sources(config: Config) -> dict[str, str]:
    """Return the paths of the user's own rows by key."""
    names = [name for name in (*ROW_KEYS, "dev") if name != "dev" or config.data.dev]
    if config.data.source:
        names.remove("corpus")
    return {name: getattr(config.data, name) for name in names}


def corpus_to_index(config: Config, default_out: Path, index_root: Path) -> Corpus:
    """Return the documents of the prepared set; with `data.corpus` alone, the documents of that file.

    If no share of `data.source` becomes examples (`data.query_share`, `data.heldout_share`), all of it is documents.
    """
    data = config.data
    if data.corpus and not (data.train or data.heldout):
        check_paths(config, corpus_only=True)
        out = index_root / OWN_CORPUS
        return import_corpus(data.corpus, out, data.fields)
    if data.source and _is_documents_alone(data):
        out = index_root / OWN_CORPUS
        if (folder := prepared_folder(out)).is_finished:
            folder.check(data_inputs(config))
        else:
            _prepare_source(config, out, rows={})
        return Corpus(out)
    return prepared_set(config, default_out)


def _is_documents_alone(data: DataConfig) -> bool:
    return not (data.train or data.query_share or data.heldout_share)


def tokens_at_most(config: Config, prepared: PreparedSet) -> tuple[int, int] | None:
    """Return the most tokens of this LM in a document, and in a context or continuation.

    None means that the set was not cut for this LM.
    """
    inputs = prepared.inputs
    if inputs.get("lm.path") != (config.lm.tokenizer or config.lm.path):
        return None
    if inputs.get("data.tokenizer") == "lm":
        example = inputs["data.context_tokens"]
        return RETOKENIZED * (inputs["data.document_tokens"] or example), RETOKENIZED * example
    document, example = inputs[LM_TOKENS]
    return document, example


def _lm_limits(config: Config) -> tuple[int, int] | None:
    """Return the most tokens of the LM in a document, and in a context or continuation, for both to fit one input.

    None if texts are cut by the LM's own tokens, or if its longest input is unknown or unlimited.
    """
    data, limit = config.data, None if config.data.tokenizer == "lm" else lm_max_tokens(config.lm)
    if limit is None:
        return None
    room = limit - tokens_added(config.lm) - OF_THE_MODEL
    if config.lm.too_long is TooLong.truncate:
        return room, room  # prompts are cut later, except for the continuation
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
    """Return the tokenizer that cuts the texts (`data.tokenizer`), and the retriever's."""
    name, ids = config.data.tokenizer, _token_ids(config)
    if name == "lm":
        return Tokenizers(lm_tokenizer_json(config.lm), ids)
    if name == "retriever" and ids is not None:
        cut = ids.tokenizer
    else:
        cut = inside_rules(
            load_tokenizer(resolve_lm_path(name, "data.tokenizer"), "data.tokenizer").backend_tokenizer.to_str()
        )
    limits = _lm_limits(config)
    return Tokenizers(cut, ids) if limits is None else Tokenizers(cut, ids, lm_tokenizer_json(config.lm), *limits)


def _token_ids(config: Config) -> TokenIds | None:
    """Return the retriever's rule from documents to token ids; None without a retriever, as `replug prepare` allows."""
    return load_encoder(config.retriever).token_rule if config.retriever.path else None
