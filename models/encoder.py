"""The trainable retriever: a BERT-like encoder with mean pooling (Contriever's form), or that of the first token.

E(t) is the mean of the last hidden states over the tokens of t (REPLUG, section 3.1), or the first one where the folder
says so; with cosine similarity the vector is normalized, so that an inner product is the cosine everywhere after.
Truncation follows the encoder's own token limit and never the size of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from threading import Barrier

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replug.configs.errors import NotFiniteError, UserError
from replug.data.store import CorpusStore
from replug.data.tokenizing import TokenIds
from replug.models.batching import token_budget_batches
from replug.models.encoder_files import MEAN, is_query_side, load_encoder_files, save_encoder_files
from replug.models.ensemble_temperature import EnsembleTemperature, temperature_in, write_temperature
from replug.models.lora import ADAPTER, has_adapters, merged, save_adapter
from replug.models.packaged import resolve_encoder_path
from replug.models.text_lists import require_texts
from replug.models.vector_prefix import first_numbers

# Padded tokens in one forward pass: what stays in the cache of a core, and what a step with gradient was measured with.
TOKENS_PER_BATCH, TOKENS_PER_BATCH_WITH_GRADIENT = 2048, 8192
SIMILARITIES = ("cosine", "dot")
LENGTH_STEP = 8  # every new shape costs a CPU's library the making of a kernel, and odd lengths run slower


class Encoder(nn.Module):
    """Maps texts to vectors [B, D]. `similarity` is `cosine` (unit vectors) or `dot`.

    `path` is a folder, a hub name, `package:minilm`, or a run directory, whose tuned retriever it is. `temperature` is
    the ensemble's that was saved with the weights, None where none was; it is saved with them again. `dims` makes
    vectors of their first numbers alone (`index.dims`); the weights are the same.
    """

    temperature: EnsembleTemperature | None
    untrained_sha256: str | None = None  # of the weights that training leaves as they are; None: it changes all

    def __init__(
        self,
        path: str,
        similarity: str = "cosine",
        max_tokens: int | None = None,
        device: torch.device | str | None = None,
        dims: int | None = None,
    ) -> None:
        super().__init__()
        if similarity not in SIMILARITIES:
            raise UserError(f"similarity is {similarity!r}; expected {' or '.join(SIMILARITIES)}")
        path = resolve_encoder_path(str(path))
        self.backbone: PreTrainedModel
        self.backbone, self.tokenizer, self.pooling = load_encoder_files(path)
        self.similarity, self._is_query_side = similarity, is_query_side(path)
        self.temperature = temperature_in(path)
        limit = _token_limit(self.backbone, self.tokenizer)
        if max_tokens is not None and not 0 < max_tokens <= limit:
            raise UserError(f"retriever.max_tokens is {max_tokens}, but {path} holds at most {limit} tokens")
        self.max_tokens = limit if max_tokens is None else max_tokens
        self.tokenizer.model_max_length = self.max_tokens  # saved with it, so that others cut texts alike
        if dims is not None and not 0 < dims <= self.width:
            raise UserError(
                f"index.dims is {dims}, but vectors of {path} have {self.width} numbers; expected at most those"
            )
        self.dims = None if dims == self.width else dims
        self._trains_as_train = False
        self.eval()
        if device is not None:
            self.to(device)

    @property
    def width(self) -> int:
        """Numbers of a whole vector."""
        return int(self.backbone.config.hidden_size)

    @property
    def dim(self) -> int:
        """Numbers of a vector that is searched by: the first `dims`, or all."""
        return self.dims or self.width

    @cached_property
    def token_rule(self) -> TokenIds:
        """How texts become token ids, for those who make them without the encoder."""
        rules = self.tokenizer.backend_tokenizer.to_str()
        return TokenIds(rules, self.max_tokens, self.backbone.config.vocab_size)

    def token_ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, special tokens included, cut at `max_tokens`: uint16 where they fit, else uint32."""
        require_texts(texts, "texts")
        if not texts:
            return []
        rows = self.tokenizer(list(texts), truncation=True, max_length=self.max_tokens)["input_ids"]
        return [np.array(row, self.token_rule.dtype) for row in rows]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Whole vectors [B, D] in float32 for ids and mask [B, T]; pooled in float32 under autocast too."""
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        pooled = mean_pool(hidden.float(), attention_mask) if self.pooling == MEAN else hidden[:, 0].float()
        return nn.functional.normalize(pooled, dim=-1) if self.similarity == "cosine" else pooled

    def encode(self, texts: Sequence[str], tokens_per_batch: int = TOKENS_PER_BATCH) -> Tensor:
        """Vectors [N, D] float32 in the order given, on the CPU, without gradient.

        The batches follow from the texts alone, so the same texts give the same bits in any order.
        """
        return self.encode_tokens(self.token_ids(texts), tokens_per_batch)

    def encode_tokens(self, ids: Sequence[np.ndarray], tokens_per_batch: int = TOKENS_PER_BATCH) -> Tensor:
        """As `encode`, for texts that are tokenized already: what `token_ids` gave for each."""
        vectors = torch.empty(len(ids), self.dim, device=self.backbone.device)

        def fill(rows: list[int]) -> None:
            with torch.inference_mode(), torch.autocast(vectors.device.type, enabled=False):
                whole = self(*self._pad([ids[row] for row in rows]))
                vectors[rows] = first_numbers(whole, self.dims, self.similarity)

        if vectors.is_cuda:
            for rows in self._batches(ids, tokens_per_batch):
                fill(rows)
        else:
            _one_per_thread(fill, list(self._batches(ids, tokens_per_batch)))
        return vectors.cpu()

    def prepare_training(
        self, dropout: bool, gradient_checkpointing: bool, compiled: bool, adapter_dropout: bool = False
    ) -> None:
        """How steps with gradient are computed: the encoder's own dropout, less memory for more time, torch.compile.

        `adapter_dropout` is of adapters that are added after.
        """
        if gradient_checkpointing:
            self.backbone.activation_checkpointing_enable({"use_reentrant": False})
        # transformers checkpoints in training mode only, which must not bring the encoder's own dropout with it.
        self._trains_as_train = dropout or gradient_checkpointing or adapter_dropout
        if self._trains_as_train and not dropout:
            _remove_dropout(self.backbone)
        if compiled:
            self.backbone.compile(dynamic=True)  # in place: names of weights stay

    def train_mode(self) -> None:
        """For a step with gradient; `eval` is for everything else."""
        self.train(self._trains_as_train)

    def document_ids(self, corpus: CorpusStore, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Token ids of documents: as they were prepared for this tokenizer, or made from their texts."""
        if corpus.tokens_by is not None and corpus.tokens_by == self.token_rule.fingerprint:
            return corpus.token_ids(rows)
        return self.token_ids(corpus.texts(rows))

    def encode_with_gradient(
        self, ids: Sequence[np.ndarray], tokens_per_batch: int = TOKENS_PER_BATCH_WITH_GRADIENT
    ) -> Tensor:
        """As `encode_tokens`, but whole vectors whatever `dims` is, differentiable and on the encoder's device."""
        batches = list(self._batches(ids, tokens_per_batch))
        parts = [self(*self._pad([ids[row] for row in rows])) for rows in batches]
        order = torch.tensor([row for rows in batches for row in rows], device=parts[0].device)
        return torch.cat(parts)[torch.argsort(order)]

    def _batches(self, ids: Sequence[np.ndarray], tokens_per_batch: int) -> Iterator[list[int]]:
        """Rows of similar length; equal ones go by their content, so that the order given does not matter."""
        order = sorted(range(len(ids)), key=lambda row: ids[row].tobytes())
        for batch in token_budget_batches([self._padded(len(ids[row])) for row in order], tokens_per_batch):
            yield [order[place] for place in batch]

    def _padded(self, length: int) -> int:
        return min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.max_tokens)

    def _pad(self, ids: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Right-padded ids and mask [B, T] on the encoder's device."""
        width = self._padded(max(len(row) for row in ids))
        mask = np.arange(width) < np.array([len(row) for row in ids])[:, None]
        inputs = np.full(mask.shape, self.tokenizer.pad_token_id, np.int64)
        inputs[mask] = np.concatenate(ids)
        device = self.backbone.device
        return torch.from_numpy(inputs).to(device), torch.from_numpy(mask.astype(np.int64)).to(device)

    def require_documents(self) -> None:
        """Raise UserError where this is the encoder of queries alone: its vectors of documents are not the pair's."""
        if self._is_query_side:
            raise UserError(
                "this retriever was tuned for queries alone (retriever.train=query), so it embeds no documents: take "
                "the run's document_encoder as the retriever, and this one as query_encoders.NAME"
            )

    def save(self, folder: Path) -> None:
        """Write a folder that `AutoModel` and `SentenceTransformer` load; the latter to the same vectors.

        Adapters are merged into the weights, and kept in the folder `adapter` as well.
        """
        if has_adapters(self.backbone):
            save_adapter(self.backbone, folder / ADAPTER)
        backbone = merged(self.backbone)
        save_encoder_files(folder, backbone, self.tokenizer, self.pooling, self.max_tokens, self.similarity)
        if self.temperature is not None:
            write_temperature(folder, self.temperature)


def require_finite_vectors(vectors: np.ndarray, ids: Sequence[str]) -> None:
    """Raise NotFiniteError naming the texts whose vectors [N, D] are no numbers: a search answers such a query too."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        named = ", ".join(ids[row] for row in bad[:3])
        raise NotFiniteError(
            f"the encoder's vectors of {len(bad)} of {len(ids)} texts are not finite, first {named}: did training "
            "diverge, or is the encoder's folder damaged?"
        )


def _one_per_thread(run: Callable[[list[int]], None], batches: list[list[int]]) -> None:
    """Run batches side by side, each on one thread.

    Threads that share one batch wait for each other after every operation. That costs a little on an idle machine,
    and most of the time where another process holds a core.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(batches) == 1:
        for batch in batches:
            run(batch)
    else:
        list(_single_threads(threads).map(run, batches))


@cache
def _single_threads(count: int) -> ThreadPoolExecutor:
    """Threads that compute alone. What one of them sets holds for all threads to come, so it is put back at once."""
    threads, started = torch.get_num_threads(), Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes its number at its first look, which must not come later
        started.wait()

    pool = ThreadPoolExecutor(count, initializer=begin)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)
    return pool


def _remove_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def mean_pool(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean of hidden states [B, T, D] over the positions where the mask [B, T] is 1: [B, D]."""
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


def _token_limit(backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The smaller of what the tokenizer declares and what the position table holds."""
    declared = int(getattr(tokenizer, "model_max_length", 512))
    positions = int(getattr(backbone.config, "max_position_embeddings", 512))
    return min(declared, positions)
