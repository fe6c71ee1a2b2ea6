"""The transformer of an encoder: which class of transformers it is, and what of it can make a vector of a text.

Code that comes with a model is never run: an architecture that transformers does not have is refused.
"""

from typing import Any

import torch
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    DPRContextEncoder,
    DPRQuestionEncoder,
    MT5EncoderModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5EncoderModel,
    UMT5EncoderModel,
)

from replug.config.errors import UserError
from replug.models.encoder_modules import CLS, LAST
from replug.models.fused_layers import use_fused_gelu
from replug.models.model_files import load_whole
from replug.models.module_chain import KEY

DPR_ENCODERS = {"DPRContextEncoder": DPRContextEncoder, "DPRQuestionEncoder": DPRQuestionEncoder}
# Of models with a decoder, those whose encoder stands alone (GTR, Sentence-T5).
T5_ENCODERS = {"t5": T5EncoderModel, "mt5": MT5EncoderModel, "umt5": UMT5EncoderModel}
PROBE_TOKENS = 4  # of two short texts that differ after their first token
# Of no use to vectors: the pooler, and the heads that a model was pretrained with.
UNUSED = ("pooler", "cls.predictions", "cls.seq_relationship", "lm_head")
NO_LIMIT = 10**9  # a tokenizer of which transformers knows no limit has an absurd one
UNKNOWN_LIMIT = 512  # tokens, where neither tokenizer nor model says any


def load_backbone(path: str, config: PreTrainedConfig, is_in_chain: bool) -> PreTrainedModel:
    """The weights in float32. `is_in_chain` is whether a `modules.json` says that this is an encoder."""
    if is_dpr(config):
        model = _load_dpr(path, config)
    elif config.model_type in T5_ENCODERS and (is_in_chain or "EncoderModel" in str(config.architectures)):
        model = _load(T5_ENCODERS[config.model_type], path, config, "decoder")
    else:
        model = _load(AutoModel, path, config)
    if not isinstance(getattr(model.config, "hidden_size", None), int):
        raise UserError(f"{KEY}: {path} holds a {type(model).__name__}; expected an encoder of text alone")
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # a causal model would keep keys and values of every token
    if getattr(model, "pooler", None) is not None:
        model.pooler.requires_grad_(False)  # no pooling uses it
    use_fused_gelu(model)
    return model


def require_encoder(model: PreTrainedModel, path: str, modes: tuple[str, ...] | None) -> None:
    """Raise UserError for what makes no vector of a text: an encoder with a decoder, or a causal LM.

    `modes` are the poolings that the folder asks for, None where it says nothing. A causal model's first state knows
    nothing of the tokens after it, so a mean of states is mostly that of words without their context.
    """
    if model.config.is_encoder_decoder:
        raise UserError(f"{KEY}: {path} holds a {type(model).__name__}, which has a decoder; expected an encoder alone")
    if (modes is not None and CLS not in modes) or not _is_causal(model):
        return
    pooled = f" and pools by {CLS}" if modes else ""
    raise UserError(
        f"{KEY}: {path} holds a {type(model).__name__}, which reads from left to right as language models do{pooled}; "
        f"expected a BERT-like encoder, or a folder of sentence-transformers that pools by {LAST}"
    )


def token_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_seq_length: int | None) -> int:
    """The smallest of what the folder, else its tokenizer, declares, and what the position table holds."""
    declared = max_seq_length or int(getattr(tokenizer, "model_max_length", NO_LIMIT))
    limit = min(declared, most_tokens(model))
    return limit if limit < NO_LIMIT else UNKNOWN_LIMIT


def most_tokens(model: PreTrainedModel) -> int:
    """What the position table holds; NO_LIMIT without one.

    RoBERTa and its kin count positions from behind the padding's, so their table holds fewer tokens than it has rows.
    """
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if isinstance(table, torch.nn.Embedding):
        return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    positions = getattr(model.config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else NO_LIMIT


def is_dpr(config: PreTrainedConfig) -> bool:
    return config.model_type == "dpr"


def _load(kind: Any, path: str, config: PreTrainedConfig, *unused: str) -> PreTrainedModel:
    return load_whole(kind, path, KEY, (*UNUSED, *unused), config=config, dtype=torch.float32)


def _load_dpr(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The BERT inside one of DPR's two encoders (Karpukhin et al. 2020): the one that the folder holds.

    `AutoModel` takes every one of them for an encoder of questions, and would draw the weights of the other at random.
    """
    name = (config.architectures or ["nameless part"])[0]
    if name not in DPR_ENCODERS or config.projection_dim:
        raise UserError(
            f"{KEY}: {path} holds a {name} of DPR, projection_dim {config.projection_dim}; "
            f"expected {' or '.join(DPR_ENCODERS)} without a projection"
        )
    whole = _load(DPR_ENCODERS[name], path, config)
    fields = config.to_dict() | {"model_type": "bert", "architectures": ["BertModel"]}
    bert = BertModel(BertConfig.from_dict(fields), add_pooling_layer=False)
    bert.load_state_dict(whole.get_submodule(f"{whole.base_model_prefix}.bert_model").state_dict())
    return bert


def _is_causal(model: PreTrainedModel) -> bool:
    """Whether the first state is the same whatever comes after it."""
    texts = torch.arange(PROBE_TOKENS).repeat(2, 1)
    texts[1, 1:] += PROBE_TOKENS
    with torch.inference_mode():
        first, other = model.eval()(input_ids=texts, attention_mask=torch.ones_like(texts)).last_hidden_state[:, 0]
    return torch.allclose(first, other, rtol=0, atol=1e-6)
