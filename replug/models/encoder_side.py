"""One side of a retriever: the modules that encode queries or documents, with their tokenizer and prompt.

replug tokenizes texts without sentence-transformers, so that a corpus can store its ids. Batches hold texts of similar
length within a budget of padded tokens, and follow from the texts alone. Modules behind the transformer compute in
float32.

A tokenizer reads every unknown word as one token, and so as one vector: to a WordPiece vocabulary of English a Thai
text, which has no spaces, is a single unknown token. Encoders with too many unknown tokens get a warning or an error.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from torch import Tensor, nn

from replug.config.errors import UserError
from replug.data.store import CorpusStore, PreparedSet
from replug.data.tokenizing import TokenIds, ids_of_texts, reader
from replug.models.batching import padded_length, token_budget_batches
from replug.models.black_box_lm import require_texts
from replug.models.encoder_files import KEY, NO_LIMIT, in_words
from replug.models.hardware import to_device
from replug.models.model_files import warn_once

if TYPE_CHECKING:
    from replug.models.encoder import Encoder

WORTH_A_WORD, MOST = 0.1, 0.5  # shares of the tokens
TEXTS = {"query": "queries", "document": "documents"}  # of a task
NUM_TEXTS = 256  # of a corpus, evenly spread
LEAST_TOKENS = 1000  # in a real vocabulary: a stand-in's has only the words of its texts
NUM_CHARACTERS = 2000  # of each
TOKENS_PER_PASS = 32_768  # on any device: more would take memory, fewer would take more calls
UNKNOWN = ("[UNK]", "<unk>")


class Side:
    """The encoder of texts of a `task`, "query" or "document", each behind `prompt`.

    `modules` are a Transformer, a Pooling, and any later modules; `backbone` is the model of the Transformer. The
    others, `exact_modules`, compute in float32.
    """

    def __init__(self, task: str, modules: Sequence[nn.Module], prompt: str) -> None:
        self.task, self.modules, self.prompt = task, list(modules), prompt
        self.exact_modules = [module for module in self.modules if not isinstance(module, Transformer)]
        self._first: Any = self.modules[0]
        self.backbone: Any = getattr(self._first, "model", self._first)

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a text that are read, its prompt included."""
        return int(self._first.tokenizer.model_max_length)

    @max_tokens.setter
    def max_tokens(self, most: int) -> None:
        self._first.tokenizer.model_max_length = most

    @cached_property
    def token_rule(self) -> TokenIds:
        """Return the rule from texts to token ids, for processes without the encoder."""
        rules = self._first.tokenizer.backend_tokenizer.to_str()
        return TokenIds(rules, self.max_tokens, self.backbone.config.vocab_size, self.prompt)

    @property
    def _reader(self) -> Tokenizer:
        """Return a copy of the module's tokenizer: sentence-transformers changes its padding and truncation."""
        return reader(self.token_rule)

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def device_kind(self) -> str:
        """Return "cpu" or "cuda", which set the size of passes."""
        return "cpu" if self.device.type == "cpu" else "cuda"

    def describe(self, similarity: str) -> str:
        """Return the modules behind the transformer in words; cosine implies the Normalize at the end."""
        words = [in_words(module) for module in self.exact_modules]
        return ", ".join(words[:-1] if similarity == "cosine" else words)

    def token_ids(self, texts: Sequence[str], prompt: str | None = None) -> list[np.ndarray]:
        """Return the ids of each text behind a prompt (None: the side's), special tokens included, cut at the limit.

        The ids are uint16 if the vocabulary is small enough, else uint32.
        """
        require_texts(texts, "texts")
        rule = self.token_rule if prompt is None else replace(self.token_rule, prompt=prompt)
        return ids_of_texts(rule, texts)

    def unknown_share(self, texts: Sequence[str]) -> float:
        """Return the share of unknown tokens among the tokens of texts; 0 for the small vocabulary of a stand-in."""
        unknown = next((name for name in UNKNOWN if self._reader.token_to_id(name) is not None), None)
        if unknown is None or self._reader.get_vocab_size() < LEAST_TOKENS:
            return 0.0
        parts = [self.prompt + text[:NUM_CHARACTERS] for text in texts]
        encodings = self._reader.encode_batch(parts, add_special_tokens=False)
        tokens = [token for encoding in encodings for token in encoding.tokens]
        return tokens.count(unknown) / max(1, len(tokens))

    def is_cut(self, text: str) -> bool:
        """Return whether a text behind the prompt exceeds the token limit."""
        return bool(self._reader.encode(self.prompt + text).overflowing)

    def batches(self, ids: Sequence[np.ndarray], tokens_per_batch: int) -> Iterator[Sequence[int]]:
        """Yield rows of similar length; equal lengths are sorted by content, so the given order is irrelevant."""
        order = sorted(range(len(ids)), key=lambda row: ids[row].tobytes())
        lengths = [padded_length(len(ids[row]), self.max_tokens, self.device_kind) for row in order]
        for batch in token_budget_batches(lengths, tokens_per_batch):
            yield [order[place] for place in batch]

    def vectors(self, ids: Sequence[np.ndarray], left_out: int = 0) -> Tensor:
        """Return whole vectors [B, D] float32 for the ids of one pass; `left_out` is the prompt tokens to leave out."""
        return self.forward(*self.pad(ids), left_out)

    def pad(self, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor | None]:
        """Return right-padded ids [B, T] on the device, and their mask unless no row is padded."""
        width = padded_length(max(map(len, ids)), self.max_tokens, self.device_kind)
        mask = np.arange(width) < np.array([len(row) for row in ids])[:, None]
        padding = self._first.tokenizer.pad_token_id or 0  # some causal models have none; a mask hides any id
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
        return self._exact_vectors(features)

    def _exact_vectors(self, features: Any) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            for module in self.exact_modules:
                features = module(features)
        return features["sentence_embedding"]

    def left_out(self, prompt: str) -> int:
        """Return the number of prompt tokens that vectors leave out, by the folder's pooling."""
        is_left_out = not all(getattr(module, "include_prompt", True) for module in self.modules)
        return self._num_tokens(prompt) if is_left_out else 0

    def _num_tokens(self, prompt: str) -> int:
        """Count the tokens of a prompt with the special tokens before it and without the one behind a text."""
        encoding = self._reader.encode(prompt)
        return len(encoding) - sum(encoding.special_tokens_mask[-1:]) if prompt else 0

    def require_room(self) -> None:
        """Raise UserError for a prompt that leaves no token for the text."""
        if self._num_tokens(self.prompt) + 1 >= self.max_tokens:
            raise UserError(
                f"retriever.{self.task}_prompt: {self.prompt[:40]!r} fills the {self.max_tokens} tokens of a text; "
                "expected a shorter prompt, or more retriever.max_tokens"
            )

    @torch.inference_mode()
    def require_vector(self, path: str) -> int:
        """Return the width of a vector. Raises UserError if the batch of a text changes its vector."""
        short, long = self.token_ids(["a", "a " * 20], "")
        [alone], [_, beside] = self.vectors([short]), self.vectors([long, short])
        if not torch.equal(alone, beside) and torch.cosine_similarity(alone, beside, dim=0) < 0.999:
            raise UserError(
                f"{KEY}: {path} holds a {type(self.backbone).__name__}, which reads padding as text, so that a vector "
                "would depend on the other texts of its batch; expected an encoder that follows an attention mask"
            )
        return len(alone)


