"""The trainable retriever: a `SentenceTransformer`, whose modules make a vector of a text.

E(t) is the mean of the last hidden states over the tokens of t (REPLUG, section 3.1), or what the folder's modules make
of them. With cosine similarity the last module is a `Normalize`. Queries and documents each have their prompt, and in a
pair (DPR) their own modules, as the routes of a `Router`. replug adds batches by a budget of padded tokens, token ids
that are kept for a corpus, float32 behind the transformer, and vectors with gradient.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from replug.config.errors import NotFiniteError, UserError
from replug.config.hub_names import MODEL, require_name
from replug.data.files import as_other_files, json_sha256
from replug.data.folder import write_checksums
from replug.data.store import CorpusStore
from replug.data.tokenizing import TokenIds, cut_ids
from replug.models.batching import (
    ENCODER_TOKENS,
    ENCODER_TOKENS_WITH_GRADIENT,
    padded_length,
    token_budget_batches,
)
from replug.models.black_box_lm import require_texts
from replug.models.encoder_files import (
    KEY,
    TASKS,
    DocumentEncoder,
    chain,
    document_encoder,
    has_tuned_queries,
    joined,
    load_container,
    mark_tuned_queries,
    most_tokens,
    numbers_sha256,
    similarity_in,
)
from replug.models.ensemble_temperature import EnsembleTemperature, temperature_in, write_temperature
from replug.models.hardware import one_per_thread, to_device
from replug.models.lora import merged, save_adapters
from replug.models.model_files import longrope_limit, warn_once
from replug.models.packaged import resolve_encoder_path
from replug.models.unknown_tokens import warn_of_unknown

SIMILARITIES = ("cosine", "dot")
# Names of prompts in a folder, of which the first that is not empty is taken: sentence-transformers' own, and those of
# nomic, jina, stella and e5-mistral for retrieval.
DOCUMENT_PROMPTS = ("document", "passage", "corpus", "search_document", "retrieval.passage", "retrieval_document")
QUERY_PROMPTS = ("query", "search_query", "retrieval.query", "retrieval_query", "s2p_query", "web_search_query")


class Encoder(nn.Module):
    """Maps texts to vectors [B, D]. `similarity` is `cosine` (unit vectors) or `dot`.

    `path` is a folder, a hub name, `package:minilm`, or a run directory, whose tuned retriever it is. None means what
    the folder says; a folder that says nothing has cosine. With `dot`, unless the folder says so itself, a Normalize at
    the end of its modules is left out. `query_path` names an encoder for queries alone. A folder of tuned queries names
    its documents' encoder, which is read too and compared. `dims` cuts vectors to their first numbers (`index.dims`, by
    default the folder's `truncate_dim`); the weights are the same. `temperature` is the ensemble's that was saved with
    the weights, or None; it is saved with them again.

    `model` is the `SentenceTransformer`. A `task` is "query" or "document".

    >>> encoder = Encoder("package:minilm")  # or a run, a folder, a name on the hub
    >>> boat, ship, dog = encoder.encode(["a boat", "a ship", "a dog"])
    >>> bool(boat @ ship > boat @ dog)
    True
    """

    temperature: EnsembleTemperature | None
    own_similarity: str | None  # that of the folder; None: it says nothing, and cosine is assumed
    untrained_sha256: str | None = None  # of the weights that training leaves as they are; None: it changes all
    _needs_documents = True

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
        require_name(KEY, path, MODEL, "a folder of a model, or a name on the hub")  # once; loading asks five times
        self.model = load_container(path)
        self.own_similarity = similarity_in(self.model)
        said = self.model.similarity_fn_name
        self.similarity = _similarity(similarity, said, path)
        self._end_by_similarity(leave_out=self.similarity == "dot" != said)
        prompts = self._prompts
        if document_prompt is None:
            document_prompt = next((prompts[name] for name in DOCUMENT_PROMPTS if prompts.get(name)), "")
        if query_prompt is None:
            query_prompt = next((prompts[name] for name in QUERY_PROMPTS if prompts.get(name)), "")
            _warn_of_prompts(path, prompts)
        prompts |= {"document": document_prompt, "query": query_prompt}
        self._limit_tokens(max_tokens, path)
        self._trains_as_train = False
        self._chunk_tokens: int | None = None
        self.temperature = temperature_in(path)
        self.eval()
        self.width = self._require_vectors(path)
        if query_path is not None:
            queries = QueryEncoder(query_path, self.similarity, max_tokens, query_prompt=query_prompt)
            self.require_documents_of(queries, resolve_encoder_path(query_path))
            self.pair_with(queries)
            self.temperature = queries.temperature or self.temperature
        elif self._needs_documents and (documents := document_encoder(path)) is not None:
            self._read_documents(path, documents, max_tokens)
        self._require_room()
        if dims is not None and not 0 < dims <= self.width:
            raise UserError(
                f"index.dims is {dims}, but vectors of {path} have {self.width} numbers; expected at most those"
            )
        own_dims = self.model.truncate_dim  # which the folder says
        dims = dims or (own_dims if own_dims and own_dims < self.width else None)
        self.dims = None if dims == self.width else dims
        if own_dims:
            self.model.truncate_dim = self.dims
        if device is not None:
            self.to(device)

    @property
    def dim(self) -> int:
        """Return the numbers of a vector that is searched by: the first `dims`, or all `width`."""
        return self.dims or self.width

    @property
    def is_pair(self) -> bool:
        """Return whether queries have modules of their own."""
        return self.modules_of("query") != self.modules_of("document")

    @property
    def pooling(self) -> str:
        """Return the modules behind the transformer, in words, by which an index knows them."""
        own = self.describe("document")
        return f"{own}; queries {self.describe('query')}" if self.is_pair else own

    def describe(self, task: str) -> str:
        """Return a task's modules in words; cosine implies the Normalize at the end."""
        found = [_in_words(module) for module in self.modules_of(task)[1:]]
        return ", ".join(found[:-1] if self.similarity == "cosine" else found)

    def prompt(self, task: str) -> str:
        """Return what stands before each query, or before each document."""
        return self._prompts[task]

    def modules_of(self, task: str) -> list[nn.Module]:
        """Return the modules that make a task's vectors: a Transformer, a Pooling, and what follows."""
        return chain(self.model, task)

    @property
    def backbones(self) -> list[PreTrainedModel]:
        """Return the model of documents, and behind it that of queries if they have their own."""
        found = {id(self._backbone(task)): self._backbone(task) for task in reversed(TASKS)}
        return list(found.values())

    @property
    def device(self) -> torch.device:
        """Return where the models are."""
        return self._backbone("document").device

    @property
    def device_kind(self) -> str:
        """Return "cpu" or "cuda", by which sizes of passes differ."""
        return "cpu" if self.device.type == "cpu" else "cuda"

    def tokenizer_of(self, task: str) -> PreTrainedTokenizerBase:
        """Return a task's tokenizer, whose `model_max_length` is its token limit."""
        transformer: Any = self.modules_of(task)[0]
        return transformer.tokenizer

    def _backbone(self, task: str) -> PreTrainedModel:
        transformer: Any = self.modules_of(task)[0]
        return transformer.model

    @property
    def _prompts(self) -> dict[str, str]:
        prompts: Any = self.model.prompts  # none of which is None in a model that is loaded
        return prompts

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of documents."""
        return self.tokenizer_of("document")

    @property
    def max_tokens(self) -> int:
        """Return how many tokens of a document are read, its prompt included."""
        return int(self.tokenizer.model_max_length)

    @cached_property
    def token_rule(self) -> TokenIds:
        """Return how documents become token ids, for those who make them without the encoder."""
        rules = self.tokenizer.backend_tokenizer.to_str()
        return TokenIds(rules, self.max_tokens, self.backbones[0].config.vocab_size, self.prompt("document"))

    def token_ids(self, texts: Sequence[str], task: str = "document") -> list[np.ndarray]:
        """Return the ids of each text behind the task's prompt, special tokens included, cut at the token limit.

        They are uint16 if those suffice for the vocabulary, else uint32.
        """
        return self._known(self._tokenize(texts, task, self.prompt(task)), task)

    def document_ids(self, corpus: CorpusStore, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return token ids of documents: as they were prepared for this tokenizer and prompt, or from their texts."""
        if corpus.tokens_by is not None and corpus.tokens_by == self.token_rule.fingerprint:
            return corpus.token_ids(rows)
        return self.token_ids(corpus.texts(rows))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, task: str = "document", prompt_tokens: int = 0
    ) -> Tensor:
        """Return whole vectors [B, D] in float32 for ids and mask [B, T]; None if no row is padded.

        Modules behind the transformer compute in float32, under autocast and with weights in bfloat16 too.
        """
        hidden = self._backbone(task)(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        features = {"token_embeddings": hidden.float(), "attention_mask": mask}
        if prompt_tokens:
            features["prompt_length"] = prompt_tokens
        with torch.autocast(hidden.device.type, enabled=False):
            for module in self.modules_of(task)[1:]:
                features = module(features)
        return features["sentence_embedding"]

    def encode(
        self, texts: Sequence[str], tokens_per_batch: int | None = None, prompt_name: str | None = None
    ) -> Tensor:
        """Return vectors [N, D] float32 in the order given, on the CPU, without gradient.

        As `SentenceTransformer.encode` does, with the prompt of that name before each text; None means the folder's
        default prompt, which few have. `tokens_per_batch` are padded tokens in a pass; None means a default by device.
        The batches follow from the texts alone, so the same texts give the same bits in any order. Raises UserError for
        an unknown name, and for a pair without the name of a task.
        """
        name, prompts = prompt_name or self.model.default_prompt_name, self._prompts
        if name is not None and name not in prompts:
            raise UserError(f"prompt_name is {name!r}; expected one of {', '.join(sorted(prompts))}")
        if self.is_pair and prompt_name not in ("query", *DOCUMENT_PROMPTS):
            raise UserError(
                "this retriever has one encoder for queries and one for documents: use encode_query or encode_document"
            )
        task = "query" if prompt_name == "query" else "document"
        return self._encode(texts, task, "" if name is None else prompts[name], tokens_per_batch)

    def encode_query(self, texts: Sequence[str], tokens_per_batch: int | None = None, autocast: bool = False) -> Tensor:
        """Encode texts to search with, behind their prompt, as `encode` does. `autocast` computes in bfloat16."""
        return self._encode(texts, "query", self.prompt("query"), tokens_per_batch, autocast)

    def encode_document(self, texts: Sequence[str], tokens_per_batch: int | None = None) -> Tensor:
        """Encode texts to search through, behind their prompt, as `encode` does."""
        return self._encode(texts, "document", self.prompt("document"), tokens_per_batch)

    def encode_tokens(
        self, ids: Sequence[np.ndarray], tokens_per_batch: int | None = None, task: str = "document"
    ) -> Tensor:
        """Encode tokenized texts, as `token_ids` returns them."""
        return self._encode_ids(ids, task, self.prompt(task), tokens_per_batch)

    def encode_with_gradient(
        self, ids: Sequence[np.ndarray], tokens_per_batch: int | None = None, task: str = "document"
    ) -> Tensor:
        """Encode tokenized texts with gradient: whole vectors, whatever `dims` is, on the encoder's device."""
        default = ENCODER_TOKENS_WITH_GRADIENT[self.device_kind]
        batches = list(self._batches(ids, task, tokens_per_batch or self._chunk_tokens or default))
        prompt_tokens = self._prompt_tokens[task, self.prompt(task)]
        # With chunks the loss is of all vectors and activations are of one chunk at a time: the backward pass computes
        # each again, with its dropout (GradCache, Gao et al. 2021).
        compute: Any = self if self._chunk_tokens is None else partial(checkpoint, self, use_reentrant=False)
        parts = [compute(*self._pad([ids[row] for row in rows], task), task, prompt_tokens) for rows in batches]
        return _put_back(torch.cat(parts), batches)

    def prepare_training(self, dropout: bool, gradient_checkpointing: bool, chunk_tokens: int | None = None) -> None:
        """Set how steps with gradient are computed: the encoder's dropout, and less memory for more time.

        With `chunk_tokens` the activations of so many padded tokens are in memory at a time.
        """
        self._chunk_tokens = chunk_tokens
        # transformers checkpoints in training mode only, which must not bring the encoder's own dropout with it.
        self._trains_as_train = dropout or gradient_checkpointing
        if not dropout:
            for module in self.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        if gradient_checkpointing:
            for backbone in self.backbones:
                # Older versions of transformers have the second name.
                name = "activation" if hasattr(backbone, "activation_checkpointing_enable") else "gradient"
                getattr(backbone, f"{name}_checkpointing_enable")({"use_reentrant": False})

    def train_mode(self) -> None:
        """Switch to a step with gradient; `eval` is for everything else, and for what is frozen."""
        self.train(self._trains_as_train)
        for backbone in self.backbones:
            if not any(weight.requires_grad for weight in backbone.parameters()):
                backbone.eval()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast, but keep the modules behind the transformer in float32: they cost nothing beside it."""
        super().to(*args, **kwargs)
        for task in TASKS:
            for module in self.modules_of(task)[1:]:
                module.float()
        return self

    def pair_with(self, queries: "Encoder") -> None:
        """Take the modules of queries from another encoder. Raises UserError for vectors of another width."""
        if queries.width != self.width:
            raise UserError(
                f"retriever.query_path: vectors of queries have {queries.width} numbers, those of documents "
                f"{self.width}; expected the two encoders of one retriever"
            )
        self._prompts["query"] = queries.prompt("query")
        self.model = joined(queries.modules_of("query"), self.modules_of("document"), self.model)
        self._count_prompts()

    def _read_documents(self, path: str, known: DocumentEncoder, max_tokens: int | None) -> None:
        """Load the encoder of documents that the tuned queries of `path` belong to."""
        mend = f"give the one of the training as retriever.path=MODEL, and retriever.query_path={path}"
        if known.path is None:
            raise UserError(f"{KEY}: {path} holds tuned queries, and does not name its documents' encoder; {mend}")
        try:
            documents = Encoder(
                known.path, self.similarity, max_tokens or self.max_tokens, document_prompt=self.prompt("document")
            )
        except UserError as error:
            raise UserError(
                f"{KEY}: {path} holds tuned queries, and the encoder of its documents, {known.path}, cannot be read "
                f"({error}); bring it back, or {mend}"
            ) from error
        if documents.documents_sha256() != known.sha256:
            raise UserError(
                f"{KEY}: {path} holds tuned queries, and {known.path} has other weights, modules or another prompt now "
                f"than when it encoded their documents; {mend}"
            )
        self.model = joined(self.modules_of("query"), documents.modules_of("document"), self.model)
        self._count_prompts()

    def require_documents_of(self, queries: "Encoder", path: str) -> None:
        """Raise UserError where the tuned queries of `path` belong to documents of another encoder than this one."""
        known = document_encoder(path)
        if known is None and not has_tuned_queries(path):
            return
        expected = known.sha256 if known else queries.documents_sha256()
        if self.documents_sha256() != expected:
            raise UserError(
                f"{path} holds tuned queries whose documents are encoded by another encoder than this one (other "
                f"weights, modules or prompt); expected {(known and known.path) or 'the one of their training'}"
            )

    def documents_sha256(self) -> str:
        """Return a hash of what makes documents' vectors: modules, prompt and weights, whatever files hold them."""
        weights = (
            (f"{place}.{name}", weight)
            for place, module in enumerate(self.modules_of("document"))
            for name, weight in module.named_parameters()
            if "pooler" not in name.split(".")  # drawn where files lack it, and of no use
        )
        return json_sha256([self.describe("document"), self.prompt("document"), numbers_sha256(weights)])

    def split(self) -> None:
        """Give queries modules of their own, which begin with the same weights. A pair stays as it is."""
        if not self.is_pair:
            self.pair_with(copy.deepcopy(self))

    def freeze(self, task: str) -> None:
        """Freeze one side of a pair."""
        assert self.is_pair, "split it first"
        for module in self.modules_of(task):
            module.requires_grad_(False)

    def save(self, folder: Path, documents: DocumentEncoder | None = None) -> None:
        """Write a folder that `SentenceTransformer` loads to the same vectors, a pair as a `Router`.

        With `documents`, queries alone are written: the folder names the encoder of documents, which stays as it was.
        Adapters are merged into the weights, and kept beside them as well.
        """
        folder.mkdir(parents=True, exist_ok=True)
        queries, model = self.modules_of("query"), self.model
        backbones = {"document_": self._backbone("document"), "query_": self._backbone("query")}
        if documents is not None or not self.is_pair:
            backbones = {"": self._backbone("query")}
        if documents is not None:
            model = joined(queries, queries, self.model)
        save_adapters(backbones, folder)
        merged(model).save(str(folder), create_model_card=False)
        write_checksums(folder)
        if documents is not None:
            mark_tuned_queries(folder, documents)
        as_other_files(folder)
        if self.temperature is not None:
            write_temperature(folder, self.temperature)

    def _end_by_similarity(self, leave_out: bool) -> None:
        """End each chain by a Normalize with cosine; leave it out at the end if that is asked for."""

        def ended(modules: list[nn.Module]) -> list[nn.Module]:
            if isinstance(modules[-1], Normalize):
                return modules[:-1] if leave_out else modules
            return [*modules, Normalize()] if self.similarity == "cosine" else modules

        documents = ended(self.modules_of("document"))
        queries = ended(self.modules_of("query")) if self.is_pair else documents
        self.model = joined(queries, documents, self.model)
        self.model.similarity_fn_name = self.similarity  # type: ignore[assignment]

    def _limit_tokens(self, max_tokens: int | None, path: str) -> None:
        """Cut documents at `max_tokens`, and queries there at most; it is saved, so that others cut texts alike."""
        if max_tokens is not None:
            most = most_tokens(self._backbone("document"))
            if not 0 < max_tokens <= most:
                raise UserError(f"retriever.max_tokens is {max_tokens}, but {path} holds at most {most} tokens")
            if self.is_pair:
                self.tokenizer_of("query").model_max_length = min(self._most("query"), max_tokens)
            self.tokenizer.model_max_length = max_tokens
        self._count_prompts()

    def _count_prompts(self) -> None:
        """Count, for each task, the tokens of each prompt that vectors leave out, if the folder says so."""
        self._prompt_tokens: dict[tuple[str, str], int] = {}
        for task in TASKS:
            leaves_out = not all(getattr(module, "include_prompt", True) for module in self.modules_of(task))
            for prompt in {"", *self._prompts.values()}:
                self._prompt_tokens[task, prompt] = self._num_tokens(prompt, task) if leaves_out else 0

    def _num_tokens(self, prompt: str, task: str) -> int:
        """Count a prompt with special tokens before it and without the one behind a text."""
        tokenizer = self.tokenizer_of(task)
        ids = tokenizer(prompt)["input_ids"] if prompt else []
        return len(ids) - (ids[-1] in tokenizer.all_special_ids) if ids else 0

    def _require_room(self) -> None:
        """Raise UserError for a prompt that leaves no token for the text."""
        for task in TASKS:
            prompt, most = self.prompt(task), self._most(task)
            if self._num_tokens(prompt, task) + 1 >= most:
                raise UserError(
                    f"retriever.{task}_prompt: {prompt[:40]!r} fills the {most} tokens of a text; expected "
                    "a shorter one, or more retriever.max_tokens"
                )

    @torch.inference_mode()
    def _require_vectors(self, path: str) -> int:
        """Return the numbers of a vector. Raises UserError for modules that do not make one of a text."""
        widths: list[int] = []
        for task in TASKS:
            try:
                ids = self._tokenize(["a"], task, "")
                inputs, mask = self._pad(ids, task)
                vectors, alone = self(inputs, mask, task), self(inputs[:, : len(ids[0])], None, task)
            except (RuntimeError, LookupError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{KEY}: the modules of {path} make no vector of a text ({self.describe(task)}): {error}"
                ) from error
            if vectors.ndim != 2 or (widths and vectors.shape[1] != widths[0]):
                raise UserError(f"{KEY}: {path} makes {list(vectors.shape)} numbers of a text; expected one vector")
            self._require_own_vector(vectors[0], alone[0], task, path)
            widths.append(vectors.shape[1])
        return widths[0]

    def _require_own_vector(self, padded: Tensor, alone: Tensor, task: str, path: str) -> None:
        """Raise UserError for a model that gives a text another vector beside longer ones, or after them."""
        model = self._backbone(task)
        if torch.cosine_similarity(padded, alone, dim=0) < 0.999:
            raise UserError(
                f"{KEY}: {path} holds a {type(model).__name__}, which reads padding as text, so that a vector would "
                "depend on the other texts of its batch; expected an encoder that follows an attention mask"
            )
        if getattr(model.config, "attention_type", None) == "block_sparse":  # until the first text of 704 tokens
            raise UserError(
                f"{KEY}: {path} holds a {type(model).__name__} with attention_type block_sparse, which it gives up for "
                "good at its first short batch; set attention_type to original_full in its config.json"
            )
        if self._most(task) > (limit := longrope_limit(model.config)):
            raise UserError(
                f"retriever.max_tokens: {path} reads a batch with a text beyond {limit} tokens by other frequencies "
                f"(longrope), but would read {self._most(task)}; set it to {limit} at most"
            )

    def _encode(
        self, texts: Sequence[str], task: str, prompt: str, tokens_per_batch: int | None, autocast: bool = False
    ) -> Tensor:
        ids = self._known(self._tokenize(texts, task, prompt), task)
        return self._encode_ids(ids, task, prompt, tokens_per_batch, autocast)

    def _known(self, ids: list[np.ndarray], task: str) -> list[np.ndarray]:
        warn_of_unknown(self.tokenizer_of(task), ids, task)
        return ids

    def _encode_ids(
        self, ids: Sequence[np.ndarray], task: str, prompt: str, tokens_per_batch: int | None, autocast: bool = False
    ) -> Tensor:
        if not ids:
            return torch.empty(0, self.dim)
        prompt_tokens = self._prompt_tokens[task, prompt]
        batches = list(self._batches(ids, task, tokens_per_batch or ENCODER_TOKENS[self.device_kind]))
        parts: list[Tensor] = [torch.empty(0)] * len(batches)

        def fill(number: int) -> None:
            with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                whole = self(*self._pad([ids[row] for row in batches[number]], task), task, prompt_tokens)
                parts[number] = first_numbers(whole, self.dims, self.similarity)

        if self.device_kind == "cpu":
            one_per_thread(fill, len(batches))
        else:
            for number in range(len(batches)):
                fill(number)
        return _put_back(torch.cat(parts), batches).cpu()

    def _tokenize(self, texts: Sequence[str], task: str, prompt: str) -> list[np.ndarray]:
        require_texts(texts, "texts")
        if not texts:
            return []
        rows = self._cut_ids([prompt + text for text in texts], task, self._most(task))
        dtype = np.uint16 if self._backbone(task).config.vocab_size < 2**16 else np.uint32  # as `TokenIds.dtype`
        return [np.array(row, dtype) for row in rows]

    def _cut_ids(self, texts: list[str], task: str, max_tokens: int) -> list[list[int]]:
        tokenizer = self.tokenizer_of(task)

        def tokenize(parts: list[str]) -> list[list[int]]:
            return tokenizer(parts, truncation=True, max_length=max_tokens)["input_ids"]

        return cut_ids(tokenize, texts, max_tokens)

    def is_cut(self, text: str, task: str) -> bool:
        """Return whether only the beginning of a text, behind the task's prompt, is read."""
        most = self._most(task)
        [ids] = self._cut_ids([self.prompt(task) + text], task, most + 1)
        return len(ids) > most

    def _batches(self, ids: Sequence[np.ndarray], task: str, tokens_per_batch: int) -> Iterator[list[int]]:
        """Yield rows of similar length; equal ones go by their content, so that the order given does not matter."""
        order = sorted(range(len(ids)), key=lambda row: ids[row].tobytes())
        most, kind = self._most(task), self.device_kind
        lengths = [padded_length(len(ids[row]), most, kind) for row in order]
        for batch in token_budget_batches(lengths, tokens_per_batch):
            yield [order[place] for place in batch]

    def _pad(self, ids: Sequence[np.ndarray], task: str) -> tuple[Tensor, Tensor | None]:
        """Return right-padded ids [B, T] on the encoder's device, and their mask unless no row is padded."""
        width = padded_length(max(map(len, ids)), self._most(task), self.device_kind)
        mask = np.arange(width) < np.array([len(row) for row in ids])[:, None]
        padding = self.tokenizer_of(task).pad_token_id or 0  # some causal models have none; any id does behind the mask
        inputs = np.full(mask.shape, padding, np.int64)
        inputs[mask] = np.concatenate(ids)
        hidden = None if mask.all() else to_device(torch.from_numpy(mask.astype(np.int64)), self.device)
        return to_device(torch.from_numpy(inputs), self.device), hidden

    def _most(self, task: str) -> int:
        return int(self.tokenizer_of(task).model_max_length)


class QueryEncoder(Encoder):
    """An encoder of queries alone: that of documents, which its folder may name, is not read."""

    _needs_documents = False


def _warn_of_prompts(path: str, prompts: dict[str, str]) -> None:
    """Name the prompts of a folder where none of them is known to be for queries."""
    others = [name for name, prompt in prompts.items() if prompt and name not in DOCUMENT_PROMPTS]
    if others and not any(prompts.get(name) for name in QUERY_PROMPTS):
        warn_once(
            f"retriever.query_prompt: {path} has prompts ({', '.join(others)}), and none is known to be for queries, "
            "so queries have none; give the one that its makers name"
        )


def _put_back(vectors: Tensor, batches: Sequence[Sequence[int]]) -> Tensor:
    """Return vectors that were computed batch by batch in the order of their rows."""
    places = torch.argsort(torch.tensor([row for rows in batches for row in rows]))
    return vectors.index_select(0, to_device(places, vectors.device))


def _in_words(module: nn.Module) -> str:
    if isinstance(module, Pooling):
        modes = [module.pooling_mode] if isinstance(module.pooling_mode, str) else module.pooling_mode
        return "+".join(modes) + ("" if module.include_prompt else " without the prompt")
    if isinstance(module, Dense):
        return f"Dense({module.out_features}, {type(module.activation_function).__name__})"
    return type(module).__name__


def _similarity(asked: str | None, said: str, path: str) -> str:
    """Return what is asked for, or else what the folder says."""
    if asked is not None and asked not in SIMILARITIES:
        raise UserError(f"similarity is {asked!r}; expected {' or '.join(SIMILARITIES)}")
    if asked is None and said not in SIMILARITIES:
        raise UserError(
            f"retriever.similarity: {path} says {said}, which no index has; expected {' or '.join(SIMILARITIES)}"
        )
    return asked or said


def require_finite_vectors(vectors: np.ndarray, ids: Sequence[str]) -> None:
    """Raise NotFiniteError naming the texts whose vectors [N, D] are no numbers: a search answers such a query too."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        named = ", ".join(ids[row] for row in bad[:3])
        raise NotFiniteError(
            f"the encoder's vectors of {len(bad)} of {len(ids)} texts are not finite, first {named}: did training "
            "diverge, or is the encoder's folder damaged?"
        )


def first_numbers(vectors: Tensor, count: int | None, similarity: str) -> Tensor:
    """Return the first `count` numbers of vectors [..., D], None for all; with cosine similarity of length 1 again.

    Raises ValueError where the vectors have fewer.
    """
    if count is None or count == vectors.shape[-1]:
        return vectors
    if not 0 < count < vectors.shape[-1]:
        raise ValueError(f"vectors of {vectors.shape[-1]} numbers have no first {count}")
    prefix = vectors[..., :count]
    return normalize(prefix, dim=-1) if similarity == "cosine" else prefix
