"""The trainable retriever: an encoder with mean pooling (Contriever's form), or whatever its folder says.

E(t) is the mean of the last hidden states over the tokens of t (REPLUG, section 3.1), or what a chain of modules of
sentence-transformers makes of them; with cosine similarity the vector is normalized, so that an inner product is the
cosine everywhere after. Queries and documents have each their prompt before them, where the encoder has prompts.
Truncation follows the encoder's own token limit and never the size of a batch.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from threading import Barrier

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from replug.config.errors import NotFiniteError, UserError
from replug.data.store import CorpusStore
from replug.data.tokenizing import TokenIds
from replug.models.batching import token_budget_batches
from replug.models.black_box_lm import require_texts
from replug.models.encoder_backbone import most_tokens
from replug.models.encoder_files import (
    QUERY_FOLDER,
    EncoderFiles,
    load_encoder_files,
    query_encoder_in,
    save_encoder_files,
)
from replug.models.encoder_prompts import DOCUMENT_NAMES, QUERY_NAMES
from replug.models.ensemble_temperature import EnsembleTemperature, temperature_in, write_temperature
from replug.models.hardware import to_device
from replug.models.lora import ADAPTER, has_adapters, merged, save_adapter
from replug.models.packaged import resolve_encoder_path

# Padded tokens in one forward pass: what stays in the cache of a core, and what a step with gradient was measured with.
TOKENS_PER_BATCH, TOKENS_PER_BATCH_WITH_GRADIENT = 2048, 8192
SIMILARITIES = ("cosine", "dot")
LENGTH_STEP = 8  # every new shape costs a CPU's library the making of a kernel, and odd lengths run slower


class Encoder(nn.Module):
    """Maps texts to vectors [B, D]. `similarity` is `cosine` (unit vectors) or `dot`.

    `path` is a folder, a hub name, `package:minilm`, or a run directory, whose tuned retriever it is. What is None is
    as the folder says; a folder that says nothing of similarity has cosine. With `dot`, where the folder does not say
    so itself, a Normalize at the end of its modules is left out. `temperature` is the ensemble's that was
    saved with the weights, None where none was; it is saved with them again. `dims` makes vectors of their first
    numbers alone (`index.dims`); the weights are the same.

    Of a pair (DPR), whose queries have an encoder of their own, this is the documents' encoder and holds the other:
    `query_path` names it, or it lies in the folder, where `save` puts it.

    >>> encoder = Encoder("package:minilm")  # or a run, a folder, a name on the hub
    >>> boat, ship, dog = encoder.encode(["a boat", "a ship", "a dog"])
    >>> bool(boat @ ship > boat @ dog)
    True
    """

    temperature: EnsembleTemperature | None
    own_queries: "Encoder | None"
    untrained_sha256: str | None = None  # of the weights that training leaves as they are; None: it changes all

    def __init__(
        self,
        path: str,
        similarity: str | None = None,
        max_tokens: int | None = None,
        device: torch.device | str | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        query_path: str | None = None,
        dims: int | None = None,
    ) -> None:
        super().__init__()
        path = resolve_encoder_path(str(path))
        files = load_encoder_files(path)
        self.backbone, self.tokenizer, self.head = files.backbone, files.tokenizer, files.head
        self.similarity = _similarity(similarity, files.similarity, path)
        if self.similarity == "dot" and files.similarity != "dot":
            self.head.leave_out_normalize()  # which is how a folder says that its similarity is cosine
        self.prompts = files.prompts.with_own(query_prompt, document_prompt)
        self._lower_case, inner = files.lower_case, query_encoder_in(path)
        self.temperature = temperature_in(path)
        most = most_tokens(files.backbone)
        if max_tokens is not None and not 0 < max_tokens <= most:
            raise UserError(f"retriever.max_tokens is {max_tokens}, but {path} holds at most {most} tokens")
        self.max_tokens = files.max_tokens if max_tokens is None else max_tokens
        self.tokenizer.model_max_length = self.max_tokens  # saved with it, so that others cut texts alike
        self._prompt_tokens = {prompt: self._count_tokens(prompt) for prompt in self.prompts.all_named().values()}
        self._require_room()
        if dims is not None and not 0 < dims <= self.width:
            raise UserError(
                f"index.dims is {dims}, but vectors of {path} have {self.width} numbers; expected at most those"
            )
        self.dims = None if dims == self.width else dims
        self._trains_as_train = False
        self._chunk_tokens: int | None = None
        self.own_queries = None
        if query_path is not None:
            self.pair_with(Encoder(query_path, self.similarity, max_tokens, query_prompt=query_prompt, dims=dims))
        elif inner is not None:
            self.pair_with(Encoder(inner, self.similarity, query_prompt=query_prompt, dims=dims))
        self.eval()
        if device is not None:
            self.to(device)

    @property
    def width(self) -> int:
        """Numbers of a whole vector."""
        return self.head.dim

    @property
    def dim(self) -> int:
        """Numbers of a vector that is searched by: the first `dims`, or all."""
        return self.dims or self.width

    @property
    def pooling(self) -> str:
        """Pooling and the layers behind it, in words; cosine implies the Normalize at the end."""
        own = self.head.describe(implied=self.similarity == "cosine")
        return own if self.own_queries is None else f"{own}; queries {self.own_queries.pooling}"

    @property
    def of_queries(self) -> "Encoder":
        """What encodes queries: of a pair the other one, else this."""
        return self if self.own_queries is None else self.own_queries

    @property
    def sides(self) -> "list[Encoder]":
        """The encoder of documents, and of a pair that of queries behind it."""
        return [self] if self.own_queries is None else [self, self.own_queries]

    @cached_property
    def token_rule(self) -> TokenIds:
        """How documents become token ids, for those who make them without the encoder."""
        rules = self.tokenizer.backend_tokenizer.to_str()
        return TokenIds(rules, self.max_tokens, self.backbone.config.vocab_size, self.prompts.document)

    def token_ids(self, texts: Sequence[str], prompt: str = "") -> list[np.ndarray]:
        """Ids of each text behind a prompt, special tokens included, cut at `max_tokens`.

        In uint16 where they fit, else in uint32.
        """
        require_texts(texts, "texts")
        if not texts:
            return []
        whole = [prompt + text for text in texts]
        rows = self.tokenizer(whole, truncation=True, max_length=self.max_tokens)["input_ids"]
        return [np.array(row, self.token_rule.dtype) for row in rows]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, prompt_tokens: int = 0) -> Tensor:
        """Whole vectors [B, D] in float32 for ids and mask [B, T]; float32 behind the backbone under autocast too."""
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        vectors: Tensor = self.head(hidden, attention_mask, prompt_tokens)
        if self.similarity == "cosine" and not self.head.ends_normalized:
            return nn.functional.normalize(vectors, dim=-1)
        return vectors

    def encode(
        self, texts: Sequence[str], tokens_per_batch: int = TOKENS_PER_BATCH, prompt_name: str | None = None
    ) -> Tensor:
        """Vectors [N, D] float32 in the order given, on the CPU, without gradient.

        As `SentenceTransformer.encode` does, with the prompt of that name before each text; without a name, with the
        folder's default prompt, which few have. The batches follow from the texts alone, so the same texts give the
        same bits in any order. Raises UserError where a pair is asked without a side's name.
        """
        if self.own_queries is not None and prompt_name not in (*QUERY_NAMES, *DOCUMENT_NAMES):
            raise UserError(
                "this retriever has one encoder for queries and one for documents: use encode_query or encode_document"
            )
        if prompt_name in QUERY_NAMES:
            return self.encode_query(texts, tokens_per_batch)
        return self._encode(texts, self.prompts.by_name(prompt_name), tokens_per_batch)

    def encode_query(
        self, texts: Sequence[str], tokens_per_batch: int = TOKENS_PER_BATCH, autocast: bool = False
    ) -> Tensor:
        """As `encode`, of texts that are searched for: with the prompt of queries; `autocast` is to bfloat16."""
        side = self.of_queries
        return side._encode(texts, side.prompts.query, tokens_per_batch, autocast)

    def encode_document(self, texts: Sequence[str], tokens_per_batch: int = TOKENS_PER_BATCH) -> Tensor:
        """As `encode`, of texts that are searched through: with the prompt of documents."""
        return self._encode(texts, self.prompts.document, tokens_per_batch)

    def _encode(self, texts: Sequence[str], prompt: str, tokens_per_batch: int, autocast: bool = False) -> Tensor:
        return self.encode_tokens(self.token_ids(texts, prompt), tokens_per_batch, prompt, autocast)

    def encode_tokens(
        self, ids: Sequence[np.ndarray], tokens_per_batch: int = TOKENS_PER_BATCH, prompt: str = "", cast: bool = False
    ) -> Tensor:
        """As `encode`, for texts that are tokenized already: what `token_ids` gave for each, with its prompt."""
        vectors = torch.empty(len(ids), self.dim, device=self.backbone.device)
        unpooled = self._unpooled(prompt)

        def fill(rows: list[int]) -> None:
            with torch.inference_mode(), torch.autocast(vectors.device.type, torch.bfloat16, enabled=cast):
                whole = self(*self._pad([ids[row] for row in rows]), unpooled)
                vectors[rows] = first_numbers(whole, self.dims, self.similarity)

        if vectors.is_cuda:
            for rows in self._batches(ids, tokens_per_batch):
                fill(rows)
        else:
            one_per_thread(fill, list(self._batches(ids, tokens_per_batch)))
        return vectors.cpu()

    def prepare_training(
        self,
        dropout: bool,
        gradient_checkpointing: bool,
        compiled: bool,
        adapter_dropout: bool = False,
        chunk_tokens: int | None = None,
    ) -> None:
        """How steps with gradient are computed: the encoder's own dropout, less memory for more time, torch.compile.

        `adapter_dropout` is of adapters that are added after. With `chunk_tokens` the activations of so many padded
        tokens are in memory at a time.
        """
        self._chunk_tokens = chunk_tokens
        if gradient_checkpointing:
            self.backbone.activation_checkpointing_enable({"use_reentrant": False})
        # transformers checkpoints in training mode only, which must not bring the encoder's own dropout with it.
        self._trains_as_train = dropout or gradient_checkpointing or adapter_dropout
        if self._trains_as_train and not dropout:
            _remove_dropout(self.backbone)
        if compiled:
            self.backbone.compile(dynamic=True)  # in place: names of weights stay
        if self.own_queries is not None:
            self.own_queries.prepare_training(dropout, gradient_checkpointing, compiled, adapter_dropout, chunk_tokens)

    def train_mode(self) -> None:
        """For a step with gradient; `eval` is for everything else, and for what is frozen."""
        self.train(self._trains_as_train)
        for part in (self.backbone, self.own_queries):
            if part is not None and not any(weight.requires_grad for weight in part.parameters()):
                part.eval()

    def pair_with(self, queries: "Encoder") -> None:
        """Take what encodes queries there for this one's. Raises UserError for vectors of another width."""
        own = queries.of_queries
        if own.width != self.width:
            raise UserError(
                f"retriever.query_path: vectors of queries have {own.width} numbers, those of documents {self.width}; "
                "expected the two encoders of one retriever"
            )
        self.own_queries = own
        self.prompts = self.prompts.with_own(own.prompts.query, None)

    def split(self) -> None:
        """Make a pair of this encoder, whose queries begin with the same weights. A pair stays as it is."""
        if self.own_queries is None:
            self.pair_with(copy.deepcopy(self))

    def freeze_queries(self) -> None:
        """Of a pair."""
        assert self.own_queries is not None, "split it first"
        self.own_queries.requires_grad_(False)

    def freeze_documents(self) -> None:
        """Of a pair."""
        assert self.own_queries is not None, "split it first"
        for part in (self.backbone, self.head):
            part.requires_grad_(False)

    def document_ids(self, corpus: CorpusStore, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Token ids of documents: as they were prepared for this tokenizer and prompt, or made from their texts."""
        if corpus.tokens_by is not None and corpus.tokens_by == self.token_rule.fingerprint:
            return corpus.token_ids(rows)
        return self.token_ids(corpus.texts(rows), self.prompts.document)

    def encode_with_gradient(
        self, ids: Sequence[np.ndarray], tokens_per_batch: int | None = None, prompt: str = ""
    ) -> Tensor:
        """As `encode_tokens`, but whole vectors whatever `dims` is, differentiable and on the encoder's device."""
        tokens_per_batch = tokens_per_batch or self._chunk_tokens or TOKENS_PER_BATCH_WITH_GRADIENT
        batches = list(self._batches(ids, tokens_per_batch))
        unpooled = self._unpooled(prompt)
        parts = [self._with_gradient(*self._pad([ids[row] for row in rows]), unpooled) for rows in batches]
        places = torch.argsort(torch.tensor([row for rows in batches for row in rows]))
        return torch.cat(parts)[to_device(places, parts[0].device)]

    def _with_gradient(self, input_ids: Tensor, attention_mask: Tensor, prompt_tokens: int) -> Tensor:
        """As `forward`. Of a chunk the vectors alone are kept: the backward pass computes it again, with its dropout.

        So the loss is of all vectors, and activations are of one chunk at a time (GradCache, Gao et al. 2021).
        """
        if self._chunk_tokens is None:
            return self(input_ids, attention_mask, prompt_tokens)
        vectors: Tensor = checkpoint(self, input_ids, attention_mask, prompt_tokens, use_reentrant=False)
        return vectors

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
        padding = self.tokenizer.pad_token_id or 0  # some causal models have none; any id does behind the mask
        inputs = np.full(mask.shape, padding, np.int64)
        inputs[mask] = np.concatenate(ids)
        device = self.backbone.device
        return to_device(torch.from_numpy(inputs), device), to_device(torch.from_numpy(mask.astype(np.int64)), device)

    def _unpooled(self, prompt: str) -> int:
        """Tokens at the beginning of each text that its vector leaves out: a prompt's, where the folder says so."""
        return 0 if self.head.pooling.include_prompt else self._prompt_tokens[prompt]

    def _count_tokens(self, prompt: str) -> int:
        """Of a prompt, with special ones before it and without the one behind a text, as sentence-transformers does."""
        ids = self.tokenizer(prompt)["input_ids"] if prompt else []
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids) if ids else 0

    def _require_room(self) -> None:
        """Raise UserError for a prompt that leaves no token for the text."""
        for side, prompt in (("query", self.prompts.query), ("document", self.prompts.document)):
            if prompt and self._prompt_tokens[prompt] + 1 >= self.max_tokens:
                raise UserError(
                    f"retriever.{side}_prompt: {prompt[:40]!r} fills the {self.max_tokens} tokens of a text; expected "
                    "a shorter one, or more retriever.max_tokens"
                )

    def save(self, folder: Path) -> None:
        """Write a folder that `AutoModel` and `SentenceTransformer` load; the latter to the same vectors.

        Of a pair both load the documents' encoder there, and that of queries in the folder `query_encoder`. Adapters
        are merged into the weights, and kept in the folder `adapter` as well.
        """
        if has_adapters(self.backbone):
            save_adapter(self.backbone, folder / ADAPTER)
        if self.own_queries is not None:
            self.own_queries.save(folder / QUERY_FOLDER)
        save_encoder_files(
            folder,
            EncoderFiles(
                merged(self.backbone),
                self.tokenizer,
                self.head,
                self.prompts,
                self.similarity,
                self.max_tokens,
                self._lower_case,
            ),
        )
        if self.temperature is not None:
            write_temperature(folder, self.temperature)


