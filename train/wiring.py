"""From a configuration to the parts of a run: one function for each part, each a thin translation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import LightningEnvironment
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.errors import UserError
from configs.paths import check_paths
from configs.rules import max_index_age, refresh_lag
from configs.schema import Adopt, Config, LMScore
from data.prepare import Tokenizer, prepare_raw, prepare_rows, require_same_origin
from data.progress import say
from data.records import Window
from data.sampler import QuerySampler
from data.store import PreparedSet, file_sha256
from index_workers.service import IndexService, IndexSettings
from index_workers.version_store import BuildPlan, VersionStore
from models.caching_lm import CachingLM
from models.encoder import Encoder
from models.hardware import multiplies_bfloat16, resolve_dtype
from models.hf_lm import load_tokenizer
from models.packaged import resolve_encoder_path, resolve_lm_path
from models.scorer_pool import LMSpec, ScorerPool
from models.stand_in_lm import WORD
from train.callbacks import Checkpointer, JsonLinesLogger, StepBoundary, StepProgress, TemperatureCheck
from train.module import LossSettings, LSRModule, OptimizerSettings
from train.pipeline import BatchPipeline, IndexState
from train.refresh import RefreshController, RefreshPolicy
from train.run_dir import RunDirectory

ROW_KEYS = ("corpus", "queries", "heldout")
RAW_KEYS = (
    *("source", "text_field", "id_field", "domain_field", "tokenizer", "document_tokens", "window"),
    *("num_documents", "num_queries", "num_heldout", "query_share", "heldout_share"),
)


@dataclass(frozen=True, slots=True)
class Workers:
    """The two services that live beside the trainer."""

    lm: CachingLM
    index: IndexService


def lm_spec(config: Config) -> LMSpec:
    """Where the LM's weights are and in which precision they run."""
    path = config.lm.path if LMSpec(config.lm.path).is_stand_in else resolve_lm_path(config.lm.path)
    return LMSpec(path, _dtype_name(config.lm.dtype.value), config.lm.tokens_per_batch)


def load_encoder(config: Config, path: str | Path | None = None) -> Encoder:
    """The retriever of the configuration, or another one of its kind."""
    folder = str(path) if path is not None else resolve_encoder_path(config.retriever.path)
    return Encoder(folder, config.retriever.similarity.value, config.retriever.max_tokens)


def prepared_set(config: Config, default_out: Path) -> PreparedSet:
    """The prepared set that the configuration names, made now if it is not there yet."""
    check_paths(config)
    data = config.data
    if data.prepared:
        return PreparedSet(Path(data.prepared).expanduser())
    out = Path(data.out).expanduser() if data.out else default_out
    if data.source:
        origin = {**_data_keys(config, RAW_KEYS), "seed": config.seed, **_tokenizer_key(config)}
        if Path(data.source).expanduser().is_file():
            origin["data.source (sha256)"] = file_sha256(Path(data.source).expanduser())
        if (out / "manifest.json").is_file():
            return require_same_origin(PreparedSet(out), origin)
        return prepare_raw(data, config.seed, _offsets_tokenizer(config), out, origin)
    files = {name: Path(getattr(data, name)).expanduser() for name in ROW_KEYS}
    origin = {f"data.{name} (sha256)": file_sha256(path) for name, path in files.items()}
    if (out / "manifest.json").is_file():
        return require_same_origin(PreparedSet(out), origin)
    return prepare_rows(**files, out=out, origin=origin)


def _tokenizer_key(config: Config) -> dict[str, object]:
    """Which model's tokens the texts were cut by."""
    paths = {"lm": config.lm.path, "retriever": config.retriever.path}
    name = config.data.tokenizer
    return {f"{name}.path": paths[name]} if name in paths else {}


def _data_keys(config: Config, names: tuple[str, ...]) -> dict[str, object]:
    return {f"data.{name}": getattr(config.data, name) for name in names}


