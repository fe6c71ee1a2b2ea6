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
from replug.config.keys import ABOVE_0, BELOW_1, FROM_0, RULED, SHARE, key, section

DEV_SHARE = 0.1  # of the source documents, for development texts


@dataclass
class DataConfig:
    # Ready rows: documents, and examples already split into context and continuation.
    corpus: str | None = key(
        None,
        "Corpus: rows (id, text, optional title, domain, source) of a file, folder or hub dataset, or the URL of a "
        "vector store.",
    )
    train: str | None = key(
        None, "Training examples: rows with context, continuation, optional query; or question, answers."
    )
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
        None, "Raw texts to prepare: file, folder, glob (JSON, CSV, TSV, Parquet, text), package:NAME or hub dataset."
    )
    out: str | None = key(None, "Folder of the prepared set. Default: RUN_DIR/data.")
    prepared: str | None = key(None, "Folder that `replug prepare` wrote; replaces the keys above.")
    new_text_at: str | None = key(
        None, "Regular expression for a text's first line, if texts span several rows or lines."
    )
    max_rejected_share: float = key(0.01, "Largest share of raw rows that may be unreadable, from 0 to 1.", SHARE)
    tokenizer: str = key("lm", "Tokenizer that counts example tokens: lm, retriever, or a path.")
    document_tokens: int | None = key(None, "Tokens per corpus document. Default: data.context_tokens.", ABOVE_0)
    context_tokens: int = key(128, "Tokens per context, and per continuation (paper: 128).", ABOVE_0)
    num_documents: int | None = key(None, "Number of corpus documents to keep. Default: all.", ABOVE_0)
    num_queries: int = key(1000, "Number of training examples to keep.", ABOVE_0)
    num_heldout: int = key(100, "Number of held-out examples to keep.", ABOVE_0)
    num_dev: int = key(0, "Number of development examples to keep. 0: none.", FROM_0)
    query_share: float = key(0.2, "Share of the source documents that become training examples.", SHARE)
    heldout_share: float = key(0.1, "Share of the source documents that become held-out examples.", SHARE)
    corpus_share: float | None = key(
        None, "Share of the source documents that become the corpus. Default: all remaining documents.", SHARE
    )
    ngram_overlap: int | None = key(
        None, "Drop texts that share this many consecutive words with another split (usual: 13).", ABOVE_0
    )
    num_workers: int = key(1, "Number of preparing processes, on the machine of the command.", ABOVE_0)


@dataclass
class RetrieverConfig:
    path: str = key(MISSING, "Encoder: folder, hub name, package:minilm, package:wordllama or stand_in.")
    similarity: Similarity | None = key(
        None, "Similarity of vectors: cosine (paper) or dot. Default: the encoder's setting, else cosine."
    )
    query_prompt: str | None = key(None, "Text prepended to each query. Default: the encoder's setting.")
    document_prompt: str | None = key(None, "Text prepended to each document. Default: the encoder's setting.")
    max_tokens: int | None = key(
        None, "Texts longer than this are cut, in tokens. Default: the encoder's limit.", ABOVE_0
    )
    dropout: bool = key(False, "Train with the encoder's own dropout.")
    query_path: str | None = key(None, "Query encoder of a pair (DPR); retriever.path is then the document encoder.")
    train: TrainedSide = key(
        TrainedSide.both,
        "Encoder side to train: query (the index stays valid), documents, or both.",
    )
    dims: list[int] = key(
        [], "Prefix lengths over which the loss is averaged, such as [384,128]. Default: index.dims.", RULED
    )


@dataclass
class LoRAConfig:
    """Train LoRA adapters (Hu et al. 2021, peft) instead of the retriever's weights."""

    rank: int | None = key(
        None, "Rank of LoRA adapters, such as 16. Default: train all weights, without adapters.", ABOVE_0
    )


