"""One side of a retriever: the modules that make vectors of queries or of documents, with their tokenizer and prompt.

Texts are tokenized here and not by sentence-transformers, so that ids may be kept for a corpus. Batches hold texts of
similar length within a budget of padded tokens, and follow from the texts alone. Modules behind the transformer compute
in float32.

A tokenizer reads all that it does not know as one token, and so as one vector: a WordPiece vocabulary of English reads
a Thai text, which writes no word apart, as a single unknown token. Encoders that know too little are named or refused.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replug.config.errors import UserError
from replug.data.store import CorpusStore, PreparedSet
from replug.data.tokenizing import TokenIds, cut_ids
from replug.models.batching import padded_length, token_budget_batches
from replug.models.black_box_lm import require_texts
from replug.models.encoder_files import KEY, in_words, most_tokens
from replug.models.hardware import to_device
from replug.models.model_files import warn_once

if TYPE_CHECKING:
    from replug.models.encoder import Encoder

WORTH_A_WORD, MOST = 0.1, 0.5  # shares of the tokens
TEXTS = {"query": "queries", "document": "documents"}  # of a task
LEAST_TOKENS = 1000  # of a real vocabulary: a stand-in's knows the words of its own texts alone
NUM_TEXTS = 256  # of a corpus, evenly spread


class Side:
    """Makes vectors of the texts of a `task`, "query" or "document", each behind `prompt`.

    `modules` are a Transformer, a Pooling, and what follows.
    """

    def __init__(self, task: str, modules: Sequence[nn.Module], prompt: str) -> None:
        self.task, self.modules, self.prompt = task, list(modules), prompt

    @property
    def backbone(self) -> PreTrainedModel:
        transformer: Any = self.modules[0]
        return transformer.model

    @property
    def exact_modules(self) -> list[nn.Module]:
        """Return what computes in float32, whatever the transformer does."""
        return self.modules[1:]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        transformer: Any = self.modules[0]
        return transformer.tokenizer

    @property
    def token_rule(self) -> TokenIds:
        """Return how texts become token ids, for those who make them without the encoder."""
        rules = self.tokenizer.backend_tokenizer.to_str()
        return TokenIds(rules, self.max_tokens, self.backbone.config.vocab_size, self.prompt)

    @property
    def most_tokens(self) -> int:
        """Return how many tokens of a text the model can read."""
        return most_tokens(self.backbone)

    @property
    def max_tokens(self) -> int:
        """Return how many tokens of a text are read, its prompt included."""
        return int(self.tokenizer.model_max_length)

    @max_tokens.setter
    def max_tokens(self, most: int) -> None:
        self.tokenizer.model_max_length = most

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def device_kind(self) -> str:
        """Return "cpu" or "cuda", by which sizes of passes differ."""
        return "cpu" if self.device.type == "cpu" else "cuda"

    def describe(self, similarity: str) -> str:
        """Return the modules behind the transformer in words; cosine implies the Normalize at the end."""
        words = [in_words(module) for module in self.modules[1:]]
        return ", ".join(words[:-1] if similarity == "cosine" else words)

    def token_ids(self, texts: Sequence[str], prompt: str) -> list[np.ndarray]:
        """Return the ids of each text behind a prompt, special tokens included, cut at the token limit.

        They are uint16 if those suffice for the vocabulary, else uint32.
        """
        require_texts(texts, "texts")
        return self._tokenize(texts, prompt) if texts else []

    def unknown_share(self, ids: Sequence[np.ndarray]) -> float:
        """Return the share of unknown ones among the tokens of texts, without those that the tokenizer adds."""
        unknown, added = self._unknown_and_added()
        if unknown is None or not ids:
            return 0.0
        tokens = np.concatenate(ids)
        num = int((tokens == unknown).sum())
        num_added = np.isin(tokens, added).sum() if num else 0
        return num / max(1, len(tokens) - int(num_added))

    def _unknown_and_added(self) -> tuple[int | None, list[int]]:
        """Return the id of an unknown token (None without one, or of a stand-in) and those that are added to a text."""
        tokenizer = self.tokenizer
        unknown = tokenizer.unk_token_id if len(tokenizer) >= LEAST_TOKENS else None
        return unknown, [number for number in tokenizer.all_special_ids if number != unknown]

    def is_cut(self, text: str) -> bool:
        """Return whether only the beginning of a text, behind the prompt, is read."""
        [ids] = self._cut_ids([self.prompt + text], self.max_tokens + 1)
        return len(ids) > self.max_tokens

    def _tokenize(self, texts: Sequence[str], prompt: str) -> list[np.ndarray]:
        rows = self._cut_ids([prompt + text for text in texts], self.max_tokens)
        dtype = np.uint16 if self.backbone.config.vocab_size < 2**16 else np.uint32  # as `TokenIds.dtype`
        return [np.array(row, dtype) for row in rows]

    def _cut_ids(self, texts: list[str], max_tokens: int) -> list[list[int]]:
        def tokenize(parts: list[str]) -> list[list[int]]:
            return self.tokenizer(parts, truncation=True, max_length=max_tokens)["input_ids"]

        return cut_ids(tokenize, texts, max_tokens)

    def batches(self, ids: Sequence[np.ndarray], tokens_per_batch: int) -> Iterator[Sequence[int]]:
        """Yield rows of similar length; equal ones go by their content, so that the order given does not matter."""
        order = sorted(range(len(ids)), key=lambda row: ids[row].tobytes())
        lengths = [padded_length(len(ids[row]), self.max_tokens, self.device_kind) for row in order]
        for batch in token_budget_batches(lengths, tokens_per_batch):
            yield [order[place] for place in batch]

    def vectors(self, ids: Sequence[np.ndarray], left_out: int = 0) -> Tensor:
        """Return whole vectors [B, D] in float32 of ids that one pass holds; `left_out` are tokens of a prompt."""
        return self.forward(*self.pad(ids), left_out)

    def pad(self, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor | None]:
        """Return right-padded ids [B, T] on the device, and their mask unless no row is padded."""
        width = padded_length(max(map(len, ids)), self.max_tokens, self.device_kind)
        mask = np.arange(width) < np.array([len(row) for row in ids])[:, None]
        padding = self.tokenizer.pad_token_id or 0  # some causal models have none; any id does behind the mask
        inputs = np.full(mask.shape, padding, np.int64)
        inputs[mask] = np.concatenate(ids)
        hidden = None if mask.all() else to_device(torch.from_numpy(mask.astype(np.int64)), self.device)
        return to_device(torch.from_numpy(inputs), self.device), hidden

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, left_out: int = 0) -> Tensor:
        """Return whole vectors [B, D] for ids and mask [B, T].

        Modules behind the transformer compute in float32, under autocast and with weights in bfloat16 too.
        """
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        features = {"token_embeddings": hidden.float(), "attention_mask": mask}
        if left_out:
            features["prompt_length"] = left_out
        with torch.autocast(hidden.device.type, enabled=False):
            for module in self.modules[1:]:
                features = module(features)
        return features["sentence_embedding"]

    def left_out(self, prompt: str) -> int:
        """Return the tokens of a prompt that vectors leave out, if the folder says so."""
        is_left_out = not all(getattr(module, "include_prompt", True) for module in self.modules)
        return self._num_tokens(prompt) if is_left_out else 0

    def _num_tokens(self, prompt: str) -> int:
        """Count a prompt with special tokens before it and without the one behind a text."""
        ids = self.tokenizer(prompt)["input_ids"] if prompt else []
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids) if ids else 0

    def require_room(self) -> None:
        """Raise UserError for a prompt that leaves no token for the text."""
        if self._num_tokens(self.prompt) + 1 >= self.max_tokens:
            raise UserError(
                f"retriever.{self.task}_prompt: {self.prompt[:40]!r} fills the {self.max_tokens} tokens of a text; "
                "expected a shorter one, or more retriever.max_tokens"
            )

    @torch.inference_mode()
    def require_vector(self, similarity: str, path: str) -> int:
        """Return the numbers of a vector. Raises UserError for modules that do not make one of a text by itself."""
        try:
            padded, alone = self._vectors_of_probe()
        except (RuntimeError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{KEY}: the modules of {path} make no vector of a text ({self.describe(similarity)}): {error}"
            ) from error
        if padded.ndim != 2:
            raise UserError(f"{KEY}: {path} makes {list(padded.shape)} numbers of a text; expected one vector")
        self._require_own_vector(padded[0], alone[0], path)
        return padded.shape[1]

    def _vectors_of_probe(self) -> tuple[Tensor, Tensor]:
        """Return vectors [1, ...] of one short text, with padding and without."""
        ids = self._tokenize(["a"], "")
        inputs, mask = self.pad(ids)
        return self.forward(inputs, mask), self.forward(inputs[:, : len(ids[0])], None)

    def _require_own_vector(self, padded: Tensor, alone: Tensor, path: str) -> None:
        """Raise UserError for a model that gives a text another vector beside longer ones."""
        if torch.cosine_similarity(padded, alone, dim=0) < 0.999:
            raise UserError(
                f"{KEY}: {path} holds a {type(self.backbone).__name__}, which reads padding as text, so that a vector "
                "would depend on the other texts of its batch; expected an encoder that follows an attention mask"
            )


def query_sample(data: PreparedSet) -> list[str]:
    """Return queries of a set, evenly spread."""
    rows = np.unique(np.linspace(0, len(data.queries) - 1, NUM_TEXTS).astype(int))
    return [example.query for example in data.queries.examples(rows)]


def require_known(encoder: "Encoder", corpus: CorpusStore | None, queries: Sequence[str], path: str) -> None:
    """Raise UserError where the encoder at `path` knows fewer than half of the tokens of documents or of queries.

    Warns where it does not know a tenth.
    """
    texts: dict[str, Sequence[str]] = {"query": queries[:NUM_TEXTS]}
    if corpus is not None and corpus.url is None:  # a store gives no row before a search
        texts["document"] = corpus.embedded_texts(np.unique(np.linspace(0, len(corpus) - 1, NUM_TEXTS).astype(int)))
    for task, some in texts.items():
        share = encoder.sides[task].unknown_share(encoder.token_ids(some, task))
        if share > MOST:
            raise UserError(
                f"retriever.path: the tokenizer of {path} does not know {share:.0%} of the tokens of "
                f"{TEXTS[task]}, so unlike texts have one vector; expected an encoder of their language"
            )
        if share > WORTH_A_WORD:
            warn_once(f"the tokenizer of {path} does not know {share:.0%} of the tokens of {TEXTS[task]}")
