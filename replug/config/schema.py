"""Declare the configuration of runs: a dataclass for each section, a field (`config.keys.key`) for each key.

`config.load` merges YAML files and dotted overrides onto the defaults. A key that is `MISSING` must be given. "Paper"
is Shi et al. 2023, REPLUG (`configs/paper.yaml`).
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from replug.config.choices import (
    Direction,
    DType,
    Examples,
    LMScore,
    LoggerName,
    Precision,
    ServerAPI,
    Similarity,
    Teacher,
    TooLong,
    TrainedSide,
    WandbMode,
)
from replug.config.keys import ABOVE_0, BELOW_1, FROM_0, RULED, SHARE, key, resumable, section

DEV_SHARE = 0.1  # of the source documents, for development texts


@dataclass
class DataConfig:
    # Ready rows: documents, and examples already split into context and continuation.
    corpus: str | None = key(
        None,
        "Corpus: rows (id, text, optional title, domain, source) of a file, folder or hub dataset, or the URL of a "
        "vector store.",
    )
    train: str | None = key(None, "Training examples: context, continuation, optional query; or question, answers.")
    heldout: str | None = key(None, "Held-out examples in the format of data.train. They are never trained on.")
    dev: str | None = key(None, "Development examples in the format of data.train, for choosing weights and settings.")
    fields: dict[str, str] = key({}, "Other names of fields in rows and raw texts: {contents: text, meta.pid: id}.")
    questions: str | None = key(
        None,
        "Questions about the documents that judge the retriever: rule (made from them), lm (written by the LM), or a "
        "file of rows (question, answers, optional gold). Default: none.",
    )
    # Raw texts, which `replug prepare` cuts into documents and examples.
    source: str | None = key(
        None, "Raw texts: file, folder, glob (JSON, CSV, TSV, Parquet, text), package:NAME or hub dataset."
    )
    out: str | None = key(None, "Folder of the prepared set. Default: RUN_DIR/data.")
    prepared: str | None = key(None, "Folder that `replug prepare` wrote; replaces the keys above.")
    new_text_at: str | None = key(None, "Pattern of a text's first line, if texts span several rows or lines.")
    tokenizer: str = key("lm", "Tokenizer that counts example tokens: lm, retriever, or a path.")
    document_tokens: int | None = key(None, "Tokens per corpus document. Default: data.context_tokens.", ABOVE_0)
    context_tokens: int = key(128, "Tokens per context, and per continuation (paper: 128).", ABOVE_0)
    num_documents: int | None = key(None, "Number of corpus documents to keep. Default: all.", ABOVE_0)
    num_queries: int = key(1000, "Number of training examples to keep.", ABOVE_0)
    num_heldout: int = key(100, "Number of held-out examples to keep.", ABOVE_0)
    num_dev: int = key(0, "Number of development examples to keep. 0: none.", FROM_0)
    query_share: float = key(0.2, "Share of the source documents that become training examples.", SHARE)
    heldout_share: float = key(0.1, "Share of the source documents that become held-out examples.", SHARE)
    ngram_overlap: int | None = key(None, "Drop texts that share this many words in a row with another split.", ABOVE_0)


@dataclass
class RetrieverConfig:
    path: str = key(MISSING, "Encoder: folder, hub name, package:minilm, package:wordllama or stand_in.")
    similarity: Similarity | None = key(None, "cosine (paper) or dot. Default: the encoder's setting, else cosine.")
    query_prompt: str | None = key(None, "Text prepended to each query. Default: the encoder's setting.")
    document_prompt: str | None = key(None, "Text prepended to each document. Default: the encoder's setting.")
    max_tokens: int | None = key(None, "Tokens after which texts are cut. Default: the encoder's limit.", ABOVE_0)
    query_path: str | None = key(None, "Query encoder of a pair (DPR); retriever.path is then the document encoder.")
    train: TrainedSide = key(TrainedSide.both, "Side to train: query (the index stays valid), documents, or both.")


@dataclass
class LoRAConfig:
    """Train LoRA adapters (Hu et al. 2021, peft) instead of the retriever's weights."""

    rank: int | None = key(None, "Rank of LoRA adapters, such as 16. Default: train all weights.", ABOVE_0)


