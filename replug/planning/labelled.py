"""Plan a training on labels: the LM scores candidates once, so calls of the LM, tokens and disk follow from counts.

On this machine the rate is measured: a product of matrices takes less than a second. On GPUs it is that of other plans.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.choices import TrainedSide
from replug.config.errors import UserError
from replug.config.rules import OWN_LABELS, is_live
from replug.config.schema import DEV_SHARE, Config
from replug.data.folder import MANIFEST
from replug.data.row_files import CORPUS, SPLIT_OF_BEIR, count_rows
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import source_bytes
from replug.planning.accelerators import parse_devices
from replug.planning.pace import job_of
from replug.planning.training import Assumptions
from replug.planning.workload import (
    ADAM_STATES,
    FLOAT32,
    KEPT_CHECKPOINTS,
    SCORE_BYTES,
    TEXT_BYTES_PER_TOKEN,
    prepared_bytes,
    version_bytes,
)

THIS_MACHINE = "this machine"
REACHED = 0.6  # of the rate of large products of matrices, which passes of a small LM reach
BFLOAT16, FLAGS = 3.0, ("avx512_bf16", "amx_bf16")  # times as fast, on processors with one of these
SIZE, MEASURED_SECONDS = 512, 0.5


def plan_labelled(config: Config, gpus: str | None, given: Assumptions) -> dict[str, Any]:
    """Plan a run whose steps are all on labels. Raises UserError for what cannot be planned."""
    if is_live(config):
        raise UserError("train.label_steps is set; expected it null, or train.labels=null to plan live steps alone")
    counts, is_exact = _counts(config, given.num_documents)
    job = job_of(config, given.lm_parameters, given.retriever_parameters, counts["documents"])
    devices = parse_devices(gpus, efficiency=given.efficiency) if gpus else None
    rate = devices.count * devices.rate(config.lm.dtype.value) if devices else REACHED * machine_rate()
    calls = lm_calls(config, counts)
    num_calls, rounds = sum(calls.values()), 2 if "labels_of_tuned" in calls else 1
    steps = rounds * (config.train.epochs or 1) * counts["queries"] / config.train.batch_size
    if config.train.epochs is None:
        steps = rounds * config.train.max_steps
    builds = 1 if config.retriever.train is TrainedSide.query else 2
    flop = {
        "score": num_calls * job.work.pair,
        "embed": builds * counts["documents"] * job.work.document,
        "train": steps * job.work.train_step / (job.shape.k if builds == 1 else 1),
    }
    hours = {role: value / rate / 3600 for role, value in flop.items()}
    version = version_bytes(
        counts["documents"], job.retriever.dim, job.retriever.parameters, config.index.block_documents, job.index
    )
    disk = {
        "prepared_set": 0.0 if config.data.prepared else prepared_bytes(job.shape, job.retriever.vocabulary),
        "index_versions": (1 + builds) * version,
        "checkpoints": (KEPT_CHECKPOINTS + 1.0) * FLOAT32 * (1 + ADAM_STATES) * job.trained.learning,
        "scores": float(num_calls * SCORE_BYTES),
    }
    return {
        "devices": str(devices) if devices else THIS_MACHINE,
        "lm": {"name": job.lm.name, "parameters": job.lm.parameters},
        "retriever": {"name": job.retriever.name, "parameters": job.retriever.parameters},
        "texts": counts,
        "lm_calls": calls,
        "tokens": {"score": num_calls * job.shape.pair, "embed": builds * counts["documents"] * job.shape.document},
        "flop": flop,
        "hours": hours,
        "wall_hours": sum(hours.values()),
        "price": given.price,
        "dollars": None if given.price is None or not devices else sum(hours.values()) * devices.count * given.price,
        "disk_gb": {name: value / 1e9 for name, value in {**disk, "total": sum(disk.values())}.items()},
        "notes": list(_notes(config, is_exact, devices is None)),
    }


def lm_calls(config: Config, counts: dict[str, int]) -> dict[str, int]:
    """Return how many pairs the LM scores at most, by stage: a document that two searches find is scored once."""
    label, calls = config.label, {}
    if config.train.labels == OWN_LABELS:
        first = label.dense + label.bm25 + label.random + (label.tuned if label.tuned_path else 0)
        calls["labels"] = counts["queries"] * first + counts["dev"] * (first + 1)
        if label.tuned and not label.tuned_path:
            calls["labels_of_tuned"] = (counts["queries"] + counts["dev"]) * label.tuned
    if config.evaluate.heldout:
        most = config.evaluate.max_examples or counts["heldout"]
        calls["measuring"] = min(most, counts["heldout"]) * (1 + 2 * config.evaluate.k)
    return calls


def _counts(config: Config, num_documents: int | None) -> tuple[dict[str, int], bool]:
    """Return the texts of each split, and whether they are counted: else they follow from the bytes of the source."""
    data = config.data
    for folder in (data.prepared, data.out, f"{config.run_dir}/data"):
        manifest = Path(folder).expanduser() / MANIFEST if folder else None
        if manifest is not None and manifest.is_file():
            return {"dev": 0, **json.loads(manifest.read_text())["counts"]}, True
    if data.corpus:
        rows = {"documents": data.corpus, "queries": data.queries, "heldout": data.heldout, "dev": data.dev}
        parts = {**SPLIT_OF_BEIR, "documents": CORPUS}
        return {split: count_rows(path, parts[split]) if path else 0 for split, path in rows.items()}, True
    found = source_bytes(data.source, FieldMap(data.text_field)) if data.source else None
    tokens = math.inf if found is None else found / TEXT_BYTES_PER_TOKEN
    dev = DEV_SHARE if data.num_dev else 0.0
    corpus = 1 - data.query_share - data.heldout_share - dev if data.corpus_share is None else data.corpus_share
    document, example = data.document_tokens or data.context_tokens, 2 * data.context_tokens
    most = {
        "documents": (num_documents or data.num_documents or math.inf, corpus * tokens / document),
        "queries": (data.num_queries, data.query_share * tokens / example),
        "heldout": (data.num_heldout, data.heldout_share * tokens / example),
        "dev": (data.num_dev, dev * tokens / example if dev else 0.0),
    }
    if math.isinf(min(most["documents"])):
        raise UserError("data.num_documents is not set, and no file is there to count; expected --documents N")
    return {split: max(int(min(numbers)), int(split != "dev")) for split, numbers in most.items()}, False


def _notes(config: Config, is_exact: bool, is_here: bool) -> Iterator[str]:
    if not is_exact:
        yield f"texts follow from the source's bytes, at {TEXT_BYTES_PER_TOKEN:g} a token: `replug prepare` counts them"
    if is_here:
        yield "hours follow from a product of matrices on this machine; --gpus 1xA100 plans for a GPU"
    if config.lm.url:
        yield "the LM's server is counted as if it ran here"


def machine_rate() -> float:
    """Measure the FLOP/s of products of float32 matrices, the best of some; those of bfloat16 follow from them."""
    matrix, seconds, begun = np.ones((SIZE, SIZE), np.float32), [math.inf], time.perf_counter()
    while time.perf_counter() - begun < MEASURED_SECONDS:
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    about = Path("/proc/cpuinfo")  # Linux alone tells; elsewhere the plan is of float32
    multiplies = about.is_file() and any(flag in about.read_text() for flag in FLAGS)
    return 2 * SIZE**3 / min(seconds) * (BFLOAT16 if multiplies else 1.0)
