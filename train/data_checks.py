"""What the parts of a run must agree on, looked at before anything heavy starts."""

from transformers import PreTrainedTokenizerBase

from replug.configs.errors import UserError
from replug.configs.schema import Config, TooLong
from replug.data.records import Window
from replug.data.store import PreparedSet
from replug.models.lm_source import LMSource


def check_data(config: Config, data: PreparedSet, source: LMSource) -> None:
    """What the parts must agree on, before anything heavy starts."""
    wanted = max(config.retrieve.k, config.evaluate.k)
    if len(data.corpus) < wanted:
        raise UserError(
            f"retrieve.k or evaluate.k asks for {wanted} documents, but the corpus holds {len(data.corpus)}"
        )
    windows = [*data.queries.windows(), *data.heldout.windows()]
    _check_gold(data, windows)
    if source.max_tokens is None or (tokenizer := source.tokenizer()) is None:
        return  # no limit, or nothing to count with: a server refuses what it cannot hold
    if config.lm.too_long is TooLong.error:
        _check_lengths(data, windows, tokenizer, source.max_tokens, config.lm.separator)
    else:
        _check_continuations(windows, tokenizer, source.max_tokens)


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
