"""Tell where an encoder's tokenizer does not know the texts: all that it does not know is one token, and one vector.

A WordPiece vocabulary of English reads a Thai text, which writes no word apart, as a single unknown token.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from replug.config.errors import UserError
from replug.data.store import CorpusStore, PreparedSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from replug.models.encoder import Encoder

log = logging.getLogger(__name__)

WORTH_A_WORD, MOST = 0.1, 0.5  # shares of the tokens
TEXTS = {"query": "queries", "document": "documents"}  # of a task
LEAST_TOKENS = 1000  # of a real vocabulary: a stand-in's knows the words of its own texts alone
NUM_TEXTS = 256  # of a corpus, evenly spread
_told: set[tuple[str, str]] = set()  # tokenizers and tasks: a run loads its encoder several times


def unknown_share(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[np.ndarray]) -> float:
    """Return the share of unknown ones among the tokens of texts, without those that the tokenizer adds."""
    unknown = tokenizer.unk_token_id
    if unknown is None or not ids or len(tokenizer) < LEAST_TOKENS:
        return 0.0
    tokens = np.concatenate(ids)
    num = int((tokens == unknown).sum())
    added = np.isin(tokens, [i for i in tokenizer.all_special_ids if i != unknown]).sum() if num else 0
    return num / max(1, len(tokens) - int(added))


def warn_of_unknown(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[np.ndarray], task: str) -> None:
    """Warn once in a process of an encoder that does not know a tenth of what it reads."""
    name = tokenizer.name_or_path
    if (name, task) not in _told and (share := unknown_share(tokenizer, ids)) > WORTH_A_WORD:
        _told.add((name, task))
        log.warning(
            f"the tokenizer of {name} does not know {share:.0%} of the tokens of {TEXTS[task]}: unlike words are one "
            "to it; an encoder of their language knows them"
        )


def query_sample(data: PreparedSet) -> list[str]:
    """Return queries of a set, evenly spread."""
    rows = np.unique(np.linspace(0, len(data.queries) - 1, NUM_TEXTS).astype(int))
    return [example.query for example in data.queries.examples(rows)]


def require_known(encoder: "Encoder", corpus: CorpusStore | None, queries: Sequence[str], path: str) -> None:
    """Raise UserError where the encoder at `path` knows fewer than half of the tokens of documents or of queries."""
    texts: dict[str, Sequence[str]] = {"query": queries[:NUM_TEXTS]}
    if corpus is not None and corpus.url is None:  # a store gives no row before a search
        texts["document"] = corpus.texts(np.unique(np.linspace(0, len(corpus) - 1, NUM_TEXTS).astype(int)))
    for task, some in texts.items():
        share = unknown_share(encoder.tokenizer_of(task), encoder.token_ids(some, task))
        if share > MOST:
            raise UserError(
                f"retriever.path: the tokenizer of {path} does not know {share:.0%} of the tokens of "
                f"{TEXTS[task]}, so unlike texts have one vector; expected an encoder of their language"
            )
