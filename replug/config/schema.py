"""The schema of runs (`configs.evaluation_schema`: of evaluations): a dataclass for each section, a field for each key.

A field says all that is known of its key, as `configs.keys.key` takes it: default, meaning, bounds, and whether a
resumed run may change it. YAML files and dotted overrides are merged onto the defaults by `config.load`, which refuses
unknown keys and wrong types. A key that is `MISSING` has no sensible default and must be given.
"Paper" is Shi et al. 2023, REPLUG, whose training setting is `configs/paper.yaml`.
"""

from dataclasses import dataclass

from omegaconf import MISSING

from replug.config.choices import (
    Accelerator,
    Attention,
    Direction,
    DType,
    LMScore,
    Precision,
    Rerank,
    ServerAPI,
    Similarity,
    SwapMode,
    TooLong,
    TrainedSide,
    WandbMode,
)
from replug.config.keys import ABOVE_0, FROM_0, RULED, SHARE, key, section

DEV_SHARE = 0.1  # of the source documents, for development texts


@dataclass
class DataConfig:
    # Rows that are ready: documents, and texts already split into context and continuation.
    corpus: str | None = key(
        None, "JSONL of documents: id, text, optional title, domain, source; or a .tsv of them, as psgs_w100.tsv"
    )
    queries: str | None = key(None, "JSONL of training texts: context, continuation, optional id, domain, source, gold")
    heldout: str | None = key(None, "JSONL of held-out texts, same fields; never trained on")
    dev: str | None = key(None, "JSONL of development texts, same fields; they choose settings and weights, if any")
    # Or raw texts, cut into documents and texts by `replug prepare`.
    source: str | None = key(None, "file, folder or pattern of JSONL, TSV, Parquet or texts, package:NAME, hub dataset")
    out: str | None = key(None, "where the prepared set goes (default: RUN_DIR/data)")
    prepared: str | None = key(None, "a set that `replug prepare` made; used instead of the keys above")
    text_field: str = key("text", "field of a raw row that holds the text")
    id_field: str = key("id", "field of a raw row that names the source document")
    domain_field: str = key("domain", "field of a raw row that names its domain; dots reach into nested fields")
    new_text_at: str | None = key(None, "where rows or lines are parts of texts: what the first line of a text matches")
    max_rejected_share: float = key(0.01, "share of raw rows that may be unreadable before preparing stops", SHARE)
    tokenizer: str = key("lm", "whose tokens `example` counts: lm, retriever, or a path")
    document_tokens: int | None = key(None, "length of a corpus document in tokens (default: example)", ABOVE_0)
    context_tokens: int = key(128, "length of a context, and of a continuation, in tokens (paper: 128)", ABOVE_0)
    num_documents: int | None = key(None, "corpus documents to keep (default: all)", ABOVE_0)
    num_queries: int = key(1000, "training texts to keep", ABOVE_0)
    num_heldout: int = key(100, "held-out texts to keep", ABOVE_0)
    num_dev: int = key(0, "development texts to keep, by which settings and weights are chosen; 0 for none", FROM_0)
    query_share: float = key(0.2, "share of the source documents that serve training texts", SHARE)
    heldout_share: float = key(0.1, "share of the source documents that serve held-out texts", SHARE)
    corpus_share: float | None = key(
        None, "share that serves the corpus; what is left serves nothing (default: the rest)", SHARE
    )
    ngram_overlap: int | None = key(
        None, "drop what shares so many words with a held-out text or query (usual: 13)", ABOVE_0
    )
    num_workers: int = key(1, "processes that prepare; on a Ray cluster (ray.address) its tasks at a time", ABOVE_0)


@dataclass
class RetrieverConfig:
    path: str = key(MISSING, "folder or hub name of an encoder, package:minilm, or stand_in")
    similarity: Similarity | None = key(None, "cosine (paper) or dot (default: the folder's, else cosine)")
    query_prompt: str | None = key(None, "stands before each query (default: the folder's)")
    document_prompt: str | None = key(None, "stands before each document (default: the folder's)")
    max_tokens: int | None = key(None, "longer texts are cut here (default: the encoder's own limit)", ABOVE_0)
    dropout: bool = key(False, "train with the encoder's own dropout")
    query_path: str | None = key(None, "of a pair (DPR) the encoder of queries; path is that of documents then")
    train: TrainedSide = key(
        TrainedSide.both,
        "both; query: documents stay as they are, so none is embedded again while training; documents: queries do",
    )
    frozen_layers: int = key(0, "its embeddings and so many of its first layers learn nothing; 0: all learn", FROM_0)
    dims: list[int] = key(
        [], "the loss is the mean over these first numbers of vectors, as [384,128] (default: those searched by)", RULED
    )


@dataclass
class LoRAConfig:
    """Adapters learn instead of the retriever's own weights (Hu et al. 2021), by peft."""

    rank: int | None = key(None, "of the adapters, such as 16 (default: none, all weights learn)", ABOVE_0)