@dataclass
class LMConfig:
    # Local weights, or a server: one of path and url.
    path: str | None = key(None, "Local LM: folder, GGUF file, hub name, package:smollm2 or stand_in[:SECONDS].")
    dtype: DType = key(DType.auto, "float32, bfloat16, float16, or auto (bfloat16 where the hardware has it).")
    tokens_per_batch: int | None = key(None, "Tokens per pass. Default: 1,024 on a CPU, from 4,096 on a GPU.", ABOVE_0)
    url: str | None = resumable(None, "URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1.")
    model: str | None = key(None, "Name of the LM on the server at lm.url.")
    api: ServerAPI = key(ServerAPI.echo, "Server's API: completions with echo or prompt_logprobs (vLLM), or chat.")
    tokenizer: str | None = key(None, "Server's tokenizer: folder or hub name. Needed to score texts.")
    api_key_env: str = resumable("REPLUG_LM_API_KEY", "Environment variable that holds the server's API key.")
    extra_body: dict[str, Any] = key({}, "Further fields of each request, such as {reasoning_effort: minimal}.")
    max_concurrency: int = resumable(16, "Largest number of concurrent requests to the server.", ABOVE_0)
    max_tokens_sent: int | None = resumable(None, "Tokens sent before the run stops. Default: unlimited.", ABOVE_0)
    patience_minutes: float = resumable(15.0, "Minutes to wait for a server that is away or throttles.", ABOVE_0)
    # Both kinds.
    score: Teacher = key(
        Teacher.logprob,
        "Training signal: logprob of the continuation, yes (P(yes) to lm.prompt) or answer (F1).",
    )
    prompt: str | None = key(
        None, "Template with {document} and {context}, on lines of their own. Default: both, each on its line."
    )
    chat: bool = key(False, "Put the prompt as the user's message through the tokenizer's chat template.")
    too_long: TooLong = key(TooLong.error, "Inputs above the LM's limit: error, or truncate document, then text.")
    timeout_seconds: float = resumable(600.0, "Seconds after which a call or request is retried.", ABOVE_0)
    cache: str | None = key(None, "SQLite file of LM scores. Default: RUN_DIR/scores.sqlite.")


@dataclass
class RetrieveConfig:
    k: int = key(20, "Number of documents per training example (paper: 20).", RULED)
    exclude_own_source: bool = key(False, "Exclude documents that have the same source as the example.")


@dataclass
class LabelConfig:
    # Candidates per example that `replug prepare --labels` scores, without duplicates.
    dense: int = resumable(20, "Number of candidates per example that the retriever finds.", FROM_0)
    bm25: int = resumable(0, "Number of further candidates per example that BM25 finds.", FROM_0)
    random: int = resumable(0, "Number of further candidates per example that are drawn at random.", FROM_0)
    hits: str | None = resumable(None, "Your own candidates as label.dense: rows (pos, neg, ctxs), or a TREC run file.")


@dataclass
class EnsembleConfig:
    temperature: int | float | str | None = key(
        None,
        "Temperature of the ensemble's softmax (paper: 1), or fit. Default: the retriever's setting, else 1.",
        RULED,
    )
    prune: float = key(0.0, "Posterior weights: stop reading documents below this weight. 0: read all.", BELOW_1)
    read: int | None = key(
        None,
        "Posterior weights: tokens at the prompt's end that update the weights before the answer. 0: none. Default: 64 "
        "of a question (none with a server without lm.tokenizer), none of a text.",
        FROM_0,
    )


@dataclass
class LossConfig:
    gamma: float = key(0.1, "Temperature of the retrieval likelihood (paper: 0.1).", ABOVE_0)
    beta: float = key(0.1, "Temperature of the LM likelihood (paper: 0.1).", ABOVE_0)
    lm_score: LMScore = key(
        LMScore.mean_logprob,
        "Score that defines the LM likelihood: mean_logprob, inverse_perplexity, sum_logprob or probability.",
    )
    direction: Direction = key(
        Direction.kl_lm_retriever,
        "kl_lm_retriever: KL(Q || P_R) (ACL text); kl_retriever_lm: KL(P_R || Q) (arXiv text).",
    )
    contrastive: float = key(0.0, "Weight of a contrastive loss: the LM's best document against the batch's.", FROM_0)


@dataclass
class RefreshConfig:
    every_steps: int = key(3000, "Steps between two refreshes of the index (paper: 3,000).", ABOVE_0)
    lag_steps: int | None = key(None, "Steps from trigger to adoption. 0: wait. Default: every_steps/2.", FROM_0)


