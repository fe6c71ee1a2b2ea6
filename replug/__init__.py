"""REPLUG LSR: tune a dense retriever to a frozen, black-box language model.

The packages lie at the top of the repository and have one name here, `replug.NAME`. What README shows is imported from
`replug` itself, and only when it is asked for: torch and transformers take seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replug.models.encoder import Encoder
    from replug.models.encoder_retriever import EncoderRetriever
    from replug.models.local.hf_lm import HuggingFaceLM
    from replug.models.replug_lm import ReplugLM

__all__ = ["Encoder", "EncoderRetriever", "HuggingFaceLM", "ReplugLM"]

_MODULES = {
    "Encoder": "replug.models.encoder",
    "EncoderRetriever": "replug.models.encoder_retriever",
    "HuggingFaceLM": "replug.models.local.hf_lm",
    "ReplugLM": "replug.models.replug_lm",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'replug' has no attribute {name!r}")
