"""One side of a retriever: the modules that make vectors of queries or of documents, with their tokenizer and prompt.

Texts are tokenized here and not by sentence-transformers, so that ids may be kept for a corpus. Batches hold texts of
similar length within a budget of padded tokens, and follow from the texts alone. Modules behind the transformer compute
in float32.

A tokenizer reads all that it does not know as one token, and so as one vector: a WordPiece vocabulary of English reads
a Thai text, which writes no word apart, as a single unknown token. Encoders that know too little are named or refused.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replug.config.errors import UserError
from replug.data.store import CorpusStore, PreparedSet
from replug.data.tokenizing import TokenIds, cut_ids
from replug.models.batching import padded_length, token_budget_batches
from replug.models.black_box_lm import require_texts
from replug.models.encoder_files import KEY, NO_LIMIT, in_words, most_tokens
from replug.models.hardware import to_device
from replug.models.model_files import warn_once

if TYPE_CHECKING:
    from replug.models.encoder import Encoder

WORTH_A_WORD, MOST = 0.1, 0.5  # shares of the tokens
TEXTS = {"query": "queries", "document": "documents"}  # of a task
LEAST_TOKENS = 1000  # of a real vocabulary: a stand-in's knows the words of its own texts alone
NUM_TEXTS = 256  # of a corpus, evenly spread

TOKENS_PER_PASS = 32_768  # of any device: more takes memory, fewer the time of more calls
UNKNOWN = ("[UNK]", "<unk>")


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


class StaticSide(Side):
    """Makes vectors by a `StaticEmbedding`, the mean of one learned vector for each token, and what follows.

    model2vec's and wordllama's models have this form. Texts are tokenized without special tokens, and a pass is a sum
    of rows of a table, without padding. Reading the rows takes the time, so all is float32. The gradient is dense: for
    32,000 rows of 256 numbers Adam takes 0.05 to 0.1 s a step on a core, and a sparse one no less, since a step touches
    most rows. The tokenizer is one of the `tokenizers` library. Its truncation is the token limit, which
    sentence-transformers keeps with it.
    """

    @property
    def backbone(self) -> Any:
        return self.modules[0]

    @property
    def tokenizer(self) -> Any:
        return self.backbone.tokenizer

    @property
    def exact_modules(self) -> list[nn.Module]:
        return self.modules

    @property
    def token_rule(self) -> TokenIds:
        rules = json.loads(self.tokenizer.to_str()) | {"post_processor": None}  # it would add special tokens
        text = json.dumps(rules, ensure_ascii=False)
        return TokenIds(text, self.max_tokens, self.backbone.num_embeddings, self.prompt)

    @property
    def most_tokens(self) -> int:
        return NO_LIMIT

    @property
    def max_tokens(self) -> int:
        return int((self.tokenizer.truncation or {}).get("max_length", NO_LIMIT))

    @max_tokens.setter
    def max_tokens(self, most: int) -> None:
        self.tokenizer.enable_truncation(most)

    @property
    def device(self) -> torch.device:
        return self.backbone.embedding.weight.device

    def describe(self, similarity: str) -> str:
        return ", ".join(["static", *filter(None, [super().describe(similarity)])])

    def is_cut(self, text: str) -> bool:
        return bool(self.tokenizer.encode(self.prompt + text, add_special_tokens=False).overflowing)

    def _tokenize(self, texts: Sequence[str], prompt: str) -> list[np.ndarray]:
        def tokenize(parts: list[str]) -> list[list[int]]:
            return [row.ids for row in self.tokenizer.encode_batch_fast(parts, add_special_tokens=False)]

        dtype = np.uint16 if self.backbone.num_embeddings < 2**16 else np.uint32  # as `TokenIds.dtype`
        return [np.array(row, dtype) for row in cut_ids(tokenize, [prompt + text for text in texts], self.max_tokens)]

    def _num_tokens(self, prompt: str) -> int:
        return len(self.tokenizer.encode(prompt, add_special_tokens=False))

    def _unknown_and_added(self) -> tuple[int | None, list[int]]:
        numbers = [number for name in UNKNOWN if (number := self.tokenizer.token_to_id(name)) is not None]
        return (numbers[0] if numbers and self.backbone.num_embeddings >= LEAST_TOKENS else None), []

    def batches(self, ids: Sequence[np.ndarray], tokens_per_batch: int) -> Iterator[Sequence[int]]:
        """Yield rows in their order, of about `TOKENS_PER_PASS` tokens: a mean does not depend on what is beside it.

        The last bits of a product do: where one follows, batches follow from the texts.
        """
        if not all(isinstance(module, StaticEmbedding | Normalize) for module in self.modules):
            yield from super().batches(ids, tokens_per_batch)
            return
        ends = np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids)))
        starts = np.flatnonzero(np.diff(ends // TOKENS_PER_PASS, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            yield range(start, end)

    def pad(self, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return the ids of all texts in a row [T] on the device, and where each text begins [B]."""
        ends = np.cumsum(np.fromiter(map(len, ids), np.int32, len(ids)), dtype=np.int32)
        begins = np.concatenate([np.zeros(1, np.int32), ends[:-1]])
        flat = np.concatenate(ids).astype(np.int32)
        return to_device(torch.from_numpy(flat), self.device), to_device(torch.from_numpy(begins), self.device)

    def forward(self, input_ids: Tensor, offsets: Tensor | None, left_out: int = 0) -> Tensor:
        """Return whole vectors [B, D] for ids [T] and offsets [B]; no part of a prompt can be left out."""
        features: Any = {"input_ids": input_ids, "offsets": offsets}
        with torch.autocast(self.device.type, enabled=False):
            for module in self.modules:
                features = module(features)
        return features["sentence_embedding"]

    def _vectors_of_probe(self) -> tuple[Tensor, Tensor]:
        vectors = self.vectors([np.zeros(1, np.uint16)])
        return vectors, vectors

    def _require_own_vector(self, padded: Tensor, alone: Tensor, path: str) -> None:
        """A text's vector is its own: nothing is padded."""


def side_of(task: str, modules: Sequence[nn.Module], prompt: str) -> Side:
    """Return the side that these modules make."""
    return (StaticSide if isinstance(modules[0], StaticEmbedding) else Side)(task, modules, prompt)


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
