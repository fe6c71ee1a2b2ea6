"""Name the choices of keys that take one of a few names."""

from enum import StrEnum

Direction = StrEnum("Direction", ["kl_lm_retriever", "kl_retriever_lm"])
DType = StrEnum("DType", ["auto", "float32", "bfloat16", "float16"])
EnsembleWeights = StrEnum("EnsembleWeights", ["posterior", "similarity", "vote"])
Examples = StrEnum("Examples", ["texts", "questions"])
LoggerName = StrEnum("LoggerName", ["tensorboard", "mlflow"])
LMScore = StrEnum("LMScore", ["mean_logprob", "inverse_perplexity", "sum_logprob", "probability"])
Precision = StrEnum("Precision", ["float32", "bf16_mixed", "auto"])
ServerAPI = StrEnum("ServerAPI", ["echo", "prompt_logprobs", "chat"])
Similarity = StrEnum("Similarity", ["cosine", "dot"])
Teacher = StrEnum("Teacher", ["logprob", "yes", "answer"])
TooLong = StrEnum("TooLong", ["error", "truncate"])
TrainedSide = StrEnum("TrainedSide", ["both", "query", "documents"])
WandbMode = StrEnum("WandbMode", ["off", "offline", "online"])
