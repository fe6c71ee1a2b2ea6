"""A tiny random LM of every architecture that transformers knows as a causal LM, made from its configuration class.

Every limit that a configuration names (windows, chunks, longrope's original length) is LIMIT tokens here, so that texts
of MAX_TOKENS lie on both sides of it.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.tiny_lms import VOCABULARY, write_tokenizer

LIMIT, MAX_TOKENS = 80, 128
SIZES = {
    LIMIT: "sliding_window attention_chunk_size window_size attention_window_size local_attention"
    " original_max_position_embeddings",
    MAX_TOKENS: "max_position_embeddings n_positions max_seq_len seq_length context_length index_topk",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    64: "intermediate_size d_inner dim_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size",
    32: "hidden_size d_model n_embd embedding_size emb_dim word_embed_proj_dim moe_intermediate_size"
    " shared_expert_intermediate_size expert_ffn_hidden_size",
    16: "q_lora_rank kv_lora_rank v_head_dim mamba_d_head mamba_head_dim router_hidden_size global_head_dim",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim mamba_d_state state_size chunk_size ssm_state_size mamba_chunk_size"
    " linear_key_head_dim linear_value_head_dim index_head_dim hidden_size_per_layer_input",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads decoder_attention_heads"
    " encoder_attention_heads rotary_dim num_experts n_routed_experts num_local_experts mamba_n_heads mamba_num_heads"
    " index_n_heads linear_num_value_heads",
    2: "decoder_layers encoder_layers num_key_value_heads num_experts_per_tok moe_topk linear_num_key_heads"
    " linear_conv_kernel_dim",
    1: "eos_token_id pad_token_id padding_idx n_group topk_group first_k_dense_replace",
    0: "bos_token_id",
    0.3: "initializer_range init_std",
}
KEYS = {key: value for value, keys in SIZES.items() for key in keys.split()} | {"is_decoder": True}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Of families whose classes do not fit KEYS; a key that is None keeps its default.
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk2": {"num_key_value_heads": 4},
    "bailing_hybrid": {"num_local_experts": 4, "n_group": 1, "num_experts_per_tok": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "cpmant": {"prompt_types": 2, "prompt_length": 2, "segment_types": 32},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v32": {"num_key_value_heads": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": {"text_config": (gemma4 := {"num_global_key_value_heads": 1, "attention_k_eq_v": True})},
    "gemma4_text": gemma4,
    "gemma4_unified": {"text_config": gemma4},
    "gemma4_unified_text": gemma4,
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "kimi_linear": {"linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}}
    | {"num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "nemotron_h": {"n_groups": 2},
    "qwen4_exp_text": (
        qwen4 := {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": MAX_TOKENS}
        | {"indexer_compress_ratio": 4, "hc_lowrank": 8}
    ),
    "qwen4_exp": {"text_config": qwen4},
    "reformer": {"axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16), "attn_layers": ["local"] * 2},
    "roc_bert": {"pronunciation_vocab_size": 10, "shape_vocab_size": 10},
    "xlm": {"causal": True},
    "xlstm": {"v_head_dim": None, "num_heads": 4},
    "zamba": {"num_hidden_layers": 9, "attn_layer_period": 3, "attn_layer_offset": 2, "head_dim": None},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "head_dim": None},
    "zaya": {"num_experts_per_tok": 1},
}
for kind in ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"):
    OVERRIDES[kind] = {"max_position_embeddings": MAX_TOKENS + 2}  # positions begin behind the padding's
# Why a family is not tried.
LOOKS_AHEAD = "what stands after a text changes its score, so that loading refuses it"
DRAFT = "a draft model of another LM"
AUDIO = "an audio decoder"
LEFT_OUT = {
    "blt": "reads bytes in patches that another model cuts",
    "cpmant": "reads prompts of its own before a text",
    "dots3_note": "a configuration of each layer that nothing here makes small",
    "dots3_note_text": "a configuration of each layer that nothing here makes small",
    "emu3": "AutoModelForCausalLM does not read what it saves",
    "gemma3n": "its part for images needs the package timm; gemma3n_text is tried",
    "gemma4_assistant": DRAFT,
    "gemma4_unified_assistant": DRAFT,
    "mllama": "AutoModelForCausalLM does not read what it saves",
    "moshi": AUDIO + ", whose cache has a window and whose attention has none",
    "musicgen": AUDIO,
    "musicgen_melody": AUDIO,
    "prophetnet": LOOKS_AHEAD,
    "xlnet": LOOKS_AHEAD,
    "xmod": "asks for a language before it reads",
}


def tiny_config(kind: str, **given: Any) -> PreTrainedConfig:
    """Return the configuration of a model type by all of KEYS that its class knows, and the classes inside it."""
    return _tiny(CONFIG_MAPPING[kind], OVERRIDES.get(kind, {}) | given)


def _tiny(made: type[PreTrainedConfig], given: dict[str, Any]) -> PreTrainedConfig:
    default = made()
    fields = (default.to_dict().keys() | made.__annotations__) - made.attribute_map.keys()
    inner = {name: getattr(default, name) for name in made.sub_configs}
    keys: dict[str, Any] = {key: KEYS[key] for key in KEYS.keys() & fields} | given
    keys |= {name: _tiny(type(one), given.get(name, {})) for name, one in inner.items() if one is not None}
    return made(**{key: value for key, value in keys.items() if value is not None})


def write_architecture(folder: Path, kind: str, **given: Any) -> None:
    """Write a random LM of a model type, and the tokenizer of the other tiny LMs."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(kind, **given)).save_pretrained(folder)
    write_tokenizer(folder)
