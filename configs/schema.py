"""The schema of every configuration: one dataclass for each section, one line for each key.

YAML files and dotted overrides are merged onto these defaults by `configs.load`, which refuses unknown
keys and wrong types. A key that is `MISSING` has no sensible default and must be given.
"Paper" is Shi et al. 2023, REPLUG, whose training setting is `configs/paper.yaml`.
"""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING


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


# `async` is a keyword, so this one is made by call.
RefreshMode = Enum("RefreshMode", {"sync": "sync", "async": "async"})


class Adopt(Enum):
    at_lag = "at_lag"
    when_ready = "when_ready"


class OptimizerKind(Enum):
    adamw = "adamw"
    adam = "adam"


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


class Swap(Enum):
    double = "double"
    blue_green = "blue_green"


class WandbMode(Enum):
    off = "off"
    offline = "offline"
    online = "online"


class RayAuth(Enum):
    token = "token"
    disabled = "disabled"


@dataclass
class DataConfig:
    # Rows that are ready: documents, and texts already split into context and continuation.
    corpus: str | None = None  # JSONL of documents: id, text, optional title, domain, source
    queries: str | None = None  # JSONL of training texts: context, continuation, optional id, domain, source, gold
    heldout: str | None = None  # JSONL of held-out texts, same fields; never trained on
    # Or raw texts, cut into documents and texts by `replug prepare`.
    source: str | None = None  # file, folder or pattern of JSONL, TSV, Parquet or texts, package:NAME, hub dataset
    out: str | None = None  # where the prepared set goes (default: RUN_DIR/data)
    prepared: str | None = None  # a set that `replug prepare` made; used instead of the keys above
    text_field: str = "text"  # field of a raw row that holds the text
    id_field: str = "id"  # field of a raw row that names the source document
    domain_field: str = "domain"  # field of a raw row that names its domain; dots reach into nested fields
    new_text_at: str | None = None  # where rows or lines are parts of texts: what the first line of a text matches
    max_text_characters: int = 16777216  # longer raw texts are rejected
    max_rejected_share: float = 0.01  # share of raw rows that may be unreadable before preparing stops
    tokenizer: str = "lm"  # whose tokens `window` counts: lm, retriever, or a path
    document_tokens: int | None = None  # length of a corpus document in tokens (default: window)
    window: int = 128  # length of a context, and of a continuation, in tokens (paper: 128)
    num_documents: int | None = None  # corpus documents to keep (default: all)
    num_queries: int = 1000  # training texts to keep
    num_heldout: int = 100  # held-out texts to keep
    query_share: float = 0.2  # share of the source documents that serve training texts
    heldout_share: float = 0.1  # share of the source documents that serve held-out texts
    corpus_share: float | None = None  # share that serves the corpus; what is left serves nothing (default: the rest)
    ngram_overlap: int | None = None  # drop what shares so many words with a held-out text or query (usual: 13)
    num_workers: int = 1  # processes that prepare; on a Ray cluster (ray.address) its tasks at a time


@dataclass
class RetrieverConfig:
    path: str = MISSING  # folder or hub name of a BERT-like encoder, package:minilm, or stand_in
    similarity: Similarity = Similarity.cosine  # cosine (paper) or dot
    max_tokens: int | None = None  # longer texts are cut here (default: the encoder's own limit)
    dropout: bool = False  # train with the encoder's own dropout


@dataclass
class LMConfig:
    # Local weights, or a server: one of path and url.
    path: str | None = None  # folder, GGUF file or hub name of a causal LM, package:smollm2, or stand_in[:SECONDS]
    dtype: DType = DType.auto  # auto: bfloat16 where the hardware multiplies it natively, else float32
    compile: bool = False  # torch.compile of local weights; needs a C++ compiler on a CPU
    tokens_per_batch: int | None = None  # padded tokens in one pass (default: 1,024 on a CPU, 32,768 on a GPU)
    num_replicas: int = 1  # scorer actors; those that the cluster has no room for yet join when it has
    threads_per_replica: int | None = None  # CPU threads of each scorer (default: cores / replicas)
    gpus_per_replica: float = 0.0  # GPUs of each scorer; fractions share one, above 1 the layers are spread
    url: str | None = None  # OpenAI-compatible server, such as http://127.0.0.1:8000/v1
    model: str | None = None  # the name under which the server at lm.url serves the LM
    api: ServerAPI = ServerAPI.echo  # how the server gives prompt log-probs: echo, or prompt_logprobs (vLLM)
    tokenizer: str | None = None  # folder or hub name of the server's tokenizer; token ids are sent instead of text
    api_key_env: str = "REPLUG_LM_API_KEY"  # environment variable that holds the server's key, if it wants one
    max_concurrency: int = 16  # requests to the server open at once
    prompts_per_request: int = 4  # inputs in one request
    max_requests: int | None = None  # the run stops before it sends more requests
    max_tokens_sent: int | None = None  # the run stops before it sends more tokens
    # Both kinds.
    separator: str = "\n"  # stands between the document and the context
    too_long: TooLong = TooLong.error  # error, or truncate: cut the document's end, then the context's beginning
    timeout_seconds: float = 600.0  # a call or request that takes longer is done again
    max_attempts: int = 5  # times a call or request is tried before the run stops
    cache: str | None = None  # SQLite file of scores (default: RUN_DIR/scores.sqlite)