def _similarity(asked: str | None, said: str | None, path: str) -> str:
    """What is asked for, or else what the folder says; cosine where neither does."""
    if asked is not None and asked not in SIMILARITIES:
        raise UserError(f"similarity is {asked!r}; expected {' or '.join(SIMILARITIES)}")
    if asked is None and said not in (None, *SIMILARITIES):
        raise UserError(
            f"retriever.similarity: {path} says {said}, which no index has; expected {' or '.join(SIMILARITIES)}"
        )
    return asked or said or SIMILARITIES[0]


def require_finite_vectors(vectors: np.ndarray, ids: Sequence[str]) -> None:
    """Raise NotFiniteError naming the texts whose vectors [N, D] are no numbers: a search answers such a query too."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        named = ", ".join(ids[row] for row in bad[:3])
        raise NotFiniteError(
            f"the encoder's vectors of {len(bad)} of {len(ids)} texts are not finite, first {named}: did training "
            "diverge, or is the encoder's folder damaged?"
        )


def _remove_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def one_per_thread(run: Callable[[list[int]], None], batches: list[list[int]]) -> None:
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


def first_numbers(vectors: Tensor, count: int | None, similarity: str) -> Tensor:
    """The first `count` numbers of vectors [..., D], None for all; with cosine similarity of length 1 again.

    Raises ValueError where the vectors have fewer.
    """
    if count is None or count == vectors.shape[-1]:
        return vectors
    if not 0 < count < vectors.shape[-1]:
        raise ValueError(f"vectors of {vectors.shape[-1]} numbers have no first {count}")
    prefix = vectors[..., :count]
    return normalize(prefix, dim=-1) if similarity == "cosine" else prefix
