"""The trainable retriever: the modules of a `SentenceTransformer`, from a text to its vector.

E(t) is the mean of the last hidden states over the tokens of t (REPLUG, section 3.1), or the output of the folder's own
modules. With cosine similarity the last module is a `Normalize`. Queries and documents each have their prompt, and in a
pair (DPR) their own modules, as the routes of a `Router`. replug adds batches by a budget of padded tokens, stored
token ids of a corpus, float32 behind the transformer, and vectors with gradient.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Router
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from replug.config.errors import NotFiniteError, UserError
from replug.config.paths import MODEL, require_name
from replug.data.files import as_other_files, json_sha256
from replug.data.folder import write_checksums
from replug.data.store import CorpusStore
from replug.data.tokenizing import TokenIds
from replug.models.batching import ENCODER_TOKENS, ENCODER_TOKENS_WITH_GRADIENT
from replug.models.encoder_files import (
    KEY,
    TASKS,
    chain,
    document_encoder,
    has_tuned_queries,
    load_container,
    mark_tuned_queries,
    most_tokens,
    numbers_sha256,
)
from replug.models.encoder_side import side_of
from replug.models.ensemble_temperature import EnsembleTemperature, temperature_in, write_temperature
from replug.models.hardware import one_per_thread, to_device
from replug.models.model_files import warn_once
from replug.models.packaged import resolve_encoder_path

SIMILARITIES = ("cosine", "dot")
# Names of prompts in a folder; the first non-empty prompt counts. The names are sentence-transformers' own, and the
# retrieval prompts of nomic, jina, stella and e5-mistral.
PROMPTS = {
    "document": ("document", "passage", "corpus", "search_document", "retrieval.passage", "retrieval_document"),
    "query": ("query", "search_query", "retrieval.query", "retrieval_query", "s2p_query", "web_search_query"),
}
ADAPTER = "adapter"  # the folder beside the merged weights; a pair has document_adapter and query_adapter


class Encoder(nn.Module):
    """An encoder of texts as vectors [B, D]. `similarity` is `cosine` (unit vectors) or `dot`.

    `path` is a folder, a hub name, `package:minilm`, or a run directory with a tuned retriever. None means the folder's
    own setting; the default similarity is cosine. With `dot`, unless the folder itself sets it, a Normalize at the end
    of the modules is left out. `query_path` is an encoder for queries alone. A folder of tuned queries names its
    documents' encoder, which is loaded too and compared. `dims` cuts vectors to their first numbers (`index.dims`, by
    default the folder's `truncate_dim`); the weights are the same. `temperature` is the ensemble's temperature from the
    same folder, or None; `save` writes it again.

    `model` is the `SentenceTransformer`. A `task` is "query" or "document"; `sides` holds the modules, tokenizer and
    prompt of each.

    >>> encoder = Encoder("package:minilm")  # or a run, a folder, a name on the hub
    >>> boat, ship, dog = encoder.encode(["a boat", "a ship", "a dog"])
    >>> bool(boat @ ship > boat @ dog)
    True
    """

    temperature: EnsembleTemperature | None
    own_similarity: str | None  # the folder's; None: it has none, and cosine is assumed
    untrained_sha256: str | None = None  # of the weights that training leaves as they are; None: it changes all
    chunk_tokens: int | None = None  # padded tokens whose activations memory holds in a step; None: all
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
        require_name(KEY, path, MODEL, "a folder of a model, or a name on the hub")  # once: loading repeats it
        container = load_container(path)
        queries, documents = (chain(container, task) for task in TASKS)
        own = container._similarity_fn_name or ("cosine" if isinstance(documents[-1], Normalize) else None)
        self.own_similarity, self.similarity = own, similarity or own or "cosine"
        if self.similarity not in SIMILARITIES:
            raise UserError(
                f"retriever.similarity is {self.similarity} for {path}; expected {' or '.join(SIMILARITIES)}, as "
                "an index needs"
            )
        container.similarity_fn_name = self.similarity  # type: ignore[assignment]
        container.prompts |= self._prompts(container, query_prompt, document_prompt, path)
        ends = self._ended(documents)
        self._use(ends if queries == documents else self._ended(queries), ends, container)
        if max_tokens is not None:
            self._limit_tokens(max_tokens, path)
        self.temperature = temperature_in(path)
        self.eval()
        self.width, *others = (side.require_vector(path) for side in self.sides.values())
        if others != [self.width]:
            raise UserError(f"{KEY}: {path} makes vectors of {self.width} and {others[0]} numbers; expected one width")
        if query_path is not None:
            tuned = QueryEncoder(query_path, self.similarity, max_tokens, query_prompt=query_prompt)
            self._require_documents_of(tuned, resolve_encoder_path(query_path))
            self.pair_with(tuned)
            self.temperature = tuned.temperature or self.temperature
        elif self._needs_documents and (known := document_encoder(path)) is not None:
            self._read_documents(path, known, max_tokens)
        for side in self.sides.values():
            side.require_room()
        self.dims = self._searched_dims(dims, path)
        if device is not None:
            self.to(device)

    def _ended(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Return modules that end with a Normalize for cosine, and without one for a dot that is not the folder's."""
        if isinstance(modules[-1], Normalize):
            return modules[:-1] if self.similarity == "dot" != self.own_similarity else modules
        return [*modules, Normalize()] if self.similarity == "cosine" else modules

    def _use(self, queries: list[nn.Module], documents: list[nn.Module], settings: SentenceTransformer) -> None:
        """Set the modules of both sides; `settings` has their prompts."""
        self.model = _joined(queries, documents, settings)
        prompts: dict[str, str] = dict(settings.prompts)  # type: ignore[arg-type]
        self.sides = {task: side_of(task, chain(self.model, task), prompts[task]) for task in TASKS}

    def _prompts(
        self, container: SentenceTransformer, query: str | None, document: str | None, path: str
    ) -> dict[str, str]:
        """Return the given prompts, by default the folder's, and warn if none of its prompts is for queries."""
        own: dict[str, str] = container.prompts  # type: ignore[assignment]
        known = {task: next((own[name] for name in names if own.get(name)), "") for task, names in PROMPTS.items()}
        others = [name for name, prompt in own.items() if prompt and name not in PROMPTS["document"]]
        if query is None and others and not known["query"]:
            warn_once(
                f"retriever.query_prompt: {path} has prompts ({', '.join(others)}), and none is known to be for "
                "queries, so queries have none; set the prompt that the model's documentation names"
            )
        given = {task: prompt for task, prompt in (("query", query), ("document", document)) if prompt is not None}
        return known | given

    def _limit_tokens(self, max_tokens: int, path: str) -> None:
        """Cut documents at `max_tokens`, and queries there at most; the limit is saved with the weights."""
        queries, documents = self.sides.values()
        most = most_tokens(documents.backbone)
        if not 0 < max_tokens <= most:
            raise UserError(f"retriever.max_tokens is {max_tokens}, but {path} holds at most {most} tokens")
        if self.is_pair:
            queries.max_tokens = min(queries.max_tokens, max_tokens)
        documents.max_tokens = max_tokens

    def _searched_dims(self, dims: int | None, path: str) -> int | None:
        """Return the width of cut vectors, by default the folder's `truncate_dim`; None for whole vectors."""
        if dims is not None and not 0 < dims <= self.width:
            raise UserError(
                f"index.dims is {dims}, but vectors of {path} have {self.width} numbers; expected at most {self.width}"
            )
        wanted = dims or self.model.truncate_dim or self.width
        dims = wanted if wanted < self.width else None
        if self.model.truncate_dim:
            self.model.truncate_dim = dims
        return dims

    @property
    def dim(self) -> int:
        """Return the width of the vectors for a search: the first `dims` numbers, or all `width`."""
        return self.dims or self.width

    @property
    def is_pair(self) -> bool:
        """Return whether queries and documents have separate modules."""
        return self.sides["query"].modules != self.sides["document"].modules

    @property
    def pooling(self) -> str:
        """Return a description of the modules behind the transformer, as an index stores it."""
        queries, documents = (side.describe(self.similarity) for side in self.sides.values())
        return f"{documents}; queries {queries}" if self.is_pair else documents

    def prompt(self, task: str) -> str:
        """Return the text before each query, or before each document."""
        return self.sides[task].prompt

    @property
    def backbones(self) -> list[Any]:
        """Return the model or table of documents, followed by the one of queries if it is separate."""
        queries, documents = (side.backbone for side in self.sides.values())
        return [documents] if queries is documents else [documents, queries]

    @property
    def device(self) -> torch.device:
        """Return the device of the models."""
        return self.sides["document"].device

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a document that are read, its prompt included."""
        return self.sides["document"].max_tokens

    @property
    def token_rule(self) -> TokenIds:
        """Return the rule from documents to token ids, for processes without the encoder."""
        return self.sides["document"].token_rule

    def token_ids(self, texts: Sequence[str], task: str = "document") -> list[np.ndarray]:
        """Return the ids of each text with the task's prompt and special tokens, cut at the token limit."""
        return self.sides[task].token_ids(texts)

    def document_ids(self, corpus: CorpusStore, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return token ids of documents: the stored ids if this tokenizer and prompt made them, else from the texts."""
        if corpus.tokens_by is not None and corpus.tokens_by == self.token_rule.fingerprint:
            return corpus.token_ids(rows)
        return self.token_ids(corpus.embedded_texts(rows))

    def encode(self, texts: Sequence[str], tokens_per_batch: int | None = None) -> Tensor:
        """Return vectors [N, D] float32 in the order given, on the CPU, without gradient, and without a prompt.

        `tokens_per_batch` is the padded tokens in a pass; None means a default by device. The batches follow from the
        texts alone, so the same texts give the same bits in any order. Raises UserError for a pair.
        """
        if self.is_pair:
            raise UserError(
                "this retriever has one encoder for queries and one for documents: use encode_query or encode_document"
            )
        return self.encode_tokens(self.sides["document"].token_ids(texts, ""), tokens_per_batch, prompt="")

    def encode_query(self, texts: Sequence[str], tokens_per_batch: int | None = None, autocast: bool = False) -> Tensor:
        """Encode queries, with their prompt, as `encode` does. `autocast` computes in bfloat16."""
        return self.encode_tokens(self.token_ids(texts, "query"), tokens_per_batch, "query", autocast)

    def encode_document(self, texts: Sequence[str], tokens_per_batch: int | None = None) -> Tensor:
        """Encode documents, with their prompt, as `encode` does."""
        return self.encode_tokens(self.token_ids(texts), tokens_per_batch)

    def encode_tokens(
        self,
        ids: Sequence[np.ndarray],
        tokens_per_batch: int | None = None,
        task: str = "document",
        autocast: bool = False,
        prompt: str | None = None,
    ) -> Tensor:
        """Encode texts as ids from `token_ids`; `prompt` is the prompt in them, by default the task's."""
        if not ids:
            return torch.empty(0, self.dim)
        side = self.sides[task]
        left_out = side.left_out(side.prompt if prompt is None else prompt)
        batches = list(side.batches(ids, tokens_per_batch or ENCODER_TOKENS[side.device_kind]))

        def compute(rows: Sequence[int]) -> Tensor:
            with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                return first_numbers(side.vectors([ids[row] for row in rows], left_out), self.dims, self.similarity)

        parts = one_per_thread(compute, batches) if side.device_kind == "cpu" else [*map(compute, batches)]
        return _put_back(torch.cat(parts), batches).cpu()

    def encode_with_gradient(
        self, ids: Sequence[np.ndarray], tokens_per_batch: int | None = None, task: str = "document"
    ) -> Tensor:
        """Encode tokenized texts with gradient: whole vectors, whatever `dims` is, on the encoder's device."""
        side = self.sides[task]
        default = ENCODER_TOKENS_WITH_GRADIENT[side.device_kind]
        batches = list(side.batches(ids, tokens_per_batch or self.chunk_tokens or default))
        left_out = side.left_out(side.prompt)
        # With chunks the loss covers all vectors, but memory holds the activations of one chunk at a time: the backward
        # pass computes each chunk again (GradCache, Gao et al. 2021).
        chunked: Any = partial(checkpoint, side.forward, use_reentrant=False)
        compute = side.forward if self.chunk_tokens is None else chunked
        parts = [compute(*side.pad([ids[row] for row in rows]), left_out) for rows in batches]
        return _put_back(torch.cat(parts), batches)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast, but keep all modules except a transformer in float32: they cost nothing beside it."""
        super().to(*args, **kwargs)
        for side in self.sides.values():
            for module in side.exact_modules:
                module.float()
        return self

    def pair_with(self, queries: "Encoder") -> None:
        """Take the modules of queries from another encoder. Raises UserError for vectors of another width."""
        if queries.width != self.width:
            raise UserError(
                f"retriever.query_path: vectors of queries have {queries.width} numbers, vectors of documents "
                f"{self.width}; expected the two encoders of one retriever"
            )
        self.model.prompts["query"] = queries.prompt("query")
        self._use(queries.sides["query"].modules, self.sides["document"].modules, self.model)

    def _read_documents(self, path: str, known: Mapping[str, str], max_tokens: int | None) -> None:
        """Load the encoder of documents that the tuned queries of `path` belong to."""
        fix = f"set retriever.path to the documents' encoder of the training, and retriever.query_path={path}"
        try:
            documents = Encoder(
                known["path"], self.similarity, max_tokens or self.max_tokens, document_prompt=self.prompt("document")
            )
        except UserError as error:
            raise UserError(
                f"{KEY}: {path} holds tuned queries, and the encoder of its documents, {known['path']}, cannot be read "
                f"({error}); bring it back, or {fix}"
            ) from error
        if documents.documents_sha256() != known["sha256"]:
            raise UserError(
                f"{KEY}: {path} holds tuned queries, and {known['path']} has other weights, modules or another prompt "
                f"now than when it encoded their documents; {fix}"
            )
        self._use(self.sides["query"].modules, documents.sides["document"].modules, self.model)

    def _require_documents_of(self, queries: "Encoder", path: str) -> None:
        """Raise UserError if the tuned queries of `path` were trained with another documents' encoder."""
        known = document_encoder(path)
        if known is None and not has_tuned_queries(path):
            return
        if self.documents_sha256() != (known["sha256"] if known else queries.documents_sha256()):
            raise UserError(
                f"{path} holds tuned queries for documents of another encoder than this one (other weights, modules "
                f"or prompt); expected {known['path'] if known else 'the documents encoder of their training'}"
            )

    def documents_sha256(self) -> str:
        """Return a hash of the documents' modules, prompt and weights, independent of the files."""
        weights = (
            (f"{place}.{name}", weight)
            for place, module in enumerate(self.sides["document"].modules)
            for name, weight in module.named_parameters()
            if "pooler" not in name.split(".")  # random if files lack it, and never used
        )
        side = self.sides["document"]
        return json_sha256([side.describe(self.similarity), side.prompt, numbers_sha256(weights)])

    def split(self) -> None:
        """Give queries a separate copy of the modules. A pair stays as it is."""
        if not self.is_pair:
            self.pair_with(copy.deepcopy(self))

    def freeze(self, task: str) -> None:
        """Freeze one side of a pair."""
        assert self.is_pair, "split it first"
        for module in self.sides[task].modules:
            module.requires_grad_(False)

    def save(self, folder: Path, documents: Mapping[str, str] | None = None) -> None:
        """Write a folder that `SentenceTransformer` loads to the same vectors, a pair as a `Router`.

        With `documents`, as `document_encoder` returns them, queries alone are written: the folder names the encoder
        of documents, which stays as it was. Adapters are merged into the weights, and kept beside them in peft's form.
        """
        folder.mkdir(parents=True, exist_ok=True)
        queries, model = self.sides["query"], self.model
        if documents is not None:  # which moves the modules to the CPU
            model = _joined(queries.modules, queries.modules, model)
        written = self.sides if documents is None and self.is_pair else {"": queries}
        for task, side in written.items():
            if _has_adapters(side.backbone):
                side.backbone.save_pretrained(folder / (f"{task}_{ADAPTER}" if task else ADAPTER))
        _merged(model).save(str(folder), create_model_card=False)
        write_checksums(folder)
        if documents is not None:
            mark_tuned_queries(folder, documents)
        as_other_files(folder)
        if self.temperature is not None:
            write_temperature(folder, self.temperature)


class QueryEncoder(Encoder):
    """An encoder of queries alone; the documents' encoder, which its folder may name, is not loaded."""

    _needs_documents = False


def _joined(queries: list[nn.Module], documents: list[nn.Module], settings: SentenceTransformer) -> SentenceTransformer:
    """Return one model from two chains of modules and the settings of another: a `Router` unless they are the same."""
    modules: Any = documents
    if queries != documents:
        routes: tuple[Any, Any] = queries, documents
        # Without a default route: a text without a task is refused, not taken for a document.
        modules = [Router.for_query_document(*routes, default_route=None, allow_empty_key=False)]
    prompts: Any = dict(settings.prompts)
    return SentenceTransformer(
        modules=modules,
        device="cpu",
        prompts=prompts,
        default_prompt_name=settings.default_prompt_name,
        similarity_fn_name=settings.similarity_fn_name,
        truncate_dim=settings.truncate_dim,
    )


def _has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _merged(model: SentenceTransformer) -> SentenceTransformer:
    """Return a copy with adapters merged into its weights; the model itself if it has none.

    The trained weights stay separate: a merge in place and its reversal would change their last bits.
    """
    if not any(map(_has_adapters, model.modules())):
        return model
    from peft.tuners.lora import LoraLayer

    whole = copy.deepcopy(model)
    layers: list[tuple[str, Any]] = [pair for pair in whole.named_modules() if isinstance(pair[1], LoraLayer)]
    for name, layer in layers:
        with torch.autocast(layer.weight.device.type, enabled=False):
            layer.merge()
        whole.set_submodule(name, layer.get_base_layer())
    adapted: list[Any] = [part for part in whole.modules() if _has_adapters(part)]
    for part in adapted:
        del part.peft_config
        part._hf_peft_config_loaded = False  # it would save its adapters alone
    return whole


def _put_back(vectors: Tensor, batches: Sequence[Sequence[int]]) -> Tensor:
    """Return the vectors of batches in the order of their rows."""
    places = torch.argsort(torch.tensor([row for rows in batches for row in rows]))
    return vectors.index_select(0, to_device(places, vectors.device))


def require_finite_vectors(vectors: np.ndarray, ids: Sequence[str]) -> None:
    """Raise NotFiniteError naming texts with vectors [N, D] that are not finite: a search would answer them too."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        named = ", ".join(ids[row] for row in bad[:3])
        raise NotFiniteError(
            f"the encoder's vectors of {len(bad)} of {len(ids)} texts are not finite, first {named}: did training "
            "diverge, or is the encoder's folder damaged?"
        )


def first_numbers(vectors: Tensor, count: int | None, similarity: str) -> Tensor:
    """Return the first `count` numbers of vectors [..., D], None for all; cosine similarity normalizes them again."""
    if count is None or count == vectors.shape[-1]:
        return vectors
    prefix = vectors[..., :count]
    return normalize(prefix, dim=-1) if similarity == "cosine" else prefix
