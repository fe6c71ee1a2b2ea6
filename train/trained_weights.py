"""The trainable sides and weights of the retriever, in memory, in a checkpoint and in the tuned folder.

All weights learn, or adapters alone: LoRA (Hu et al. 2021) by peft. Two thin matrices beside some linear layers learn.

    y = W x + alpha / rank * B (A x)        A [rank, in] is drawn, B [out, rank] begins at 0

The adapted model is the same object with other layers. Saved weights are merged ones, W + alpha / rank * B A, in the
architecture's own names, and the adapter lies beside them in peft's form. Checkpoints hold only the trainable weights
and a hash of the others, which a resumed run has from `retriever.path`.
"""

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from replug.config.choices import TrainedSide
from replug.config.errors import UserError, require_extra
from replug.config.schema import Config, LoRAConfig, RetrieverConfig
from replug.data.folder import write_checksums
from replug.data.progress import Progress
from replug.data.store import CorpusStore, StoredCorpus
from replug.models.build import encoder_location, load_encoder
from replug.models.encoder import ADAPTER, Encoder
from replug.models.encoder_files import mark_tuned_queries, numbers_sha256
from replug.models.encoder_side import StaticSide
from replug.models.hardware import to_device

if TYPE_CHECKING:
    from peft import LoraConfig

UNTRAINED = "untrained_sha256"  # in a checkpoint of the trainable weights alone
PREFIX = "encoder."  # of the retriever's weights in a module's state
DOCUMENTS_PER_BLOCK = 1024  # between two lines of progress
POOLER = r"pooler\..*"  # no vector depends on it
SCALE = 2  # alpha / rank


class FrozenDocuments:
    """Gives vectors of documents that do not learn.

    A store has them. Otherwise the frozen document side of `encoder` computes them: at each step, or once for
    remembered rows.
    """

    def __init__(self, corpus: CorpusStore, encoder: Encoder) -> None:
        self.encoder = encoder
        self._corpus = corpus
        self._rows: np.ndarray | None = None
        self._vectors = torch.empty(0)

    def __call__(self, rows: np.ndarray) -> Tensor:
        """Return vectors [U, D] of the corpus' rows [U] on the encoder's device, without gradient."""
        if isinstance(self._corpus, StoredCorpus):
            known = torch.from_numpy(self._corpus.vectors(rows, self.encoder.similarity))
        elif self._rows is not None:
            known = self._vectors[torch.from_numpy(np.searchsorted(self._rows, rows))]
        else:
            with torch.no_grad():
                return self.encoder.encode_with_gradient(self.encoder.document_ids(self._corpus, rows))
        return to_device(known, self.encoder.device)

    def remember(self, rows: np.ndarray) -> None:
        """Embed `rows` (ascending) once; vectors of other rows must not be requested until `forget`."""
        if isinstance(self._corpus, StoredCorpus):
            return
        progress, blocks = Progress("embedding candidates", len(rows)), []
        for start in range(0, len(rows), DOCUMENTS_PER_BLOCK):
            block = rows[start : start + DOCUMENTS_PER_BLOCK]
            blocks.append(embedded(self.encoder, self._corpus, block))
            progress.advance(len(block))
        self._rows, self._vectors = rows, torch.cat(blocks)

    def forget(self) -> None:
        """Compute vectors at each step again."""
        self._rows, self._vectors = None, torch.empty(0)


def embedded(documents: Encoder, corpus: CorpusStore, rows: np.ndarray) -> Tensor:
    """Return vectors [N, D] of the corpus' rows, without gradient, on the CPU."""
    return documents.encode_tokens(documents.document_ids(corpus, rows))


def check_training(config: Config, encoder: Encoder) -> None:
    """Raise UserError, before anything heavy starts, if this encoder cannot be trained with the configured keys."""
    if config.lora.rank is not None:
        if any(isinstance(side, StaticSide) for side in encoder.sides.values()):
            raise UserError(
                f"lora.rank is set, but {config.retriever.path} is a StaticEmbedding: a table of a vector for each "
                "token, without layers; leave the key out"
            )
        for backbone in encoder.backbones:
            adapter_settings(backbone, config.lora)


def adapter_settings(backbone: PreTrainedModel, lora: LoRAConfig) -> "LoraConfig":
    """Return peft's settings. Raises UserError where peft is missing or does not know the architecture."""
    assert lora.rank is not None
    require_extra("lora", "peft", what="lora.rank")
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    targets = DEFAULTS.get(kind := backbone.config.model_type)
    if not targets:
        raise UserError(f"lora.rank is set, but peft does not know which layers of {kind} to adapt; leave it out")
    return LoraConfig(
        r=lora.rank,
        lora_alpha=SCALE * lora.rank,
        target_modules=list(targets),
        exclude_modules=POOLER,
        task_type="FEATURE_EXTRACTION",
        base_model_name_or_path=backbone.name_or_path,
    )