def check_data(config: Config, data: PreparedSet, spec: LMSpec) -> None:
    """What the parts must agree on, before anything heavy starts."""
    wanted = max(config.retrieve.k, config.evaluate.k)
    if len(data.corpus) < wanted:
        raise UserError(
            f"retrieve.k or evaluate.k asks for {wanted} documents, but the corpus holds {len(data.corpus)}"
        )
    windows = [*data.queries.windows(), *data.heldout.windows()]
    _check_gold(data, windows)
    if spec.max_tokens is not None:
        _check_lengths(data, windows, spec, config.lm.separator)


@contextmanager
def start_workers(config: Config, spec: LMSpec, index_root: Path, scores: Path) -> Iterator[Workers]:
    """Scorer pool behind its cache, and index service; Ray must run. All are stopped at the end."""
    lm = config.lm
    pool = ScorerPool(spec, lm.num_replicas, lm.threads_per_replica, lm.gpus_per_replica, lm.timeout_seconds)
    cached = CachingLM(pool, Path(lm.cache) if lm.cache else scores)
    index = IndexService(index_root, index_settings(config))
    try:
        yield Workers(cached, index)
    finally:
        pool.close()
        index.close()
        cached.close()


def index_settings(config: Config) -> IndexSettings:
    index = config.index
    return IndexSettings(
        kind=index.kind.value,
        num_shards=index.num_shards,
        num_builders=index.num_builders,
        threads=index.threads_per_worker,
        gpus_per_builder=index.gpus_per_builder,
        max_attempts=index.max_attempts,
    )


def publish_snapshot(
    config: Config, encoder: Encoder, data: PreparedSet, store: VersionStore, index: IndexState
) -> BuildPlan:
    """Write the weights as they are as a version's snapshot, and say what is to be embedded with them."""
    digest = store.save_snapshot(index.version, encoder.save)
    return BuildPlan(
        version=index.version,
        step=index.step,
        weights_sha256=digest,
        corpus_path=str(data.corpus_path.absolute()),
        corpus_sha256=data.corpus_sha256,
        num_documents=len(data.corpus),
        block_documents=config.index.block_documents,
        similarity=encoder.similarity,
        max_tokens=encoder.max_tokens,
        dim=encoder.dim,
        dtype=_dtype_name(config.index.dtype.value),
        tokens_per_batch=config.index.tokens_per_batch,
    )


def build_version(config: Config, encoder: Encoder, data: PreparedSet, index: IndexService, at: IndexState) -> None:
    """Embed, publish and load a version now, unless it is there already."""
    plan = publish_snapshot(config, encoder, data, index.store, at)
    if not (index.store.is_published(at.version) and index.store.plan(at.version) == plan):
        index.build(plan).result()
    index.prepare(at.version)


def loss_settings(config: Config) -> LossSettings:
    loss = config.loss
    return LossSettings(loss.gamma, loss.beta, loss.lm_score.value, loss.direction.value)


def lsr_module(config: Config, encoder: Encoder, data: PreparedSet) -> LSRModule:
    train = config.train
    if config.loss.lm_score is LMScore.probability:
        say("warning: loss.lm_score=probability underflows beyond a few tokens and makes Q uniform; try mean_logprob")
    optimizer = OptimizerSettings(
        train.optimizer.value, train.lr, train.weight_decay, train.warmup_ratio, train.max_steps
    )
    return LSRModule(
        encoder, data.queries, data.corpus, loss_settings(config), optimizer, config.retriever.dropout, config.seed
    )


def batch_pipeline(config: Config, module: LSRModule, data: PreparedSet, workers: Workers) -> BatchPipeline:
    return BatchPipeline(
        sampler=QuerySampler(len(data.queries), config.train.batch_size, config.seed),
        queries=data.queries,
        corpus=data.corpus,
        encode=module.encode_queries,
        search=workers.index.search,
        lm=workers.lm,
        k=config.retrieve.k,
        separator=config.lm.separator,
        depth=config.train.pipeline_depth,
        max_steps=config.train.max_steps,
    )