@dataclass
class LMConfig:
    # Local weights, or a server: one of path and url.
    path: str | None = key(None, "Local LM: folder, GGUF file, hub name, package:smollm2 or stand_in[:SECONDS].")
    dtype: DType = key(
        DType.auto, "auto (bfloat16 where the hardware supports it, else float32), float32, bfloat16 or float16."
    )
    tokens_per_batch: int | None = key(
        None, "Tokens per forward pass. Default: 1,024 on a CPU, 4,096 to 32,768 on a GPU.", ABOVE_0
    )
    num_replicas: int | None = key(
        None, "Number of scorer replicas. Default: derived from resources.score.", ABOVE_0, resumable=True
    )
    gpus_per_replica: float | None = key(
        None,
        "Whole GPUs per scorer replica. Default: as many as hold the LM.",
        FROM_0,
        resumable=True,
    )
    url: str | None = key(None, "URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1.", resumable=True)
    model: str | None = key(None, "Name of the LM on the server at lm.url.")
    api: ServerAPI = key(
        ServerAPI.echo,
        "Requests to the server: completions with echo or with prompt_logprobs (vLLM), or chat.",
    )
    tokenizer: str | None = key(None, "Server's tokenizer: folder or hub name. If set, requests contain token ids.")
    api_key_env: str = key("REPLUG_LM_API_KEY", "Environment variable that holds the server's API key.", resumable=True)
    extra_body: dict[str, Any] = key(
        {}, "Further fields of each request to the server, such as {reasoning_effort: minimal}."
    )
    max_concurrency: int = key(16, "Largest number of concurrent requests to the server.", ABOVE_0, resumable=True)
    max_tokens_sent: int | None = key(
        None, "Token budget: the run stops before it sends more. Default: unlimited.", ABOVE_0, resumable=True
    )
    patience_minutes: float = key(
        15.0, "Minutes to wait for a server that is away or throttles before the run stops.", ABOVE_0, resumable=True
    )
    # Both kinds.
    score: Teacher = key(
        Teacher.logprob,
        "What training learns from: logprob of the continuation, yes (P(yes) to lm.prompt) or answer (F1).",
    )
    samples: int = key(1, "Answers per document with lm.score=answer, drawn at temperature 1. 1: greedy.", ABOVE_0)
    separator: str = key("\n", "Text between a document and the context, without lm.prompt.")
    prompt: str | None = key(
        None, "Template with {document} and {context}, on lines of their own. Default: both, lm.separator between them."
    )
    chat: bool = key(False, "Put the prompt as the user's message through the tokenizer's chat template.")
    too_long: TooLong = key(
        TooLong.error, "Inputs above the LM's limit: error, or truncate the document, then the context's beginning."
    )
    timeout_seconds: float = key(600.0, "Seconds after which a call or request is retried.", ABOVE_0, resumable=True)
    cache: str | None = key(None, "SQLite file of LM scores. Default: RUN_DIR/scores.sqlite.")


@dataclass
class RetrieveConfig:
    k: int = key(20, "Number of documents per training example (paper: 20).", RULED)
    exclude_own_source: bool = key(False, "Exclude documents that have the same source as the example.")


@dataclass
class LabelConfig:
    # Candidates per example that `replug prepare --labels` scores, without duplicates.
    dense: int = key(20, "Number of candidates per example that the retriever finds.", FROM_0, resumable=True)
    bm25: int = key(0, "Number of further candidates per example that BM25 finds.", FROM_0, resumable=True)
    random: int = key(0, "Number of further candidates per example that are drawn at random.", FROM_0, resumable=True)
    hits: str | None = key(
        None, "Your own candidates as label.dense: rows (pos, neg, ctxs), or a TREC run file.", resumable=True
    )