def add_adapters(backbone: PreTrainedModel, lora: LoRAConfig, seed: int) -> None:
    """Put adapters beside the target layers; the rest of the model is then frozen.

    The same seed draws the same A. Raises UserError as `adapter_settings` does.
    """
    settings = adapter_settings(backbone, lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone.add_adapter(settings)


def choose_trained_weights(config: Config, encoder: Encoder) -> None:
    """Add adapters to the trained sides if LoRA is on, and freeze all other weights.

    The encoder keeps the hash of the frozen weights.
    """
    if config.lora.rank is None:
        return
    backbones = [backbone for backbone in encoder.backbones if any(w.requires_grad for w in backbone.parameters())]
    encoder.requires_grad_(False)
    for backbone in backbones:
        add_adapters(backbone, config.lora, config.seed)
    untrained = ((name, weight) for name, weight in encoder.named_parameters() if not weight.requires_grad)
    encoder.untrained_sha256 = numbers_sha256(untrained)


def leave_out_untrained(encoder: Encoder, checkpoint: dict[str, Any]) -> None:
    """Remove the untrained weights from a checkpoint that is about to be written."""
    if encoder.untrained_sha256 is None:
        return
    trained = _trained_names(encoder)
    checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
    checkpoint[UNTRAINED] = encoder.untrained_sha256


def bring_back_untrained(encoder: Encoder, checkpoint: dict[str, Any]) -> None:
    """Add the untrained weights to a loaded checkpoint. Raises UserError if the retriever's weights have changed."""
    if checkpoint.get(UNTRAINED) != encoder.untrained_sha256:
        raise UserError(
            "retriever.path: its weights differ from those at the start of the run, and the checkpoint holds only the "
            "trainable weights: bring the first ones back, or give another run_dir"
        )
    if encoder.untrained_sha256 is None:
        return
    own, trained = encoder.state_dict(prefix=PREFIX), _trained_names(encoder)
    untrained = {name: value for name, value in own.items() if name not in trained}
    checkpoint["state_dict"] = checkpoint["state_dict"] | untrained  # loading reports missing names


def prepare_encoder(config: Config, encoder: Encoder, corpus: CorpusStore) -> FrozenDocuments | None:
    """Make an encoder ready for its first step; returns the documents that do not learn, None if they learn."""
    side = config.retriever.train
    copied = freeze_sides(side, encoder)
    encoder.chunk_tokens = config.train.chunk_tokens
    choose_trained_weights(config, encoder)
    return FrozenDocuments(corpus, copied or encoder) if side is TrainedSide.query else None


def encoder_of_checkpoint(config: Config, checkpoint: Mapping[str, Any]) -> Encoder:
    """Return the retriever of a checkpoint, with its adapters. Raises UserError as `bring_back_untrained` does."""
    encoder, whole = load_encoder(config.retriever), dict(checkpoint)
    freeze_sides(config.retriever.train, encoder)
    choose_trained_weights(config, encoder)
    bring_back_untrained(encoder, whole)
    encoder.load_state_dict({name.removeprefix(PREFIX): value for name, value in whole["state_dict"].items()})
    return encoder


def _trained_names(encoder: Encoder) -> set[str]:
    return {PREFIX + name for name, weight in encoder.named_parameters() if weight.requires_grad}


def freeze_sides(side: TrainedSide, encoder: Encoder) -> Encoder | None:
    """Freeze the untrained side of a pair; an encoder with tuned documents alone is a pair.

    Returns a frozen copy for documents if one encoder has both sides and its queries alone are tuned, else None.
    """
    if side is TrainedSide.documents:
        encoder.freeze("query")
    if side is not TrainedSide.query:
        return None
    if not encoder.is_pair:
        return copy.deepcopy(encoder).requires_grad_(False).eval()
    encoder.freeze("document")
    return None


def save_retriever(
    folder: Path,
    encoder: Encoder,
    retriever: RetrieverConfig,
    documents: Encoder | None = None,
    source: Path | None = None,
) -> None:
    """Write the tuned retriever: one encoder, a pair, or queries alone with the name of their documents' encoder.

    `documents` is the untuned encoder for documents, if one encoder had both sides and its queries alone were tuned.
    `source` is the folder of `encoder`, with adapters to keep. Queries tuned alone are marked: an older index holds the
    vectors of the same documents, and they search it.
    """
    if documents is not None:
        is_here = Path(retriever.path).expanduser().exists()
        path = encoder_location(retriever.path) if is_here else retriever.path
        encoder.save(folder, {"path": path, "sha256": documents.documents_sha256()})
    else:
        encoder.save(folder)
        if retriever.train is TrainedSide.query:
            mark_tuned_queries(folder, None)
    adapters = [kept for kept in source.glob(f"*{ADAPTER}") if kept.is_dir()] if source else []
    for kept in adapters:
        shutil.copytree(kept, folder / kept.name, dirs_exist_ok=True)
    if adapters:
        write_checksums(folder)
