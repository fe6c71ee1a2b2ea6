"""DPR's two encoders as transformers saves them: small, random, and different."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, DPRConfig, DPRContextEncoder, DPRQuestionEncoder, PreTrainedModel

from replug.models.packaged import write_stand_in_encoder


def write_dpr(folder: Path, kind: type[PreTrainedModel], seed: int, projection_dim: int = 0) -> Path:
    """One of DPR's models with the stand-in's words."""
    write_stand_in_encoder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = DPRConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.2,
        projection_dim=projection_dim,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder)
    return folder


def write_dpr_pair(folder: Path) -> tuple[Path, Path]:
    """Encoders of documents and of questions."""
    return write_dpr(folder / "ctx", DPRContextEncoder, 1), write_dpr(folder / "question", DPRQuestionEncoder, 2)
