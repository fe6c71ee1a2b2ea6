"""Count the texts of a run, and list its stages with the most of each kind of work in them."""

import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from replug.config.choices import Examples, TrainedSide
from replug.config.errors import UserError
from replug.config.paths import names_store
from replug.config.refresh_policy import RefreshPolicy, refresh_policy
from replug.config.rules import BY_LM, CONTEXT, DOCUMENT, FIT, OWN_LABELS, RULE, is_live
from replug.config.schema import DEV_SHARE, Config, DataConfig, LMConfig, RetrieverConfig
from replug.data.folder import MANIFEST
from replug.data.rows import SPLIT_OF_BEIR, count_documents, count_rows, row_files
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import plan_texts, source_bytes
from replug.data.vector_stores import open_source
from replug.models.batching import padded_length
from replug.models.ensemble import can_fit

PREPARING = "prepared set"
INDEX, LABELS, TRAINING, TUNED, HELDOUT = "index", "labels", "training", "tuned retriever's search", "held-out texts"
QUESTIONS_MADE = "questions"
ROW_SPLITS = {"queries": "train", "heldout": "heldout", "dev": "dev"}  # split -> key of `data`
WRITING_CALLS = 320 + 160 + 4 * 160  # at most: development and held-out questions are written, and scored twice
BYTES_PER_TOKEN = 4.0  # of English prose; program code has about 3
SPECIAL_TOKENS = 2  # that the retriever adds to a text
LONGEST = 512  # tokens that most encoders read
CHAT_TOKENS = 30  # of a chat template round a message: 10 in ChatML, 40 in Llama 3's


@dataclass(frozen=True, slots=True)
class Counts:
    """The documents and texts of a prepared set."""

    documents: int
    queries: int
    dev: int
    heldout: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run: its description, and the most of each kind of work in it.

    The LM scores `pairs`, builders embed `documents`, and a training on labels takes `steps`; a live training is timed
    by its pairs. Preparing cuts `num_bytes` of text.
    """

    name: str
    work: str
    pairs: int = 0
    documents: int = 0
    steps: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the texts. The LM reads a document, a context and a continuation, with its template."""

    document: int
    context: int
    continuation: int
    template: int
    encoded_document: int
    encoded_query: int

    @property
    def pair(self) -> int:
        return self.document + self.context + self.continuation + self.template


def lengths(config: Config) -> Lengths:
    """Return the lengths of a configuration: texts fill them, and a token of the retriever is one of the LM."""
    context = config.data.context_tokens
    document = config.data.document_tokens or context
    encoded = (encoded_tokens(length, config.retriever) for length in (document, context))
    return Lengths(document, context, context, template_tokens(config.lm), *encoded)


def encoded_tokens(length: int, keys: RetrieverConfig) -> int:
    """Return the tokens that an encoder on a GPU computes for a text of `length` tokens."""
    most = keys.max_tokens or LONGEST
    return padded_length(min(length + SPECIAL_TOKENS, most), most, "cuda")


def template_tokens(lm: LMConfig) -> int:
    """Return the approximate number of tokens that `lm.prompt` and `lm.chat` add to a document and a context."""
    written = (lm.prompt or "").replace(DOCUMENT, "").replace(CONTEXT, "")
    return math.ceil(len(written.encode()) / BYTES_PER_TOKEN) + CHAT_TOKENS * lm.chat


# Stages -----------------------------------------------------------------------------------------------------------


def run_stages(config: Config, counts: Counts) -> list[Stage]:
    """Return the stages in order."""
    stages = _stages_of_texts(config, counts)
    if not config.data.questions:
        return stages
    by = {RULE: "by a rule", BY_LM: "by the LM"}.get(config.data.questions, f"from {config.data.questions}")
    place = 2 if config.train.labels == OWN_LABELS else 0  # behind the index and the labels
    calls = WRITING_CALLS if config.data.questions == BY_LM else 0
    return [*stages[:place], Stage(QUESTIONS_MADE, f"make questions about the documents {by}", calls), *stages[place:]]


def _stages_of_texts(config: Config, counts: Counts) -> list[Stage]:
    has_store = names_store(config.data.corpus)
    text = "ask the store of the documents" if has_store else f"embed {counts.documents:,} documents"
    index = Stage(INDEX, text, documents=0 if has_store else counts.documents)
    labels, measuring = list(_label_stages(config, counts)), _measuring(config, counts)
    if config.train.examples is Examples.questions:
        work = f"{config.train.max_steps:,} steps of {config.train.batch_size} questions"
        return [Stage(TRAINING, work, steps=config.train.max_steps), *([index] if measuring else []), *measuring]
    if is_live(config):
        steps, pairs = config.train.max_steps, config.train.batch_size * config.retrieve.k
        looks = 0 if config.data.questions else refreshes(config).num_starts + 2
        development = counts.dev * config.evaluate.k * looks
        text = f"{steps:,} steps of {config.train.batch_size} texts"
        return [index, *labels[:-1], Stage(TRAINING, text, steps * pairs + development), *measuring]
    if config.train.labels == OWN_LABELS:
        return [index, *labels, *measuring]
    return [*labels, *([index] if measuring else []), *measuring]


def preparing_stage(config: Config, counts: Counts) -> Stage | None:
    """Return the stage that cuts a source of known size; None without a source, or if its bytes are not known."""
    if (
        not config.data.source
        or (num_bytes := source_bytes(config.data.source, FieldMap.of(config.data.fields))) is None
    ):
        return None
    return Stage(PREPARING, f"cut {num_bytes / 1e9:.2g} GB into {counts.documents:,} documents", num_bytes=num_bytes)


