"""The named choices of keys: one enumeration for each key that takes one of a few names."""

from enum import Enum


class Similarity(Enum):
    cosine = "cosine"
    dot = "dot"


class LMScore(Enum):
    mean_logprob = "mean_logprob"
    inverse_perplexity = "inverse_perplexity"
    sum_logprob = "sum_logprob"
    probability = "probability"


class Direction(Enum):
    kl_lm_retriever = "kl_lm_retriever"
    kl_retriever_lm = "kl_retriever_lm"


class TrainedSide(Enum):
    both = "both"
    query = "query"
    documents = "documents"


class Precision(Enum):
    float32 = "float32"
    bf16_mixed = "bf16_mixed"
    auto = "auto"


class Accelerator(Enum):
    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


class DType(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Attention(Enum):
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"


class ServerAPI(Enum):
    echo = "echo"
    prompt_logprobs = "prompt_logprobs"


class TooLong(Enum):
    error = "error"
    truncate = "truncate"


class Rerank(Enum):
    none = "none"
    stored = "stored"
    live = "live"


class Detokenize(Enum):
    none = "none"
    wikitext = "wikitext"


class SwapMode(Enum):
    double = "double"
    blue_green = "blue_green"


class WandbMode(Enum):
    off = "off"
    offline = "offline"
    online = "online"