@dataclass
class IndexConfig:
    kind: str = key("flat_fp16", "Index type: flat_fp16 (exact), sq8, pq, ivf_sq8, ivf_pq, or a FAISS factory string.")
    nprobe: int | None = key(None, "Number of IVF lists that a search visits. Default: depends on index.kind.", ABOVE_0)
    dims: int | None = key(None, "Train, store and search only this many leading dimensions. Default: all.", ABOVE_0)
    num_shards: int | None = key(None, "Shards, one searcher each. Default: one per searching GPU or node.", ABOVE_0)
    dtype: DType = key(DType.auto, "Precision for embedding the corpus: auto, float32, bfloat16 or float16.")


@dataclass
class ResourcesConfig:
    # Whole GPUs per role, or processes without GPUs. An LM has the fewest GPUs that hold it.
    train: int | str = resumable("auto", "Trainer ranks, one GPU each. auto: one in eight GPUs.", RULED)
    score: int | str = resumable("auto", "GPUs for scoring. auto: all that training leaves, with the index.", RULED)
    index: int | str = resumable("auto", "GPUs for the index. auto: all that training leaves, with scoring.", RULED)


@dataclass
class TrainConfig:
    examples: Examples = key(
        Examples.texts,
        "Training data: texts (LSR by the LM's scores), or questions made from the documents (contrast, no LM).",
    )
    max_steps: int = key(1000, "Optimizer steps (paper: 25,000).", ABOVE_0)
    batch_size: int = key(64, "Training examples per step, over all ranks (paper: 64).", ABOVE_0)
    micro_batches: int = resumable(1, "Micro-batches per rank over which gradients are accumulated.", ABOVE_0)
    lr: float = key(2e-5, "Peak learning rate (paper: 2e-5); on questions times the untuned loss, at most 1.", ABOVE_0)
    precision: Precision = key(Precision.float32, "float32, bf16_mixed, or auto (bf16_mixed on capable hardware).")
    chunk_tokens: int | None = key(None, "Tokens per gradient-cache chunk, encoded twice. Default: no chunks.", ABOVE_0)
    pipeline_depth: int = key(1, "Batches retrieved and scored ahead. 0: strictly sequential.", FROM_0)
    labels: str | None = key(None, "Folder of labels, or auto (RUN_DIR/labels). Default: score during training.")
    epochs: int | None = key(None, "Epochs over the labels. Default: derived from train.max_steps.", ABOVE_0)
    label_steps: int | None = key(None, "Steps on labels before batches are scored live. Default: all steps.", ABOVE_0)
    patience: int | None = key(None, "Development results without improvement until the stop. Default: never.", ABOVE_0)


@dataclass
class CheckpointConfig:
    every_steps: int = resumable(100, "Steps between two checkpoints.", ABOVE_0)


@dataclass
class EvaluateConfig:
    k: int = key(10, "Number of documents in the ensemble (paper: 10).", ABOVE_0)
    max_examples: int | None = key(200, "Number of held-out examples to evaluate. null: all.", ABOVE_0)
    heldout: bool = key(True, "Evaluate the held-out split after training. false needs train.labels, and no LM.")


@dataclass
class WandbConfig:
    mode: WandbMode = resumable(WandbMode.off, "Weights & Biases: off, online, or offline (without an account).")


@dataclass
class RayConfig:
    address: str | None = resumable(None, "Address of a running Ray cluster. Default: start Ray on this machine.")


@dataclass
class Config:
    data: DataConfig = section(DataConfig)
    retriever: RetrieverConfig = section(RetrieverConfig)
    lora: LoRAConfig = section(LoRAConfig)
    lm: LMConfig = section(LMConfig)
    retrieve: RetrieveConfig = section(RetrieveConfig)
    label: LabelConfig = section(LabelConfig)
    ensemble: EnsembleConfig = section(EnsembleConfig)
    loss: LossConfig = section(LossConfig)
    refresh: RefreshConfig = section(RefreshConfig)
    index: IndexConfig = section(IndexConfig)
    resources: ResourcesConfig = section(ResourcesConfig)
    train: TrainConfig = section(TrainConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    evaluate: EvaluateConfig = section(EvaluateConfig)
    wandb: WandbConfig = section(WandbConfig)
    loggers: list[LoggerName] = resumable([], "Trackers beside W&B: tensorboard, mlflow.")
    ray: RayConfig = section(RayConfig)
    run_dir: str = resumable(MISSING, "Folder for everything that the run writes.")
    seed: int = key(0, "Random seed of the data order, sampling, random documents and bootstrap.", FROM_0)