def num_pairs(config: Config, counts: Counts) -> int:
    """Return the most pairs that the LM scores in a run."""
    return sum(stage.pairs for stage in run_stages(config, counts))


def num_candidates(config: Config) -> int:
    """Return the documents that are labelled for a text."""
    return config.label.dense + config.label.bm25 + config.label.random


def refreshes(config: Config) -> RefreshPolicy:
    """Return when a live run refreshes its index."""
    return refresh_policy(config.refresh, config.train.max_steps, trains_documents(config))


def trains_documents(config: Config) -> bool:
    """Return whether the encoder of documents learns."""
    return config.retriever.train is not TrainedSide.query


def _label_stages(config: Config, counts: Counts) -> Iterator[Stage]:
    """Yield the stages of the run's own labels and of the training on labels.

    A document that two searches find is scored once.
    """
    train = config.train
    if not train.labels:
        return
    if train.labels == OWN_LABELS:
        work = f"the LM scores {num_candidates(config)} candidates of each text"
        yield Stage(LABELS, work, (counts.queries + counts.dev) * num_candidates(config))
    passes = f"{train.epochs:g} epochs" if train.epochs else f"{train.max_steps:,} steps"
    steps = math.ceil(train.epochs * counts.queries / train.batch_size) if train.epochs else train.max_steps
    yield Stage(TRAINING, f"{passes} of {counts.queries:,} texts", steps=steps)


def _measuring(config: Config, counts: Counts) -> list[Stage]:
    """Return the stages after training: each held-out text alone, and with the documents of both retrievers."""
    is_embedded = trains_documents(config)
    documents = counts.documents if is_embedded and not names_store(config.data.corpus) else 0
    work = "embed the documents anew" if is_embedded else "find documents for the held-out texts"
    if not config.evaluate.heldout:
        return [Stage(TUNED, work, documents=documents)] if config.data.questions else []
    k, most, fitting = config.evaluate.k, config.evaluate.max_examples, 0
    if config.ensemble.temperature == FIT and can_fit(counts.dev):
        # Once before and once after; labels hold the nearest documents already.
        known = min(k, config.label.dense) if config.train.labels == OWN_LABELS else 0
        fitting = counts.dev * (2 * k - known)
    texts = counts.heldout if most is None else min(most, counts.heldout)
    return [
        Stage(TUNED, work, fitting, documents),
        Stage(HELDOUT, "compare with and without tuning", texts * (1 + 2 * k)),
    ]


# Counts -----------------------------------------------------------------------------------------------------------


def count_texts(config: Config, num_documents: int | None = None) -> tuple[Counts, bool]:
    """Return the texts of each split, and whether they are counted: else they follow from the bytes of the source.

    `num_documents` is given by the user. Raises UserError if the number of documents is not known.
    """
    data = config.data
    for folder in (data.prepared, data.out, f"{config.run_dir}/data"):
        manifest = Path(folder).expanduser() / MANIFEST if folder else None
        if manifest is not None and manifest.is_file():
            return Counts(**{"dev": 0, **json.loads(manifest.read_text())["counts"]}), True
    if data.corpus:
        return _count_rows(data, num_documents)
    num_bytes = source_bytes(data.source, FieldMap.of(data.fields)) if data.source else None
    if num_bytes is not None:
        plan_texts(data)  # raises UserError for a source that gives no set
    tokens = math.inf if num_bytes is None else num_bytes / BYTES_PER_TOKEN
    dev = DEV_SHARE if data.num_dev else 0.0
    corpus = 1 - data.query_share - data.heldout_share - dev
    rows = {split: getattr(data, key) for split, key in ROW_SPLITS.items() if data.train and getattr(data, key)}
    corpus = 1.0 if rows else corpus  # the whole source
    document, example = data.document_tokens or data.context_tokens, 2 * data.context_tokens
    most = {
        "documents": (num_documents or data.num_documents or math.inf, corpus * tokens / document),
        "queries": (data.num_queries, data.query_share * tokens / example),
        "heldout": (data.num_heldout, data.heldout_share * tokens / example),
        "dev": (data.num_dev, dev * tokens / example if dev else 0.0),
    }
    if math.isinf(min(most["documents"])):
        raise UserError("data.num_documents is not set, and there is no file to count; expected --documents N")
    counts = {split: max(int(min(numbers)), int(split != "dev")) for split, numbers in most.items()}
    if rows:
        counts |= {"dev": 0, **{split: _count(data, path, ROW_SPLITS[split]) or 0 for split, path in rows.items()}}
    return Counts(**counts), False


def _count_rows(data: DataConfig, num_documents: int | None) -> tuple[Counts, bool]:
    keys = {"documents": "corpus", **ROW_SPLITS}
    given = {"documents": num_documents}
    counted = {
        split: given.get(split) or _count(data, path, key) if (path := getattr(data, key)) else 0
        for split, key in keys.items()
    }
    counts = {split: getattr(data, f"num_{split}") if of is None else of for split, of in counted.items()}
    if counts["documents"] is None:
        raise UserError(
            f"data.corpus: {data.corpus} is a dataset of the hub and its rows are not counted; give --documents N"
        )
    return Counts(**counts), None not in counted.values()


def _count(data: DataConfig, path: str, key: str) -> int | None:
    """Count the rows of files, or the documents of a store; None for a dataset of the hub."""
    if names_store(path):
        with closing(open_source(path)) as source:
            return len(source)
    if row_files(path) is None:
        return None
    return count_documents(path, data.fields) if key == "corpus" else count_rows(path, SPLIT_OF_BEIR[key])


def known_documents(config: Config) -> int | None:
    """Return the documents of a run, counted or by the bytes of its source; None if they are not known."""
    try:
        return count_texts(config)[0].documents
    except UserError:
        return None
