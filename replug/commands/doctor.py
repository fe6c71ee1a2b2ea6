"""`replug doctor`: check this machine, a configuration, or files that replug wrote.

Checks do not start Ray, load models or download anything. A configuration must first pass a run's own checks.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

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


State = StrEnum("State", ["ok", "warning", "wrong"])


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: its state, a line of explanation, and its fix."""

    name: str
    state: State
    found: str
    fix: str = ""


def doctor(
    what: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file, folder that replug wrote, or cache of LM scores. Default: check this machine.",
            metavar="[CONFIG|FOLDER|CACHE]",
            parser=find_config,
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check that this machine can run a configuration, or verify the checksums of a folder.

    FOLDER is a run directory, prepared set, labels, index or encoder; CACHE is RUN_DIR/scores.sqlite. The exit status
    is 1 if a check fails.

    replug doctor configs/quickstart.yaml
    """
    if what is None or what.suffix in (".yaml", ".yml"):
        checks = [check() for check in MACHINE_CHECKS] + (config_checks(what, overrides or []) if what else [])
        for check in checks:
            fix = f" → {check.fix}" if check.fix and check.state is not State.ok else ""
            print(f"{check.state:<8} {check.name:<14} {plain_line(check.found + fix)}")
        raise typer.Exit(int(any(check.state is State.wrong for check in checks)))
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
        return Check("CUDA", State.ok, f"{torch.version.cuda}, {len(names)} GPUs: {', '.join(sorted(set(names)))}")
    if problem := unusable_gpus():
        return Check("CUDA", State.wrong, problem, "or hide the GPUs, to run on the CPU: CUDA_VISIBLE_DEVICES=")
    return Check("CUDA", State.ok, "no GPU for this process: everything runs on the CPU")


def shared_memory() -> Check:
    """Check the room in /dev/shm, where Ray keeps its object store."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    found = f"{free / GIB:.2f} GiB free in /dev/shm, Ray takes {OBJECT_STORE_BYTES / GIB:.2f}"
    state = State.wrong if free < OBJECT_STORE_BYTES else State.ok
    return Check("shared memory", state, found, "a container takes --shm-size")


MACHINE_CHECKS = (cuda, shared_memory)


# A configuration ------------------------------------------------------------------------------------------------------


def config_checks(path: Path, overrides: Sequence[str]) -> list[Check]:
    """Check a configuration as a run does before it starts, and whether it fits here."""
    config = None
    try:
        if names_evaluation(path):
            load_evaluation_config(path, overrides)
        else:
            config = load_for_run(path, list(overrides))
    except UserError as error:
        fix = "fix this first; its other checks did not run"
        return [Check("configuration", State.wrong, str(error), fix)]
    loaded = Check("configuration", State.ok, f"{path}: keys, types and rules are valid")
    return [loaded, *((disk(config), *memory_and_layout(config)) if config else ())]


def disk(config: Config) -> Check:
    """Check the free disk space for index versions, checkpoints and the corpus."""
    from replug.planning.memory import disk_bytes
    from replug.planning.stages import Counts, count_texts

    try:
        counts, unknown = count_texts(config)[0], ""
    except UserError:
        counts, unknown = Counts(0, 0, 0, 0), "; documents not counted yet"
    parts, run_dir = disk_bytes(config, counts), Path(config.run_dir).expanduser().absolute()
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    needed, free = sum(parts.values()), shutil.disk_usage(existing).free
    sizes = ", ".join(f"{name.replace('_', ' ')} {value / GIB:.1f}" for name, value in parts.items())
    found = f"{free / GIB:.1f} GiB free, about {needed / GIB:.1f} needed ({sizes}{unknown})"
    fix = "another run_dir or data.out, or fewer documents"
    return Check("disk", State.wrong if needed > free else State.ok, found, fix)


def memory_and_layout(config: Config) -> list[Check]:
    """Check that all actors fit on this machine, or on the cluster at `ray.address`, which is joined for this."""
    from replug.cluster.layout import lay_out
    from replug.cluster.ray_cluster import layout_on_cluster, this_node
    from replug.models.hardware import available_memory, multiplies_bfloat16
    from replug.planning.memory import host_bytes, run_sizes
    from replug.planning.stages import known_documents

    documents, has_bfloat16 = known_documents(config), multiplies_bfloat16()
    sizes = run_sizes(config, documents, has_bfloat16)
    try:
        on_cluster = config.ray.address is not None
        layout = layout_on_cluster(config, sizes) if on_cluster else lay_out(config, [this_node()], sizes)
    except UserError as error:
        return [Check("layout", State.wrong, str(error), SMALLER)]
    planned = [f"{gpu.describe()}: {gpu.num_bytes / GIB:.1f} of {gpu.limit / GIB:.1f} GiB" for gpu in layout.gpus]
    found = "; ".join([config.ray.address or "this machine", layout.describe(), *planned, *layout.notes])
    fits = Check("layout", State.ok, found)
    if layout.num_waiting:
        fits = Check("layout", State.warning, f"{found}: {layout.num_waiting} scorers do not fit", SMALLER)
    if on_cluster:
        return [fits]
    needed = host_bytes(layout.config, documents or 0, has_bfloat16, index=layout.index)
    free = available_memory()
    found = f"{free / GIB:.1f} GiB available, about {needed / GIB:.1f} needed for trainer, LM and index"
    return [Check("memory", State.wrong if needed > free else State.ok, found, SMALLER), fits]


# Files that replug wrote ----------------------------------------------------------------------------------------------


def verify(path: Path) -> None:
    """Print contents and problems of a path. Raises UserError if replug did not write it, RunError if it is damaged."""
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a YAML file, {KINDS} or a cache of scores")
    lines, problems = _verify_folder(path) if path.is_dir() else _verify_scores(path)
    for line in lines:
        print(plain_line(line))
    for problem in problems:
        print(f"WRONG: {plain_line(problem)}")
    if problems:
        raise RunError(f"{path} is wrong in {len(problems)} places, first: {problems[0]}")


def _verify_folder(directory: Path) -> tuple[list[str], list[str]]:
    """Return a folder's contents, as lines, and its problems; a run directory is verified with all its folders."""
    from replug.data.folder import CHECKSUMS, Folder, checksum_problems, kind_of
    from replug.data.labels import labels_folder
    from replug.data.store import verify_prepared
    from replug.evals.folder import EvaluationFolder
    from replug.index_workers.build_plan import index_folder, missing_index, version_numbers
    from replug.index_workers.version_store import verify_index  # imports FAISS
    from replug.train.run_dir import MEND

    if kind_of(directory) == "prepared set":
        return verify_prepared(directory)
    is_prepared = kind_of(directory / "data") == "prepared set"
    lines, problems = verify_prepared(directory / "data") if is_prepared else ([], [])
    checked: dict[Path, list[str]] = {}
    for folder in (directory, directory / "retriever"):
        if (folder / CHECKSUMS).is_file():
            checked[folder] = checksum_problems(folder)
    for folder in (directory, directory / "labels"):
        run = Folder(folder, "run", key="run_dir", fix_hint=MEND, others=("*",))  # may hold a user's own files
        evaluation = EvaluationFolder(folder).folder
        made = {"run": run, "set of labels": labels_folder(folder), "evaluation": evaluation}.get(kind_of(folder) or "")
        if made is not None and made.is_finished:
            checked[folder] = made.verify()
    for folder, wrong in checked.items():
        lines.append(f"{folder}: {'all intact' if not wrong else f'wrong in {len(wrong)} places'}")
        problems += wrong
    if not lines and kind_of(directory) is None and not version_numbers(index_folder(directory)):
        raise UserError(f"{directory} holds nothing that replug wrote; expected {KINDS}")
    if kind_of(directory) == "run" and not version_numbers(index_folder(directory)):
        lines.append(f"without an index: {missing_index(directory)}")
    elif version_numbers(index_folder(directory)) or not lines:
        of_index = verify_index(index_folder(directory))
        lines, problems = of_index[0] + lines, of_index[1] + problems
    return lines, problems


def _verify_scores(path: Path) -> tuple[list[str], list[str]]:
    """Ask SQLite whether a cache of scores is sound. Raises UserError for another file."""
    from replug.models.score_cache import ScoreCache

    if not path.stat().st_size:  # opening it would turn it into a cache
        raise UserError(f"{path} is empty; expected a cache of scores, such as RUN_DIR/scores.sqlite")
    cache = ScoreCache(path)
    try:
        if (damage := cache.damage()) is not None:
            return [], [f"{path} is damaged ({damage}): remove it, and its scores are computed again"]
        return [f"{path}: intact, {cache.num_rows()} scores"], []
    finally:
        cache.close()
