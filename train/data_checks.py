"""Check that corpus, texts and LM fit together, before anything heavy starts.

A set of a paper's size has tens of millions of texts. So lengths that preparing has bounded are not counted again.
Bytes are known without reading a text and no token is shorter than a byte, so they are compared first; only longer
texts are tokenized, in batches.
"""

import logging
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from replug.config.choices import Examples, Teacher, TooLong
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.data.store import PreparedSet
from replug.models.lm_source import LMSource
from replug.models.pair_tokens import prompts_token_ids, text_rules
from replug.models.preparing import tokens_at_most
from replug.models.prompt import PromptTemplate

log = logging.getLogger(__name__)

BATCH_ROWS = 1024


def check_data(config: Config, data: PreparedSet, source: LMSource) -> None:
    """Raise UserError if corpus, texts and LM do not fit together."""
    check_texts(config, data)
    if source.max_tokens is not None and (tokenizer := source.tokenizer()) is not None:
        _LengthCheck(config, data, tokenizer, source.max_tokens).run()  # a server refuses what it cannot hold


def check_texts(config: Config, data: PreparedSet) -> None:
    """Raise UserError if corpus and texts do not fit together, whatever the LM."""
    wanted = max(config.retrieve.k, config.evaluate.k)
    if len(data.corpus) < wanted:
        raise UserError(
            f"retrieve.k or evaluate.k asks for {wanted} documents, but the corpus holds {len(data.corpus)}"
        )
    reads_texts = config.train.examples is not Examples.questions
    if reads_texts and config.train.batch_size > (number := len(data.queries)):
        log.warning(
            f"train.batch_size is {config.train.batch_size:,}, more than the {number:,} training queries: a step reads "
            "some of them several times"
        )
    named = {doc: text for store in data.texts for doc, text in store.gold().items()}
    # Without gold documents no id of the corpus need be read, which for 36M documents are gigabytes.
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


class _LengthCheck:
    """Checks that the LM holds a document with the longest text after it; if texts are cut, a continuation alone."""

    def __init__(self, config: Config, data: PreparedSet, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._data, self._tokenizer, self._limit = data, tokenizer, max_tokens
        self._cuts = config.lm.too_long is TooLong.truncate
        self._bound = tokens_at_most(config, data)
        template = PromptTemplate(config.lm.separator, tokenizer, None, config.lm.prompt, config.lm.chat)
        self._between = len(self._ids([template.whole("", "")])[0]) + 2

    def run(self) -> None:
        """Raise UserError for a text or document that is too long."""
        if self._bound is not None:
            document, example = self._bound
            added = text_rules(self._tokenizer).num_added  # which preparing does not count
            if (example if self._cuts else document + 2 * example + 3 * added + self._between) < self._limit:
                return
        if self._cuts:
            self._check_continuations()
        elif self._data.corpus.url is None:  # the LM itself refuses a document of a store that it cannot hold
            self._check_documents()

    def _check_continuations(self) -> None:
        """Raise UserError for a continuation that fills the LM: documents and contexts are cut, continuations never."""
        for store in self._data.texts:
            for rows in _batches(np.flatnonzero(store.num_bytes() >= self._limit)):
                examples = store.examples(rows)
                for example, ids in zip(examples, self._ids([w.continuation for w in examples]), strict=True):
                    if len(ids) >= self._limit:
                        raise UserError(
                            f"text {example.id}: its continuation alone fills the LM, which holds {self._limit} tokens"
                        )

    def _check_documents(self) -> None:
        """Raise UserError for a document that exceeds the LM's context with the longest text after it."""
        rest, longest = self._longest_text()
        rest += self._between
        corpus = self._data.corpus
        for rows in _batches(np.flatnonzero(corpus.num_bytes() + rest > self._limit)):
            for row, ids in zip(rows, self._ids(corpus.texts(rows)), strict=True):
                if len(ids) + rest > self._limit:
                    raise UserError(
                        f"document {corpus.documents([row])[0].id} has {len(ids)} tokens and text {longest} up to "
                        f"{rest}, but the LM holds {self._limit}: cut the documents (data.source does it), take an LM "
                        "with a longer context, or set lm.too_long=truncate"
                    )

    def _longest_text(self) -> tuple[int, str]:
        """Return the most tokens of a context with its continuation, and whose they are; the longest by bytes first."""
        most, name = 0, ""
        for store in self._data.texts:
            num_bytes = store.num_bytes()
            for rows in _batches(np.argsort(-num_bytes, kind="stable")):
                rows = rows[num_bytes[rows] > most]
                if not len(rows):
                    break
                examples = store.examples(rows)
                contexts = self._ids([example.context for example in examples])
                continuations = self._ids([example.continuation for example in examples])
                rows_found = zip(contexts, continuations, examples, strict=True)
                most, name = max((most, name), *((len(c) + len(y), example.id) for c, y, example in rows_found))
        return most, name

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return prompts_token_ids(self._tokenizer, texts)


def _batches(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), BATCH_ROWS):
        yield rows[start : start + BATCH_ROWS]
