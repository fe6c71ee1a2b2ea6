"""REPLUG LSR: tune a dense retriever to a frozen, black-box language model.

The packages lie at the top of the repository and are imported as `replug.NAME`. The public names of the library are
attributes of `replug` itself (docs/library.md), imported on first use: torch and transformers take seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replug.config.errors import RunError, UserError
    from replug.data.sources.built_in_texts import example_rows
    from replug.index_workers.local_index import RunRetriever
    from replug.library import LSRTrainer, Results, evaluate, label, search
    from replug.models.black_box_lm import BlackBoxLM, ContinuationScore, Mixture
    from replug.models.encoder import Encoder
    from replug.models.encoder_retriever import EncoderRetriever, TextEncoder
    from replug.models.ensemble import Retrieved, Retriever, Weighting
    from replug.models.generation import Generated, GenerationOptions
    from replug.models.http.server_source import ServerLM
    from replug.models.local.hf_lm import HuggingFaceLM
    from replug.models.local.stand_in_lm import StandInLM
    from replug.models.prompt import PromptTemplate
    from replug.models.replug_lm import ReplugLM

__version__ = "0.1.0"

__all__ = [
    "BlackBoxLM",
    "ContinuationScore",
    "Encoder",
    "EncoderRetriever",
    "Generated",
    "GenerationOptions",
    "HuggingFaceLM",
    "LSRTrainer",
    "Mixture",
    "PromptTemplate",
    "ReplugLM",
    "Results",
    "Retrieved",
    "Retriever",
    "RunError",
    "RunRetriever",
    "ServerLM",
    "StandInLM",
    "TextEncoder",
    "UserError",
    "Weighting",
    "evaluate",
    "example_rows",
    "label",
    "search",
]

_MODULES = {
    "BlackBoxLM": "replug.models.black_box_lm",
    "ContinuationScore": "replug.models.black_box_lm",
    "Encoder": "replug.models.encoder",
    "EncoderRetriever": "replug.models.encoder_retriever",
    "Generated": "replug.models.generation",
    "GenerationOptions": "replug.models.generation",
    "HuggingFaceLM": "replug.models.local.hf_lm",
    "LSRTrainer": "replug.library",
    "Mixture": "replug.models.black_box_lm",
    "PromptTemplate": "replug.models.prompt",
    "ReplugLM": "replug.models.replug_lm",
    "Results": "replug.library",
    "Retrieved": "replug.models.ensemble",
    "Retriever": "replug.models.ensemble",
    "RunError": "replug.config.errors",
    "RunRetriever": "replug.index_workers.local_index",
    "ServerLM": "replug.models.http.server_source",
    "StandInLM": "replug.models.local.stand_in_lm",
    "TextEncoder": "replug.models.encoder_retriever",
    "UserError": "replug.config.errors",
    "Weighting": "replug.models.ensemble",
    "evaluate": "replug.library",
    "example_rows": "replug.data.sources.built_in_texts",
    "label": "replug.library",
    "search": "replug.library",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'replug' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