@dataclass
class RetrieveConfig:
    k: int = 20  # documents for each training text (paper: 20)
    exclude_own_source: bool = False  # never a document of the text's own source, where the corpus has some


@dataclass
class LossConfig:
    gamma: float = 0.1  # temperature of the retrieval likelihood (paper: 0.1)
    beta: float = 0.1  # temperature of the LM likelihood (paper: 0.1)
    lm_score: LMScore = LMScore.mean_logprob  # what of the continuation's log-probs enters Q
    direction: Direction = Direction.kl_lm_retriever  # KL(Q || P_R), the ACL text; the arXiv text has KL(P_R || Q)


@dataclass
class RefreshConfig:
    every_steps: int = 3000  # steps between two re-embeddings of the corpus (paper: 3,000)
    mode: RefreshMode = RefreshMode["async"]  # async trains on meanwhile; sync waits for the new index
    adopt: Adopt = Adopt.at_lag  # at_lag: exactly lag_steps after the trigger; when_ready: reproducible no more
    lag_steps: int | None = None  # steps from trigger to adoption (default: half of every_steps)
    max_age_steps: int | None = None  # training stops when the index is older (default: 3 x every_steps)
    watch_queries: int = 64  # training texts by which every refresh is measured: recall, overlap; 0 for none


@dataclass
class IndexConfig:
    kind: str = "flat_fp16"  # flat_fp16 (exact), sq8, pq, ivf_sq8, ivf_pq, or a FAISS factory string
    nprobe: int | None = None  # lists that a search of an IVF kind looks into (default: by kind)
    rerank: Rerank = Rerank.stored  # order a lossy kind's candidates by the stored vectors, by live ones, or not
    overretrieve: int | None = None  # candidates to order for each document asked for (default: by kind)
    retrain_every: int | None = None  # refreshes between trainings of a lossy kind (default: trained once)
    num_shards: int = 1  # actors that serve searches, each one part of the corpus
    num_builders: int = 1  # actors that embed the corpus
    block_documents: int = 1024  # documents embedded, written and checksummed as one unit
    dtype: DType = DType.auto  # precision the corpus is embedded in
    tokens_per_batch: int | None = None  # padded tokens in one forward pass (default: 2,048; builders on a GPU 32,768)
    threads_per_worker: int | None = None  # CPU threads of each actor (default: all cores)
    gpus_per_builder: float = 0.0  # GPUs of each builder; fractions share one
    gpus_per_searcher: float = 0.0  # GPUs of each shard's searcher; vectors are then held in GPU memory
    swap: Swap = Swap.double  # double: searchers hold two versions; blue_green: new searchers take the builders' place
    timeout_seconds: float = 3600.0  # a block, or one step of a lossy kind's build, that takes longer is done again
    max_attempts: int = 3  # times a block is tried before the refresh counts as failed
    out: str | None = None  # where `replug index` writes (default: RUN_DIR/index)


@dataclass
class ResourcesConfig:
    # What trains, scores and indexes: GPUs where the cluster has any (whole ones, or a share of one), else processes.
    train: int | float | str = 1  # trainer ranks, a GPU each; a share below 1 is one rank on it; or auto
    score: int | float | str | None = None  # for scorers; auto; null: as lm.num_replicas and lm.gpus_per_replica say
    index: int | float | str | None = None  # for builders and searchers; auto; null: as the keys of index say


@dataclass
class TrainConfig:
    max_steps: int = 1000  # optimizer steps (paper: 25,000)
    batch_size: int = 64  # training texts for each step, over all ranks (paper: 64)
    micro_batches: int = 1  # parts of a rank's share of the batch, over which the gradient is accumulated
    lr: float = 2e-5  # peak learning rate (paper: 2e-5)
    optimizer: OptimizerKind = OptimizerKind.adamw  # paper: adam
    weight_decay: float = 0.0  # of AdamW
    warmup_ratio: float = 0.1  # share of the steps with rising rate (paper: 0.1), linear decay after
    gradient_clip: float | None = None  # largest gradient norm (default: no clipping)
    precision: Precision = Precision.float32  # auto: bf16_mixed where the hardware has it
    gradient_checkpointing: bool = False  # compute activations twice instead of keeping them
    compile: bool = False  # torch.compile of the retriever; needs a C++ compiler on a CPU
    pipeline_depth: int = 1  # batches retrieved and scored ahead; 0 is the strictly sequential method
    threads: int | None = None  # CPU threads of the trainer (default: all cores)
    accelerator: Accelerator = Accelerator.auto  # where the trainer runs; auto takes a GPU where there is one
    log_every_steps: int = 1  # steps between two lines of metrics.jsonl
    tensorboard: bool = False  # also write RUN_DIR/tensorboard (needs the package tensorboard)


