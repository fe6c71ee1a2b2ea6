"""What of a run is rehearsed as it is, and what is made small. Pure: a configuration in, a smaller one out.

Counts stay: actors, files of an index version, shards of the corpus, refreshes, checkpoints, texts of a batch and
documents of each. Sizes shrink: steps between two checkpoints, documents of a file, numbers of a vector, words of a
text. Steps shrink by one factor, so that refreshes, lags and checkpoints stand to one another as in the run.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from replug.config.choices import DType, Precision
from replug.config.refresh_policy import refresh_policy
from replug.config.schema import (
    Config,
    DataConfig,
    EvaluateConfig,
    LMConfig,
    LoRAConfig,
    RayConfig,
    RetrieverConfig,
    WandbConfig,
)
from replug.data.prepare.assembly import PIECES_PER_SHARD
from replug.data.shards import ROWS_PER_SHARD
from replug.index_workers.build_plan import FILES, rows_per_file
from replug.index_workers.kinds import EXACT, PRESETS, num_lists
from replug.planning.storage import most_versions

WIDTH = 16  # numbers of a vector
LEAST_STEPS = 2  # between two checkpoints
LEAST_BLOCK = 4  # documents
MOST_SCORERS = 8  # they are alike, and each takes 200 MB and seconds of a core to start
MOST_WINDOWS = 16  # held-out texts that are measured at the end
NUM_RESAMPLES = 100


@dataclass(frozen=True, slots=True)
class Counts:
    """What a schedule comes to: the same in a run and in its rehearsal."""

    refreshes: int
    checkpoints: int
    most_versions: int


def counts_of(config: Config) -> Counts:
    policy, kept = refresh_policy(config.refresh, config.train.max_steps), config.checkpoint
    checkpoints = -(-config.train.max_steps // kept.every_steps)
    return Counts(policy.num_starts, checkpoints, most_versions(policy, kept.every_steps, kept.keep_last))


def scaled_schedule(config: Config) -> Config:
    """The same refreshes and checkpoints in as few steps as keep their number and their order."""
    checkpoint_every, wanted = config.checkpoint.every_steps, counts_of(config)
    tried = (_every(config, steps, checkpoint_every) for steps in range(LEAST_STEPS, checkpoint_every))
    return next((scaled for scaled in tried if counts_of(scaled) == wanted), config)


def _every(config: Config, steps: int, of: int) -> Config:
    policy = refresh_policy(config.refresh, config.train.max_steps)

    def scaled(number: int) -> int:
        return max(1, round(number * steps / of)) if number else 0

    refresh = replace(
        config.refresh,
        every_steps=scaled(policy.every_steps),
        lag_steps=min(scaled(policy.lag_steps), scaled(policy.every_steps)),
        max_age_steps=scaled(policy.max_age_steps) + 1,
    )
    train = replace(config.train, max_steps=scaled(config.train.max_steps))
    return replace(config, refresh=refresh, train=train, checkpoint=replace(config.checkpoint, every_steps=steps))


@dataclass(frozen=True, slots=True)
class CorpusFiles:
    """In how many files the documents of a run are, and their vectors; `block` documents pass the encoder at once."""

    documents: int
    shards: int
    vector_files: int
    block: int


def corpus_files(config: Config, num_documents: int) -> CorpusFiles:
    """Those of the run. A source that is cut gives smaller shards than rows that are given."""
    per_shard = PIECES_PER_SHARD if config.data.source else ROWS_PER_SHARD
    per_file = rows_per_file(num_documents, config.index.block_documents)
    return CorpusFiles(
        num_documents, -(-num_documents // per_shard), -(-num_documents // per_file), config.index.block_documents
    )


def scaled_files(files: CorpusFiles, k: int) -> CorpusFiles:
    """As many shards, and as many files of vectors as a small corpus has at most, of so few documents as can be."""
    vector_files = min(files.vector_files, FILES)
    block = max(LEAST_BLOCK, -(-2 * max(k, files.shards) // vector_files))
    return CorpusFiles(vector_files * block, files.shards, vector_files, block)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a rehearsal's files are, and its cluster."""

    run: Path
    prepared: Path
    retriever: Path
    address: str


def scaled_config(config: Config, files: CorpusFiles, places: Places) -> Config:
    """The run's configuration, laid out, over stand-ins; `files` are the scaled ones."""
    scaled = scaled_schedule(config)
    train = replace(scaled.train, precision=Precision.float32, compile=False, threads=1, tensorboard=False)
    return replace(
        scaled,
        data=DataConfig(prepared=str(places.prepared)),
        retriever=RetrieverConfig(path=str(places.retriever), similarity=config.retriever.similarity),
        lora=LoRAConfig(),
        lm=_stand_in_lm(config.lm),
        index=replace(
            config.index,
            dims=None,
            kind=_kind(config.index.kind),
            block_documents=files.block,
            dtype=DType.float32,
            tokens_per_batch=None,
            threads_per_worker=1,
            out=None,
        ),
        train=train,
        evaluate=_fewer_windows(config.evaluate),
        wandb=WandbConfig(),
        ray=RayConfig(address=places.address),
        run_dir=str(places.run),
    )


def _stand_in_lm(lm: LMConfig) -> LMConfig:
    """Behind actors of as many GPUs. What a server does is not rehearsed: one actor without a GPU stands for it."""
    stand_in = LMConfig(path="stand_in", separator=lm.separator, too_long=lm.too_long, threads_per_replica=1)
    if lm.path is None:
        return stand_in
    return replace(
        stand_in,
        num_replicas=min(lm.num_replicas or 1, MOST_SCORERS),
        gpus_per_replica=lm.gpus_per_replica,
        timeout_seconds=lm.timeout_seconds,
        max_attempts=lm.max_attempts,
    )


def _kind(kind: str) -> str:
    """Presets suit every size; a string for FAISS is rehearsed by the preset that is most like it."""
    if kind in (EXACT, *PRESETS):
        return kind
    return next(name for name, factory in PRESETS.items() if bool(num_lists(factory(8, 1))) == bool(num_lists(kind)))


def _fewer_windows(evaluate: EvaluateConfig) -> EvaluateConfig:
    most = MOST_WINDOWS if evaluate.max_windows is None else min(MOST_WINDOWS, evaluate.max_windows)
    return replace(evaluate, max_windows=most, num_resamples=NUM_RESAMPLES)


def num_texts(config: Config, scaled: Config) -> tuple[int, int]:
    """Training texts, so that as many epochs are trained, and held-out texts of a rehearsal."""
    epochs = config.train.max_steps * config.train.batch_size / config.data.num_queries
    queries = max(scaled.train.batch_size, round(scaled.train.max_steps * scaled.train.batch_size / epochs))
    return queries, max(scaled.evaluate.max_windows or 0, scaled.evaluate.refresh_windows, 2)
