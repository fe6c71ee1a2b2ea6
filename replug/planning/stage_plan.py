"""Plan a run by its stages: on this machine, and a training on labels on GPUs too.

On this machine the rate is measured: products of small matrices on one core, which take less than a second. On GPUs it
is that of other plans.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from replug.cluster.environment import allowed_cores
from replug.config.errors import UserError
from replug.config.hub_names import OURS
from replug.config.paths import names_store
from replug.config.schema import DEV_SHARE, Config, DataConfig
from replug.data.folder import MANIFEST
from replug.data.row_files import SPLIT_OF_BEIR, count_rows, row_files
from replug.data.rows import count_documents
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import source_bytes
from replug.data.vector_stores import open_source
from replug.planning.accelerators import parse_devices
from replug.planning.memory import resolve_dtype
from replug.planning.pace import job_of
from replug.planning.stages import TAKING_TURNS, Counts, Speeds, on_processors, timed_stages
from replug.planning.training import Assumptions
from replug.planning.workload import SCORE_BYTES, TEXT_BYTES_PER_TOKEN, run_bytes

THIS_MACHINE = "this machine"
REACHED = 0.6  # of the rate of products of matrices, which passes of a small LM reach
BFLOAT16, FLAGS = 3.0, ("avx512_bf16", "amx_bf16")  # times as fast, on processors with one of these
SIZE, MANY, MEASURED_SECONDS = 64, 64, 0.5  # matrices so small that one core multiplies them


def plan_stages(config: Config, gpus: str | None, given: Assumptions) -> dict[str, Any]:
    """Plan a run on this machine, or on GPUs that take turns. Raises UserError for what cannot be planned."""
    counts, is_exact = _counts(config, given.num_documents)
    # a store embeds none
    embedded = replace(counts, documents=1) if names_store(config.data.corpus) else counts
    devices = parse_devices(gpus, efficiency=given.efficiency) if gpus else None
    device = "cuda" if devices else "cpu"
    job = job_of(config, given.lm_parameters, given.retriever_parameters, embedded.documents, device)
    cores = 0.0 if devices else REACHED * machine_rate()

    def seconds(flop: float, dtype: str, role: str) -> float:
        if devices:
            return flop / devices.count / devices.rate(dtype, role)
        has_bfloat16 = _multiplies_bfloat16()
        is_fast = has_bfloat16 and resolve_dtype(dtype, has_bfloat16) == "bfloat16"
        return flop / cores / (BFLOAT16 if is_fast else 1.0)

    speeds = Speeds(
        seconds(job.work.pair, config.lm.dtype.value, "score"),
        seconds(job.work.document, config.index.dtype.value, "embed"),
        seconds(job.work.document, config.train.precision.value, "train"),
    )
    split = TAKING_TURNS if devices else on_processors(allowed_cores())
    stages = timed_stages(config, embedded, job.retriever, speeds, split)
    hours = sum(stage.seconds or 0.0 for stage in stages) / 3600
    disk = run_bytes(config, job.shape, job.retriever, job.trained.learning, job.index)
    disk["scores"] = float(SCORE_BYTES * sum(stage.pairs for stage in stages))
    return {
        "devices": str(devices) if devices else THIS_MACHINE,
        "lm": {"name": job.lm.name, "parameters": job.lm.parameters},
        "retriever": {"name": job.retriever.name, "parameters": job.retriever.parameters},
        "texts": asdict(counts),
        "lm_calls": sum(stage.pairs for stage in stages),
        "tokens": sum(stage.pairs for stage in stages) * job.shape.pair,
        "stages": [asdict(stage) for stage in stages],
        "wall_hours": hours,
        "price": given.price,
        "dollars": None if given.price is None or not devices else hours * devices.count * given.price,
        "disk_gb": {name: value / 1e9 for name, value in {**disk, "total": sum(disk.values())}.items()},
        "notes": list(_notes(config, is_exact, devices is None)),
    }


def _counts(config: Config, num_documents: int | None) -> tuple[Counts, bool]:
    """Return the texts of each split, and whether they are counted: else they follow from the bytes of the source."""
    data = config.data
    for folder in (data.prepared, data.out, f"{config.run_dir}/data"):
        manifest = Path(folder).expanduser() / MANIFEST if folder else None
        if manifest is not None and manifest.is_file():
            return Counts(**{"dev": 0, **json.loads(manifest.read_text())["counts"]}), True
    if data.corpus:
        rows = {"documents": data.corpus, "queries": data.queries, "heldout": data.heldout, "dev": data.dev}
        given = {"documents": num_documents}
        counted = {split: given.get(split) or _count(data, path, split) if path else 0 for split, path in rows.items()}
        asked = {split: getattr(data, f"num_{split}") if of is None else of for split, of in counted.items()}
        if asked["documents"] is None:
            raise UserError(f"{data.corpus} is a dataset of the hub, whose rows are not counted; give --documents N")
        return Counts(**asked), None not in counted.values()
    found = source_bytes(data.source, FieldMap.of(data.fields)) if data.source else None
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
    return Counts(**{split: max(int(min(numbers)), int(split != "dev")) for split, numbers in most.items()}), False


def _count(data: DataConfig, path: str, split: str) -> int | None:
    """Count the rows of files, or the documents of a store; None for a dataset of the hub."""
    if names_store(path):
        with closing(open_source(path)) as source:
            return len(source)
    if row_files(path) is None:
        return None
    return count_documents(path, data.fields) if split == "documents" else count_rows(path, SPLIT_OF_BEIR[split])


def _notes(config: Config, is_exact: bool, is_here: bool) -> Iterator[str]:
    if not is_exact and config.data.corpus:
        yield "rows of datasets of the hub are not counted: their numbers are --documents and data.num_queries, ..."
    elif not is_exact:
        yield f"texts follow from the source's bytes, at {TEXT_BYTES_PER_TOKEN:g} a token: `replug prepare` counts them"
    if is_here:
        yield "hours follow from products of matrices on this machine; a run times its own work"
    source = "" if is_exact else config.data.source or ""
    if source and not OURS.fullmatch(source) and source_bytes(source, FieldMap.of(config.data.fields)) is None:
        yield f"no file or folder {source} is here: it is taken for a dataset of the hub"
    if config.lm.url:
        yield "the LM's server is counted as if it ran here"


def machine_rate() -> float:
    """Measure the FLOP/s of float32 products on one core, the best of some, times the cores."""
    matrices, seconds, begun = np.ones((MANY, SIZE, SIZE), np.float32), [math.inf], time.perf_counter()
    while time.perf_counter() - begun < MEASURED_SECONDS:
        start = time.perf_counter()
        matrices @ matrices
        seconds.append(time.perf_counter() - start)
    return allowed_cores() * 2 * MANY * SIZE**3 / min(seconds)


def _multiplies_bfloat16() -> bool:
    about = Path("/proc/cpuinfo")  # Linux alone tells; elsewhere the plan is of float32
    return about.is_file() and any(flag in about.read_text() for flag in FLAGS)