@dataclass
class EnsembleConfig:
    temperature: int | float | str | None = key(
        None,
        "Temperature of the ensemble's softmax (paper: 1), or fit. Default: the retriever's setting, else 1.",
        RULED,
    )
    prune: float = key(0.0, "Posterior weights: documents below this weight are not read further. 0: all are.", BELOW_1)
    read: int | None = key(
        None,
        "Posterior weights: tokens at the prompt's end that move the weights before the answer. 0: none. Default: 64 "
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
    contrastive: float = key(0.0, "Weight of the contrastive loss on the LM's best document. 0: KL only.", FROM_0)
    in_batch: bool = key(False, "Use the batch's other documents as negatives of the contrastive loss.")


@dataclass
class RefreshConfig:
    every_steps: int = key(3000, "Steps between two refreshes of the index (paper: 3,000).", ABOVE_0)
    lag_steps: int | str | None = key(
        None,
        "Steps from trigger to adoption, 0 (wait) or when_ready (not reproducible). Default: every_steps/2.",
        RULED,
    )


@dataclass
class IndexConfig:
    kind: str = key("flat_fp16", "Index type: flat_fp16 (exact), sq8, pq, ivf_sq8, ivf_pq, or a FAISS factory string.")
    nprobe: int | None = key(None, "Number of IVF lists that a search visits. Default: depends on index.kind.", ABOVE_0)
    dims: int | None = key(None, "Store and search only this many leading dimensions. Default: all.", ABOVE_0)
    num_shards: int | None = key(
        None, "Number of shards, each with one searcher actor. Default: one per GPU or node that searches.", ABOVE_0
    )
    block_documents: int = key(
        1024, "Documents per block. A builder embeds whole blocks, and index files hold whole blocks.", ABOVE_0
    )
    dtype: DType = key(
        DType.auto, "Precision for embedding the corpus: auto, float32, bfloat16 or float16 (finer than bfloat16)."
    )


@dataclass
class ResourcesConfig:
    # Whole GPUs per role, or processes on a cluster without GPUs.
    train: int | str = key("auto", "Trainer ranks, one GPU each. auto: one in eight GPUs.", RULED, resumable=True)
    score: int | str = key(
        "auto", "GPUs for scorer replicas. auto: all that training leaves, with the index.", RULED, resumable=True
    )
    index: int | str = key(
        "auto", "GPUs for the index's actors. auto: all that training leaves, with scoring.", RULED, resumable=True
    )


@dataclass
class TrainConfig:
    examples: Examples = key(
        Examples.texts,
        "What is trained on: texts (LSR by the LM's scores), or questions made from the documents (contrast, no LM).",
    )
    max_steps: int = key(1000, "Optimizer steps (paper: 25,000).", ABOVE_0)
    batch_size: int = key(64, "Training examples per step, over all ranks (paper: 64).", ABOVE_0)
    micro_batches: int = key(
        1, "Number of micro-batches per rank over which gradients are accumulated.", ABOVE_0, resumable=True
    )
    lr: float = key(2e-5, "Peak learning rate (paper: 2e-5); on questions times the untuned loss, at most 1.", ABOVE_0)
    warmup_ratio: float = key(0.1, "Share of the steps with linear warmup (paper: 0.1); linear decay follows.", SHARE)
    gradient_clip: float | None = key(None, "Largest gradient norm. Default: no clipping.", ABOVE_0)
    precision: Precision = key(
        Precision.float32, "float32, bf16_mixed, or auto (bf16_mixed where the hardware supports it)."
    )
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass to save memory.")
    chunk_tokens: int | None = key(
        None, "Padded tokens per gradient-cache chunk, each encoded twice, to save memory. Default: no chunks.", ABOVE_0
    )
    pipeline_depth: int = key(1, "Batches retrieved and scored ahead. 0: strictly sequential.", FROM_0)
    labels: str | None = key(
        None,
        "Folder from `prepare --labels`, or auto (RUN_DIR/labels). Default: the LM scores during training.",
    )
    epochs: int | None = key(
        None, "Epochs over the labelled examples; replaces train.max_steps. Default: train.max_steps.", ABOVE_0
    )
    label_steps: int | None = key(
        None, "Steps on labels before the LM scores live batches. Default: all steps.", ABOVE_0
    )
    patience: int | None = key(
        None, "Development evaluations without improvement before training stops. Default: never stop early.", ABOVE_0
    )


@dataclass
class CheckpointConfig:
    every_steps: int = key(100, "Steps between two checkpoints.", ABOVE_0, resumable=True)


@dataclass
class EvaluateConfig:
    k: int = key(10, "Number of documents in the ensemble (paper: 10).", ABOVE_0)
    max_examples: int | None = key(200, "Number of held-out examples to evaluate. null: all.", ABOVE_0)
    num_resamples: int = key(10000, "Number of resamples of the paired bootstrap.", ABOVE_0, resumable=True)
    heldout: bool = key(True, "Evaluate the held-out split after training. false needs train.labels, and no LM.")


@dataclass
class WandbConfig:
    mode: WandbMode = key(
        WandbMode.off, "Weights & Biases logging: off, online, or offline (no network or account).", resumable=True
    )


@dataclass
class RayConfig:
    address: str | None = key(
        None, "Address of a running Ray cluster. Default: start Ray on this machine.", resumable=True
    )


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
    loggers: list[LoggerName] = key([], "Trackers beside W&B: tensorboard, mlflow.", resumable=True)
    ray: RayConfig = section(RayConfig)
    run_dir: str = key(MISSING, "Folder for everything that the run writes.", resumable=True)
    seed: int = key(0, "Random seed of the data order, sampling, random documents and bootstrap.", FROM_0)