def refresh_controller(config: Config, module: LSRModule, data: PreparedSet, workers: Workers) -> RefreshController:
    lag = None if config.refresh.adopt is Adopt.when_ready else refresh_lag(config)
    policy = RefreshPolicy(config.refresh.every_steps, lag, max_index_age(config), config.train.max_steps)
    store = workers.index.store
    return RefreshController(
        workers.index, policy, lambda index: publish_snapshot(config, module.encoder, data, store, index)
    )


def trainer(
    config: Config, run: RunDirectory, refresh: RefreshController, pipeline: BatchPipeline, lm: CachingLM
) -> pl.Trainer:
    """Lightning's trainer with our callbacks, in the order they act."""
    train = config.train
    checkpointer = Checkpointer(
        run, config.checkpoint.every_steps, config.checkpoint.keep_last, refresh, VersionStore(run.index).remove_all_but
    )
    return pl.Trainer(
        accelerator=train.accelerator.value,
        devices=1,
        precision="bf16-mixed" if _uses_bf16(config) else "32-true",
        max_steps=train.max_steps,
        max_epochs=1,
        gradient_clip_val=train.gradient_clip,
        log_every_n_steps=train.log_every_steps,
        logger=_loggers(config, run),
        callbacks=[
            StepBoundary(refresh, pipeline, lambda: lm.hit_share),
            TemperatureCheck(pipeline, loss_settings(config)),
            StepProgress(train.max_steps),
            checkpointer,
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.path,
        plugins=[LightningEnvironment()],  # under SLURM too this is one process of ours, not a rank that srun made
        num_sanity_val_steps=0,
    )


def _uses_bf16(config: Config) -> bool:
    name = config.train.precision.value
    return name == "bf16_mixed" or (name == "auto" and multiplies_bfloat16())


def _loggers(config: Config, run: RunDirectory) -> list:
    loggers: list = [JsonLinesLogger(run.metrics)]
    if config.wandb.mode.value != "off":
        from train.wandb_logger import wandb_logger

        loggers.append(wandb_logger(config, run))
    return loggers


def _dtype_name(name: str) -> str:
    return str(resolve_dtype(name)).removeprefix("torch.")


def _offsets_tokenizer(config: Config) -> Tokenizer:
    """Character offsets by the tokenizer that `data.tokenizer` names; words where the LM is the stand-in."""
    name = config.data.tokenizer
    if name == "lm" and LMSpec(config.lm.path).is_stand_in:
        return lambda text: [match.span() for match in WORD.finditer(text)]
    if name == "retriever":
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve_encoder_path(config.retriever.path))
    else:
        tokenizer = load_tokenizer(resolve_lm_path(config.lm.path if name == "lm" else name))
    return lambda text: tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]


def _check_gold(data: PreparedSet, windows: list[Window]) -> None:
    named = {doc: window.id for window in windows for doc in window.gold}
    missing = set(named) - set(data.corpus.rows_of(named))
    if missing:
        doc = min(missing)
        raise UserError(
            f"text {named[doc]} names gold document {doc!r}, which is not in the corpus ({len(missing)} such ids)"
        )


def _check_lengths(data: PreparedSet, windows: list[Window], spec: LMSpec, separator: str) -> None:
    """No document, with the longest text after it, may exceed the LM's context.

    A token is at least one byte, so only what is longer in bytes is tokenized.
    """
    limit = spec.max_tokens
    assert limit is not None
    tokenizer = load_tokenizer(spec.path)

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    rest, longest = 0, ""
    for window in sorted(windows, key=_num_bytes, reverse=True):
        if _num_bytes(window) <= rest:
            break
        rest, longest = max((rest, longest), (count(window.context) + count(window.continuation), window.id))
    rest += count(separator) + 2
    for doc in data.corpus.iterate():
        if len(doc.text.encode()) + rest > limit and count(doc.text) + rest > limit:
            raise UserError(
                f"document {doc.id} has {count(doc.text)} tokens and text {longest} up to {rest}, but the LM at "
                f"lm.path holds {limit}: cut the documents (data.source does it), or take an LM with a longer context"
            )


def _num_bytes(window: Window) -> int:
    return len((window.context + window.continuation).encode())