class StaticSide(Side):
    """A side with a `StaticEmbedding`, the mean of one learned vector for each token, and any later modules.

    model2vec's and wordllama's models have this form. Texts are tokenized without special tokens, and a pass is a sum
    of rows of a table, without padding. Memory reads take most of the time, so all is float32. The gradient is dense:
    for 32,000 rows of 256 numbers Adam takes 0.05 to 0.1 s a step on a core, and a sparse gradient takes as long, since
    a step touches most rows. The tokenizer is from the `tokenizers` library. Its truncation is the token limit, and
    sentence-transformers saves both together.
    """

    @property
    def max_tokens(self) -> int:
        return int((self._first.tokenizer.truncation or {}).get("max_length", NO_LIMIT))

    @max_tokens.setter
    def max_tokens(self, most: int) -> None:
        self._first.tokenizer.enable_truncation(most)

    @cached_property
    def token_rule(self) -> TokenIds:
        rules = _without_special_tokens(self._first.tokenizer.to_str())
        return TokenIds(rules, self.max_tokens, self._first.num_embeddings, self.prompt)

    def batches(self, ids: Sequence[np.ndarray], tokens_per_batch: int) -> Iterator[Sequence[int]]:
        """Yield rows in order, about `TOKENS_PER_PASS` tokens each: a mean does not depend on its neighbours.

        The last bits of a product do: with a later product, batches follow from the texts.
        """
        if not all(isinstance(module, StaticEmbedding | Normalize) for module in self.modules):
            yield from super().batches(ids, tokens_per_batch)
            return
        ends = np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids)))
        starts = np.flatnonzero(np.diff(ends // TOKENS_PER_PASS, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            yield range(start, end)

    def pad(self, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return the ids of all texts in a row [T] on the device, and the offset of each text [B]."""
        ends = np.cumsum(np.fromiter(map(len, ids), np.int32, len(ids)), dtype=np.int32)
        begins = np.concatenate([np.zeros(1, np.int32), ends[:-1]])
        flat = np.concatenate(ids).astype(np.int32)
        return to_device(torch.from_numpy(flat), self.device), to_device(torch.from_numpy(begins), self.device)

    def forward(self, input_ids: Tensor, offsets: Tensor | None, left_out: int = 0) -> Tensor:
        """Return whole vectors [B, D] for ids [T] and offsets [B]; no part of a prompt can be left out."""
        return self._exact_vectors({"input_ids": input_ids, "offsets": offsets})


@lru_cache(4)  # for both sides: a tokenizer's JSON is megabytes
def _without_special_tokens(tokenizer: str) -> str:
    return json.dumps(json.loads(tokenizer) | {"post_processor": None}, ensure_ascii=False)


def side_of(task: str, modules: Sequence[nn.Module], prompt: str) -> Side:
    """Return the side of these modules."""
    return (StaticSide if isinstance(modules[0], StaticEmbedding) else Side)(task, modules, prompt)


def query_sample(data: PreparedSet) -> list[str]:
    """Return queries of a set, evenly spread."""
    rows = np.unique(np.linspace(0, len(data.queries) - 1, NUM_TEXTS).astype(int))
    return [example.query for example in data.queries.examples(rows)]


def require_known(encoder: "Encoder", corpus: CorpusStore | None, queries: Sequence[str], path: str) -> None:
    """Raise UserError if more than half of the tokens of documents or of queries are unknown to the encoder at `path`.

    Warn if more than a tenth are.
    """
    texts: dict[str, Sequence[str]] = {"query": queries[:NUM_TEXTS]}
    if corpus is not None and corpus.url is None:  # a remote store returns no rows before a search
        texts["document"] = corpus.embedded_texts(np.unique(np.linspace(0, len(corpus) - 1, NUM_TEXTS).astype(int)))
    for task, some in texts.items():
        share = encoder.sides[task].unknown_share(some)
        if share > MOST:
            raise UserError(
                f"retriever.path: the tokenizer of {path} does not know {share:.0%} of the tokens of "
                f"{TEXTS[task]}, so different texts share one vector; expected an encoder of their language"
            )
        if share > WORTH_A_WORD:
            warn_once(f"the tokenizer of {path} does not know {share:.0%} of the tokens of {TEXTS[task]}")