@dataclass
class LMConfig:
    # Local weights, or a server: one of path and url.
    path: str | None = key(None, "folder, GGUF file or hub name of a causal LM, package:smollm2, or stand_in[:SECONDS]")
    dtype: DType = key(DType.auto, "auto: bfloat16 where the hardware multiplies it natively, else float32")
    attention: Attention = key(
        Attention.sdpa, "of local weights; flash_attention_2 (package flash-attn, a GPU) has passes without padding"
    )
    tokens_per_batch: int | None = key(
        None, "tokens in one pass (default: 1,024 on a CPU; by the LM's size 4,096 to 32,768 on a GPU)", ABOVE_0
    )
    num_replicas: int | None = key(
        None, "scorer actors (default: by resources.score); those without room yet join later", ABOVE_0, resumable=True
    )
    gpus_per_replica: float | None = key(
        None,
        "GPUs of each scorer (default: by resources.score); fractions share one, above 1 the layers are spread, 0: CPU",
        FROM_0,
        resumable=True,
    )
    url: str | None = key(None, "OpenAI-compatible server, such as http://127.0.0.1:8000/v1", resumable=True)
    model: str | None = key(None, "the name under which the server at lm.url serves the LM")
    api: ServerAPI = key(ServerAPI.echo, "how the server gives log-probs of a prompt: echo, or prompt_logprobs (vLLM)")
    tokenizer: str | None = key(
        None, "folder or hub name of the server's tokenizer; token ids are sent instead of text"
    )
    api_key_env: str = key(
        "REPLUG_LM_API_KEY", "environment variable that holds the server's key, if it wants one", resumable=True
    )
    max_concurrency: int = key(16, "requests to the server open at once", ABOVE_0, resumable=True)
    prompts_per_request: int = key(4, "inputs in one request", ABOVE_0)
    max_tokens_sent: int | None = key(None, "the run stops before it sends more tokens", ABOVE_0, resumable=True)
    # Both kinds.
    separator: str = key("\n", "stands between the document and the context")
    too_long: TooLong = key(TooLong.error, "error, or truncate: cut the document's end, then the context's beginning")
    timeout_seconds: float = key(600.0, "a call or request that takes longer is done again", ABOVE_0, resumable=True)
    max_attempts: int = key(5, "times a call or request is tried before the run stops", ABOVE_0, resumable=True)
    cache: str | None = key(None, "SQLite file of scores (default: RUN_DIR/scores.sqlite)")


@dataclass
class RetrieveConfig:
    k: int = key(20, "documents for each training text (paper: 20)", RULED)
    exclude_own_source: bool = key(False, "never a document of the text's own source, where the corpus has some")


@dataclass
class LabelConfig:
    # Candidates of each text that `replug prepare --labels` has scored; a document that two of them give counts once.
    dense: int = key(20, "the retriever's nearest documents", FROM_0, resumable=True)
    bm25: int = key(0, "BM25's best documents that are not among these", FROM_0, resumable=True)
    random: int = key(0, "documents drawn at random from the rest", FROM_0, resumable=True)
    tuned: int = key(
        0,
        "documents nearest to the queries tuned in label.tuned_path, that are none of the dense",
        FROM_0,
        resumable=True,
    )
    tuned_path: str | None = key(
        None, "run_dir of an earlier training on labels, with retriever.train=query", resumable=True
    )


@dataclass
class EnsembleConfig:
    temperature: int | float | str | None = key(
        None,
        "divides similarities in the ensemble's softmax: a number (paper: 1), or fit: each retriever's own, by "
        "development texts (default: what was saved with the retriever, else 1)",
        RULED,
    )


@dataclass
class LossConfig:
    gamma: float = key(0.1, "temperature of the retrieval likelihood (paper: 0.1)", ABOVE_0)
    beta: float = key(0.1, "temperature of the LM likelihood (paper: 0.1)", ABOVE_0)
    lm_score: LMScore = key(LMScore.mean_logprob, "what of the continuation's log-probs enters Q")
    direction: Direction = key(Direction.kl_lm_retriever, "KL(Q || P_R), the ACL text; the arXiv text has KL(P_R || Q)")
    contrastive: float = key(0.0, "weight of -log P_R of the document that the LM finds best, beside the KL", FROM_0)
    in_batch: bool = key(False, "in that term, the batch's other documents stand against it too")


@dataclass
class RefreshConfig:
    every_steps: int = key(3000, "steps between two re-embeddings of the corpus (paper: 3,000)", ABOVE_0)
    lag_steps: int | str | None = key(
        None,
        "steps from trigger to adoption, 0 to wait, or when_ready, not reproducible (default: half of every_steps)",
        RULED,
    )
    max_age_steps: int | None = key(
        None, "training stops when the index is older (default: 3 x every_steps)", ABOVE_0, resumable=True
    )


