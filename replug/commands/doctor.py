"""`replug doctor`: check this machine, a configuration, or files that replug wrote.

Checks do not start Ray, load models or download anything. A configuration must first pass a run's own checks.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from replug.commands.command import Overrides, load_for_run
from replug.config.errors import RunError, UserError
from replug.config.load import load_evaluation_config, names_evaluation
from replug.config.paths import find_config
from replug.config.plain_text import plain_line
from replug.config.schema import Config
from replug.slurm.ray_node import OBJECT_STORE_BYTES

GIB = 2**30
KINDS = "an index, a prepared set, labels, an encoder, a run directory"
SMALLER = "a smaller LM, index.kind=ivf_pq, lower resources, or more nodes: replug slurm"


class Check(NamedTuple):
    """The result of one check, with the fix of a problem."""

    name: str
    is_ok: bool
    result: str
    fix: str = ""


def doctor(
    what: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file or folder that replug wrote. Default: check this machine.",
            metavar="[CONFIG|FOLDER]",
            parser=find_config,
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check that this machine can run a configuration, or verify the checksums of a folder.

    FOLDER is a run directory, prepared set, labels, index or encoder. The exit status is 1 if a check fails.

    replug doctor configs/quickstart.yaml
    """
    if what is None or what.suffix in (".yaml", ".yml"):
        checks = [cuda(), shared_memory(), *(config_checks(what, overrides or []) if what else ())]
        for check in checks:
            fix = f" → {check.fix}" if check.fix and not check.is_ok else ""
            print(f"{'ok' if check.is_ok else 'wrong':<8} {check.name:<14} {plain_line(check.result + fix)}")
        raise typer.Exit(int(not all(check.is_ok for check in checks)))
    if overrides:
        raise UserError(f"{overrides[0]} is given, but {what} is not a configuration; remove it")
    verify(what)


# This machine --------------------------------------------------------------------------------------------------------


def cuda() -> Check:
    """Check that torch can use the machine's GPUs."""
    import torch

    from replug.models.hardware import unusable_gpus

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Check("CUDA", True, f"{torch.version.cuda}, {len(names)} GPUs: {', '.join(sorted(set(names)))}")
    if problem := unusable_gpus():
        return Check("CUDA", False, problem, "or hide the GPUs, to run on the CPU: CUDA_VISIBLE_DEVICES=")
    return Check("CUDA", True, "no GPU for this process: everything runs on the CPU")


def shared_memory() -> Check:
    """Check the room in /dev/shm, where Ray keeps its object store."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    found = f"{free / GIB:.2f} GiB free in /dev/shm, Ray takes {OBJECT_STORE_BYTES / GIB:.2f}"
    return Check("shared memory", free >= OBJECT_STORE_BYTES, found, "a container takes --shm-size")


# A configuration ------------------------------------------------------------------------------------------------------


def config_checks(path: Path, overrides: Sequence[str]) -> list[Check]:
    """Check a configuration as a run does before it starts, and whether it fits here."""
    try:
        config = None if names_evaluation(path) else load_for_run(path, list(overrides))
        if config is None:
            load_evaluation_config(path, overrides)
    except UserError as error:
        return [Check("configuration", False, str(error), "fix this first; its other checks did not run")]
    loaded = Check("configuration", True, f"{path}: keys, types and rules are valid")
    return [loaded, *([layout_check(config)] if config else ())]


def layout_check(config: Config) -> Check:
    """Check that all actors fit on this machine, or on the cluster at `ray.address`, which is joined for this."""
    from replug.cluster.layout import lay_out
    from replug.cluster.ray_cluster import layout_on_cluster, this_node
    from replug.models.hardware import available_memory, multiplies_bfloat16
    from replug.planning.memory import host_bytes, run_sizes
    from replug.planning.stages import known_documents

    documents, has_bfloat16, is_here = known_documents(config), multiplies_bfloat16(), config.ray.address is None
    sizes = run_sizes(config, documents, has_bfloat16)
    try:
        layout = lay_out(config, [this_node()], sizes) if is_here else layout_on_cluster(config, sizes)
    except UserError as error:
        return Check("layout", False, str(error), SMALLER)
    parts = [f"{gpu.describe()}: {gpu.num_bytes / GIB:.1f} of {gpu.limit / GIB:.1f} GiB" for gpu in layout.gpus]
    free, needed = available_memory(), host_bytes(layout, documents or 0, has_bfloat16)
    parts += [f"{needed / GIB:.1f} GiB of memory, {free / GIB:.1f} available"] if is_here else []
    result = "; ".join([config.ray.address or "this machine", layout.describe(), *parts])
    return Check("layout", needed <= free or not is_here, result, SMALLER)


# Files that replug wrote ----------------------------------------------------------------------------------------------


def verify(path: Path) -> None:
    """Print the state of a folder and of its parts. Raises UserError if replug wrote none, RunError for damage."""
    from replug.data.folder import CHECKSUMS, MANIFEST, checksum_problems, kind_of, manifest_problems
    from replug.data.shards import OWN_CORPUS
    from replug.index_workers.build_plan import index_folder
    from replug.index_workers.version_store import VersionStore

    if not path.exists():
        raise UserError(f"{path} does not exist; expected a YAML file or {KINDS}")
    store = VersionStore(index_folder(path).absolute())
    versions = {store.folder(version): version for version in store.versions()}
    states: dict[Path, list[str]] = {}
    for folder in (path, path / "data", path / "labels", path / "retriever", store.root / OWN_CORPUS, *versions):
        if kind_of(folder) is not None or folder in versions:
            states[folder] = manifest_problems(folder)
        if (folder / CHECKSUMS).is_file():
            states[folder] = [*states.get(folder, ()), *checksum_problems(folder)]
        if folder in versions and store.is_published(versions[folder]) and not states[folder]:
            states[folder] = store.corpus_problems(versions[folder])
    if not states:
        raise UserError(f"{path} holds nothing that replug wrote; expected {KINDS}")
    for folder, wrong in states.items():
        is_whole = (folder / MANIFEST).is_file() or (folder / CHECKSUMS).is_file()
        state = f"wrong in {len(wrong)} places" if wrong else "all intact" if is_whole else "unfinished"
        print(plain_line(f"{folder}: {state}"))
        for problem in wrong:
            print(f"WRONG: {plain_line(problem)}")
    if problems := [problem for wrong in states.values() for problem in wrong]:
        raise RunError(f"{path} is wrong in {len(problems)} places, first: {problems[0]}")
