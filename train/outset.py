"""Checks before a run starts: refuse inputs that do not fit together, and log the planned stages.

A set of a paper's size has tens of millions of texts, so lengths that preparing has bounded are not counted again.
Bytes are known without reading a text and no token is shorter than a byte, so they are compared first; only longer
texts are tokenized, in batches.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from replug.config.choices import Examples, Teacher, TooLong, TrainedSide
from replug.config.errors import UserError
from replug.config.rules import OWN_LABELS, chooses_by_dev
from replug.config.schema import Config
from replug.data.progress import Stages
from replug.data.store import PreparedSet
from replug.index_workers.build import index_kind, require_store_of
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from replug.models.encoder_side import query_sample, require_known
from replug.models.lm_source import LMSource
from replug.models.pair_tokens import prompts_token_ids, text_rules
from replug.models.preparing import tokens_at_most
from replug.models.prompt import PromptTemplate
from replug.planning.stages import INDEX, LABELS, QUESTIONS_MADE, TRAINING, Counts, Stage, run_stages
from replug.train.questions import questions_folder
from replug.train.run_dir import RunDirectory
from replug.train.trained_weights import check_training

log = logging.getLogger(__name__)

BATCH_ROWS = 1024
SIDES = {TrainedSide.query: "queries", TrainedSide.documents: "documents", TrainedSide.both: "queries and documents"}


def check_data(config: Config, data: PreparedSet, source: LMSource) -> None:
    """Raise UserError if corpus, texts and LM do not fit together."""
    check_texts(config, data)
    if source.max_tokens is not None and (tokenizer := source.tokenizer()) is not None:
        _check_lengths(config, data, tokenizer, source.max_tokens)  # a server checks the lengths itself


def check_texts(config: Config, data: PreparedSet) -> None:
    """Raise UserError if corpus and texts do not fit together, whatever the LM."""
    wanted = max(config.retrieve.k, config.evaluate.k)
    if len(data.corpus) < wanted:
        raise UserError(
            f"retrieve.k or evaluate.k asks for {wanted} documents, but the corpus holds {len(data.corpus)}"
        )
    named = {doc: text for store in data.texts for doc, text in store.gold().items()}
    # Without gold documents, do not read the ids of the corpus: gigabytes for 36M documents.
    missing = set(named) - set(data.corpus.rows_of(named)) if named else None
    if missing:
        doc = min(missing)
        raise UserError(
            f"text {named[doc]} names gold document {doc!r}, which is not in the corpus ({len(missing)} such ids)"
        )
    if data.dev is not None and config.lm.score is not Teacher.logprob:
        raise UserError(
            f"{data.folder} has development texts, which are measured in bits per byte, and "
            f"lm.score={config.lm.score.value} gives none; expected a set without (data.dev=null, data.num_dev=0)"
        )


def _check_lengths(config: Config, data: PreparedSet, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
    """Require that the LM can read any document before the longest text; if texts are cut, any continuation alone.

    Raises UserError for a text or document that is too long.
    """
    cuts, bound = config.lm.too_long is TooLong.truncate, tokens_at_most(config, data)
    template = PromptTemplate(tokenizer, None, config.lm.prompt, config.lm.chat)
    between = len(prompts_token_ids(tokenizer, [template.whole("", "")])[0]) + 2
    if bound is not None:
        of_document, of_example = bound
        added = text_rules(tokenizer).num_added  # which preparing does not count
        if (of_example if cuts else of_document + 2 * of_example + 3 * added + between) < limit:
            return
    if cuts:
        for store in data.texts:  # documents and contexts are cut, continuations never
            for rows in _batches(np.flatnonzero(store.num_bytes() >= limit)):
                examples = store.examples(rows)
                continuations = prompts_token_ids(tokenizer, [example.continuation for example in examples])
                for example, ids in zip(examples, continuations, strict=True):
                    if len(ids) >= limit:
                        raise UserError(
                            f"text {example.id}: its continuation alone fills the LM, which holds {limit} tokens"
                        )
        return
    corpus = data.corpus
    if corpus.url is not None:  # the LM itself refuses a document of a store that is too long
        return
    rest, longest = _longest_text(data, tokenizer)
    rest += between
    for rows in _batches(np.flatnonzero(corpus.num_bytes() + rest > limit)):
        for row, ids in zip(rows, prompts_token_ids(tokenizer, corpus.texts(rows)), strict=True):
            if len(ids) + rest > limit:
                raise UserError(
                    f"document {corpus.documents([row])[0].id} has {len(ids)} tokens and text {longest} up to {rest}, "
                    f"but the LM holds {limit}: cut the documents (data.source does it), take an LM with a longer "
                    "context, or set lm.too_long=truncate"
                )


def _longest_text(data: PreparedSet, tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """Return the most tokens of a context with its continuation, and the id of that text; longest by bytes first."""
    most, name = 0, ""
    for store in data.texts:
        num_bytes = store.num_bytes()
        for rows in _batches(np.argsort(-num_bytes, kind="stable")):
            rows = rows[num_bytes[rows] > most]
            if not len(rows):
                break
            examples = store.examples(rows)
            contexts = prompts_token_ids(tokenizer, [example.context for example in examples])
            continuations = prompts_token_ids(tokenizer, [example.continuation for example in examples])
            rows_found = zip(contexts, continuations, examples, strict=True)
            most, name = max((most, name), *((len(c) + len(y), example.id) for c, y, example in rows_found))
    return most, name


def _batches(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), BATCH_ROWS):
        yield rows[start : start + BATCH_ROWS]


def require_trainable(config: Config, data: PreparedSet, encoder: Encoder) -> None:
    """Raise UserError if retriever and set cannot be trained as configured, before the LM scores anything."""
    if chooses_by_dev(config):
        data.require_dev()
    index_kind(config, encoder.dim, len(data.corpus))
    require_store_of(data.corpus, encoder)
    require_known(encoder, data.corpus, query_sample(data), str(config.retriever.path))
    if data.corpus.url and config.retriever.train is not TrainedSide.query:
        raise UserError(
            f"retriever.train is {config.retriever.train.value}; expected query, since data.corpus is a store with "
            "fixed vectors"
        )
    check_training(config, encoder)


def plan_stages(stages: Stages, config: Config, run: RunDirectory, data: PreparedSet) -> None:
    """Plan the stages of the run and log them with its models, unless they are planned already."""
    if stages.planned:
        return
    dev = len(data.dev) if data.dev is not None else 0
    counts = Counts(len(data.corpus), len(data.queries), dev, len(data.heldout))
    left = stages_left(config, run, run_stages(config, counts), config.train.max_steps)
    stages.plan([(of.name, {"pairs": of.pairs, "documents": of.documents, "steps": of.steps}) for of in left])
    lm = config.lm.path or f"{config.lm.model} at {config.lm.url}"
    what = f"tuning {SIDES[config.retriever.train]} of {config.retriever.path}"
    if config.train.examples is Examples.questions:
        what += f" on questions about {len(data.corpus):,} documents"
    else:
        what += (
            f" to {lm}, which is frozen, on {len(data.queries):,} training, {dev:,} development and "
            f"{len(data.heldout):,} held-out texts with {len(data.corpus):,} documents"
        )
    log.info(f"{what}\n{len(left)} stages, at most {sum(stage.pairs for stage in left):,} LM calls:")
    for number, stage in enumerate(left, 1):
        calls = f" · at most {stage.pairs:,} LM calls" if stage.pairs else ""
        log.info(f"  {number} {stage.name}: {stage.work}{calls}")


def stages_left(config: Config, run: RunDirectory, stages: list[Stage], max_steps: int) -> list[Stage]:
    """Return the unfinished stages; the training counts only its remaining steps."""
    last = next(place for place, stage in enumerate(stages) if stage.name == TRAINING)
    training, marks = stages[last], run.checkpoint_marks()
    left = 0.0 if run.fitted.is_file() else 1 - marks[-1].step / max_steps if marks else 1.0
    training = replace(training, pairs=round(left * training.pairs), steps=round(left * training.steps))
    has_labels = run.begun_with() is not None  # a run begins with its own labels
    has_index = VersionStore(run.index).is_published(0) or (config.train.labels == OWN_LABELS and has_labels)
    done = {INDEX: has_index, LABELS: has_labels, QUESTIONS_MADE: questions_folder(run.questions).is_finished}
    return [*(stage for stage in stages[:last] if not done[stage.name]), training, *stages[last + 1 :]]