@dataclass
class CheckpointConfig:
    every_steps: int = 100  # steps between two checkpoints
    keep_last: int = 2  # checkpoints kept while training


@dataclass
class EvaluateConfig:
    k: int = 10  # documents in the ensemble (paper: 10)
    max_windows: int | None = 200  # held-out texts measured in bits per byte; null for all
    num_resamples: int = 10000  # of the paired bootstrap
    refresh_windows: int = 16  # held-out texts measured at each refresh, the last of them; 0 for none
    num_examples: int = 6  # texts shown in the report with what each retriever finds


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.off  # offline needs neither network nor account
    project: str = "replug"  # W&B project
    entity: str | None = None  # W&B user or team (default: the account's own)
    name: str | None = None  # default: the run directory's name


@dataclass
class RayConfig:
    address: str | None = None  # of a running cluster (default: start one on this machine, on loopback)
    num_cpus: int | None = None  # logical CPUs of a cluster started here (default: as many as the actors ask for)
    auth: RayAuth = RayAuth.token  # token: actors refuse other users' commands
    object_store_mb: int = 256  # shared memory of a cluster started here


@dataclass
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    lm: LMConfig = field(default_factory=LMConfig)
    retrieve: RetrieveConfig = field(default_factory=RetrieveConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    run_dir: str = MISSING  # everything a run writes
    seed: int = 0  # order of texts, sampling, random documents, bootstrap


class Evaluation(Enum):
    lm = "lm"
    mmlu = "mmlu"
    open_qa = "open_qa"
    retrieval = "retrieval"
    tokens = "tokens"


@dataclass
class TextsConfig:
    path: str | None = None  # raw texts, measured whole (default: the held-out texts of the prepared set)
    window: int = 128  # length of a context, and of a continuation, in the LM's tokens (paper: 128)
    max_windows: int | None = 200  # windows or held-out texts that are measured, the first ones; null for all


@dataclass
class QuestionsConfig:
    path: str | None = None  # mmlu: a folder with dev/ and test/; else JSONL: question, answers, gold
    demonstrations: str | None = None  # JSONL of answered questions (default: those of path that are not measured)
    query: str = "{question}"  # what is searched for; a tuned retriever wants the form of its training texts
    shots: int | None = None  # answered questions before each question (default: mmlu 5, open_qa 16, as the paper)
    documents_in_shots: bool = True  # each with the first document found for it, where a method has documents
    max_questions: int | None = None  # mmlu: of each subject, the first ones; open_qa, retrieval: drawn by the seed
    max_new_tokens: int = 16  # of an answer


@dataclass
class PaperConfig:
    table: str | None = None  # where the paper has these figures
    values: dict[str, float] = field(default_factory=dict)  # the paper's figure by method, shown beside ours


@dataclass
class EvaluationConfig:
    """What `replug evaluate` measures, with which methods."""

    evaluation: Evaluation = MISSING  # lm, mmlu, open_qa, retrieval or tokens
    out: str = MISSING  # everything an evaluation writes
    methods: list[str] = field(default_factory=lambda: ["none", "replug"])  # as configs/methods.py reads them
    retrievers: dict[str, str] = field(default_factory=dict)  # name: path as retriever.path, a run or an index's folder
    query_encoders: dict[str, str] = field(default_factory=dict)  # name: path, where queries have their own (DPR)
    lms: dict[str, str] = field(default_factory=dict)  # name: path; several, each in OUT/NAME, instead of lm.path
    k: int = 10  # documents of a method that names no number (paper: 10)
    num_resamples: int = 10000  # of the paired bootstrap
    seed: int = 0  # random documents, demonstrations, bootstrap
    texts: TextsConfig = field(default_factory=TextsConfig)
    questions: QuestionsConfig = field(default_factory=QuestionsConfig)
    paper: PaperConfig = field(default_factory=PaperConfig)
    data: DataConfig = field(default_factory=DataConfig)
    retriever: RetrieverConfig = field(default_factory=lambda: RetrieverConfig(path=""))
    lm: LMConfig = field(default_factory=LMConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def run_config(self) -> Config:
        """The parts that a training run has too, for what makes them."""
        parts = {name: getattr(self, name) for name in ("data", "retriever", "lm", "index", "ray", "seed")}
        return Config(**parts, run_dir=self.out)


@dataclass
class ScoreConfig:
    """What `replug score` needs to know; it has no file, only overrides."""

    lm: LMConfig = field(default_factory=LMConfig)
    ray: RayConfig = field(default_factory=RayConfig)
