"""A side of a retriever without a transformer: the mean of one learned vector for each token (`StaticEmbedding`).

model2vec's and wordllama's models have this form. Texts are tokenized without special tokens, and a pass is a sum of
rows of a table, without padding. Reading the rows takes the time, so all is float32. The gradient is dense: for 32,000
rows of 256 numbers Adam takes 0.05 to 0.1 s a step on a core, and a sparse one no less, since a step touches most rows.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn

from replug.data.tokenizing import TokenIds, cut_ids
from replug.models.encoder_files import NO_LIMIT
from replug.models.encoder_side import LEAST_TOKENS, Side
from replug.models.hardware import to_device

TOKENS_PER_PASS = 32_768  # of any device: more takes memory, fewer the time of more calls
UNKNOWN = ("[UNK]", "<unk>")


def side_of(task: str, modules: Sequence[nn.Module], prompt: str) -> Side:
    """Return the side that these modules make."""
    return (StaticSide if isinstance(modules[0], StaticEmbedding) else Side)(task, modules, prompt)


class StaticSide(Side):
    """Makes vectors by a `StaticEmbedding` and what follows. The tokenizer is one of the `tokenizers` library.

    Its truncation is the token limit, which sentence-transformers keeps with it.
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