@dataclass
class IndexConfig:
    kind: str = key("flat_fp16", "flat_fp16 (exact), sq8, pq, ivf_sq8, ivf_pq, or a FAISS factory string")
    nprobe: int | None = key(None, "lists that a search of an IVF kind looks into (default: by kind)", ABOVE_0)
    rerank: Rerank = key(Rerank.stored, "order a lossy kind's candidates by the stored vectors, by live ones, or not")
    dims: int | None = key(
        None, "searches by so many first numbers of the vectors, which alone are stored (default: all)", ABOVE_0
    )
    num_shards: int | None = key(
        None, "actors that serve searches, each one part of the corpus (default: by resources.index)", ABOVE_0
    )
    num_builders: int | None = key(
        None, "actors that embed the corpus (default: by resources.index)", ABOVE_0, resumable=True
    )
    block_documents: int = key(
        1024, "documents that are embedded together; the files of an index hold whole blocks", ABOVE_0
    )
    dtype: DType = key(DType.auto, "precision the corpus is embedded in; float16 is 8 times finer than bfloat16")
    tokens_per_batch: int | None = key(
        None, "padded tokens in one forward pass (default: 2,048; builders on a GPU 32,768)", ABOVE_0
    )
    gpus_per_builder: float | None = key(
        None, "share of a GPU of each builder (default: by resources.index); 0: CPU", FROM_0, resumable=True
    )
    gpus_per_searcher: float | None = key(
        None,
        "share of a GPU of each shard's searcher, which then holds the vectors (default: a GPU where they fit); 0: CPU",
        FROM_0,
        resumable=True,
    )
    swap: SwapMode = key(
        SwapMode.double,
        "double: searchers hold two versions; blue_green: new searchers take the builders' place",
        resumable=True,
    )
    max_attempts: int = key(
        3, "times each of these is tried before the refresh counts as failed", ABOVE_0, resumable=True
    )


@dataclass
class ResourcesConfig:
    # GPUs of each role where the cluster has any (whole ones, or a share of one), else processes. Keys of `lm` and
    # `index` that are set stay as they are; the others follow from here.
    train: int | float | str = key(
        "auto", "trainer ranks, a GPU each, or a share of one; auto: one in eight GPUs", RULED, resumable=True
    )
    score: int | float | str = key(
        "auto", "GPUs of scorers; auto: those that training and index leave", RULED, resumable=True
    )
    index: int | float | str = key("auto", "GPUs of builders and searchers; auto: one in eight", RULED, resumable=True)


@dataclass
class TrainConfig:
    max_steps: int = key(1000, "optimizer steps (paper: 25,000)", ABOVE_0)
    batch_size: int = key(64, "training texts for each step, over all ranks (paper: 64)", ABOVE_0)
    micro_batches: int = key(
        1, "parts of a rank's share of the batch, over which the gradient is accumulated", ABOVE_0, resumable=True
    )
    lr: float = key(2e-5, "peak learning rate (paper: 2e-5)", ABOVE_0)
    weight_decay: float = key(0.0, "of AdamW", FROM_0)
    warmup_ratio: float = key(0.1, "share of the steps with rising rate (paper: 0.1), linear decay after", SHARE)
    gradient_clip: float | None = key(None, "largest gradient norm (default: no clipping)", ABOVE_0)
    precision: Precision = key(Precision.float32, "auto: bf16_mixed where the hardware has it")
    gradient_checkpointing: bool = key(False, "compute activations twice instead of keeping them")
    chunk_tokens: int | None = key(
        None, "keep activations of so many padded tokens at a time, and compute chunks twice (default: of all)", ABOVE_0
    )
    pipeline_depth: int = key(1, "batches retrieved and scored ahead; 0 is the strictly sequential method", FROM_0)
    accelerator: Accelerator = key(Accelerator.auto, "where the trainer runs; auto takes a GPU where there is one")
    labels: str | None = key(
        None,
        "train on scores that the LM gave once: a folder of `prepare --labels`, or auto, which makes RUN_DIR/labels",
    )
    epochs: int | None = key(None, "passes over the labelled texts, instead of max_steps", ABOVE_0)
    label_steps: int | None = key(None, "first steps on labels; later batches are live (default: all steps)", ABOVE_0)
    dev_every_steps: int | None = key(
        None, "with labels: steps between two looks at the development texts (default: one pass)", ABOVE_0
    )
    patience: int | None = key(None, "looks without a better one after which training ends (default: never)", ABOVE_0)


@dataclass
class CheckpointConfig:
    every_steps: int = key(100, "steps between two checkpoints", ABOVE_0, resumable=True)


@dataclass
class EvaluateConfig:
    k: int = key(10, "documents in the ensemble (paper: 10)", ABOVE_0)
    max_examples: int | None = key(200, "held-out texts measured in bits per byte; null for all", ABOVE_0)
    num_resamples: int = key(10000, "of the paired bootstrap", ABOVE_0, resumable=True)
    heldout: bool = key(True, "measure the held-out texts at the end; false, with train.labels: no LM is asked")


@dataclass
class WandbConfig:
    mode: WandbMode = key(WandbMode.off, "offline needs neither network nor account", resumable=True)


@dataclass
class RayConfig:
    address: str | None = key(
        None, "of a running cluster (default: start one on this machine, on loopback)", resumable=True
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
    ray: RayConfig = section(RayConfig)
    run_dir: str = key(MISSING, "everything a run writes", resumable=True)
    seed: int = key(0, "order of texts, sampling, random documents, bootstrap", FROM_0)
