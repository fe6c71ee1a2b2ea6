"""`replug slurm`: write a job script for a configuration, and freeze its code and configuration in the run directory.

    RUN_DIR/submitted/JOB/config.yaml     the resolved configuration
                          code/           a copy of the package
                          version.json    commit, uncommitted changes, package versions
                          job.sbatch      slurm/job.sbatch with this job's options
                          JOBNUMBER.log   the job's output

JOB is train, prepare or evaluate, and the time. Later edits do not reach a queued or requeued job.
"""

import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from replug import __version__
from replug.cluster.layout import ROLES as ALL_ROLES
from replug.cluster.layout import UNKNOWN, Layout, Node, lay_out
from replug.commands.command import LM, ConfigFile, Overrides, Retriever, Source, with_short_keys
from replug.config.errors import RunError, UserError
from replug.config.load import config_to_yaml, load_config
from replug.config.paths import check_paths
from replug.config.schema import Config, DataConfig
from replug.data.files import replace_file, write_json, writing
from replug.data.prepare.reading import num_processes
from replug.data.sources.records import FieldMap
from replug.data.sources.shards import SOURCE_SHARD_BYTES, source_bytes
from replug.data.sources.texts import is_built_in
from replug.planning.accelerators import find_accelerator
from replug.planning.memory import host_bytes, run_sizes
from replug.planning.stages import known_documents
from replug.train.run_dir import RunDirectory, describe_environment

CODE = Path(__file__).parents[1]  # the package; its folders may be links
TEMPLATE = CODE / "slurm/job.sbatch"
MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}  # options of sbatch; a job may set one of them
GPU_RESOURCES = ("gpu", "shard", "mps")  # the latter are parts of a GPU, which other jobs use too
UNSUPPORTED = ("gpus", "gpus-per-task", "gpus-per-socket")
PROCESS_GIB, WORKER_GIB = 4, 2  # host memory: of a process with torch and CUDA, and of a data worker
ROLES = {"train": ALL_ROLES, "prepare": (), "evaluate": ("score", "index")}
JOBS = tuple(ROLES)
OPTION = re.compile(r"--[a-z][a-z-]*(=.+)?")
DIRECTIVE = "#SBATCH --"


def slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    source: Source = None,
    retriever: Retriever = None,
    lm: LM = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Freeze configuration and code, then submit the job.")
    ] = False,
    job: Annotated[str, typer.Option(help="Command to run: train, prepare or evaluate.")] = "train",
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.", min=1)] = None,
    gpus_per_node: Annotated[str | None, typer.Option(help="GPUs per node, such as 4 or a100:4.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="CPUs per node.", min=1)] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 24:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="SLURM partition.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM account.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Further sbatch option, such as --sbatch=--mem=64G. Repeatable.")
    ] = None,
) -> None:
    """Show the SLURM job for a configuration; with --submit, freeze it into RUN_DIR and submit it.

    replug slurm configs/paper.yaml --nodes 2 --gpus-per-node 4 --partition gpu --submit
    """
    given = {"nodes": nodes, "gpus-per-node": gpus_per_node, "cpus-per-task": cpus_per_task, "time": time}
    given |= {"partition": partition, "account": account}
    options = {name: str(value) for name, value in given.items() if value is not None}
    for option in sbatch or ():
        if not OPTION.fullmatch(option):
            raise UserError(f"--sbatch: {option!r} is not an sbatch option; expected one such as --sbatch=--mem=64G")
        name, _, value = option.removeprefix("--").partition("=")
        options[name] = value
    run_slurm(config, with_short_keys(overrides, source, retriever, lm), job, options, submit)


def run_slurm(path: Path, overrides: Sequence[str], job: str, given: Mapping[str, str], submit: bool) -> None:
    """Print the job of a configuration; with `submit`, freeze and submit it. `given` are options of sbatch."""
    if job not in JOBS:
        raise UserError(f"--job: expected one of {', '.join(JOBS)}, found {job}")
    needed = job != "prepare"
    config = load_config(path, overrides, needs_lm=needed, needs_retriever=needed)
    check_paths(config)
    run = RunDirectory(Path(config.run_dir).expanduser().absolute())
    folder = run.path / f"submitted/{job}-{datetime.now():%Y%m%d-%H%M%S}"
    # A configuration file must not choose the secret for the server (`config.load`): the user names it here.
    key = [f"lm.api_key_env={config.lm.api_key_env}"] if config.lm.url else []
    options = {**template_options(), **given}
    layout = _layout(config, job, options)
    if not MEMORY & given.keys():
        cpus = _number("cpus-per-task", options["cpus-per-task"])
        given = {**given, "mem": f"{_memory_gib(layout, job, _num_nodes(options), cpus)}G"}
    script = render(job, given, folder, Path.cwd(), sys.executable, key)
    if job == "train":  # a run resumes with its first configuration
        if run.is_finished:
            raise UserError(f"run_dir: {run.path} holds a finished run; give another run_dir to train again")
        run.require_config(config)
    print(_summary(path, job, given, layout, folder))
    if not submit:
        print(f"\n{script}\nNothing is written or submitted yet: add --submit.")
        return
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on PATH; expected the login node of a SLURM cluster")
    freeze(config, folder, script)
    done = subprocess.run(["sbatch", "--parsable", str(folder / "job.sbatch")], capture_output=True, text=True)
    if done.returncode != 0:
        raise RunError(f"sbatch refused {folder / 'job.sbatch'}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    print(f"submitted as job {number}; log: {folder / number}.log; `squeue --jobs={number}` shows its state")


def render(
    job: str, given: Mapping[str, str], folder: Path, submitted_from: Path, python: str, overrides: Sequence[str] = ()
) -> str:
    """Return slurm/job.sbatch with other options, its variables set to the frozen files in `folder`."""
    own = {"job-name": f"replug-{job}", "output": str(folder).replace("%", "%%") + "/%j.log"}
    variables = {
        "folder": shlex.quote(str(submitted_from)),
        "code": shlex.quote(str(folder / "code")),
        "python": shlex.quote(python),
        "arguments": f"({shlex.join([job, str(folder / 'config.yaml'), *overrides])})",
    }
    first, *body = (line for line in TEMPLATE.read_text().splitlines() if not line.startswith(DIRECTIVE))
    lines = [first, *(_directive(name, value) for name, value in {**template_options(), **own, **given}.items())]
    for line in body:
        name, equals, _ = line.partition("=")
        lines.append(f"{name}={variables[name]}" if equals and name in variables else line)
    return "\n".join(lines) + "\n"


def template_options() -> dict[str, str]:
    """Return the sbatch options of slurm/job.sbatch."""
    lines = (line for line in TEMPLATE.read_text().splitlines() if line.startswith(DIRECTIVE))
    parts = (line.removeprefix(DIRECTIVE).partition("=") for line in lines)
    return {name: value for name, _, value in parts}


def _directive(name: str, value: str) -> str:
    quoted = f'"{value}"' if " " in value else value  # SLURM reads quotes there as a shell does
    return f"{DIRECTIVE}{name}={quoted}" if value else f"{DIRECTIVE}{name}"


def freeze(config: Config, folder: Path, script: str) -> None:
    """Write configuration, code, versions and script into a new folder."""
    with writing(folder):
        folder.mkdir(parents=True)
        # Links are followed: in a checkout the folders lie beside `replug/`.
        ignored = shutil.ignore_patterns("__pycache__", "*.py[co]")
        shutil.copytree(CODE, folder / "code" / CODE.name, ignore=ignored)
    replace_file(folder / "config.yaml", config_to_yaml(config).encode())
    write_json(folder / "version.json", describe_environment())
    replace_file(folder / "job.sbatch", script.encode())


def _layout(config: Config, job: str, options: Mapping[str, str]) -> Layout:
    """Lay the job's actors out on the requested nodes. Raises UserError if they do not fit."""
    cpus, roles = _number("cpus-per-task", options["cpus-per-task"]), ROLES[job]
    gpus, name = gpus_of_nodes(options)
    gpu = find_accelerator(name or "")
    num_bytes = 1e9 * gpu.memory_gb if gpu else None
    nodes = [
        Node(f"node {number}", cpus, gpus, num_bytes, is_driver=number == 0) for number in range(_num_nodes(options))
    ]
    sizes = run_sizes(config, known_documents(config), gpu is None or gpu.has_bfloat16) if roles else UNKNOWN
    return lay_out(config, nodes, sizes, roles)


def gpus_of_nodes(options: Mapping[str, str]) -> tuple[int, str | None]:
    """Return the GPUs of each node by sbatch's options, and their type where it is named.

    Options are `--gpus-per-node` (4, a100, a100:4) or `--gres` (gpu, gpu:4, gpu:a100:4, lustre:1,gpu:2).
    """
    resources = [re.sub(r"^gres[:/]", "", part.strip()) for part in options.get("gres", "").split(",")]
    requested = [f"--gres={part}" for part in resources if part.partition(":")[0] in GPU_RESOURCES]
    requested += [f"--{name}={options[name]}" for name in ("gpus-per-node", *UNSUPPORTED) if name in options]
    if not requested:
        return 0, None
    match = re.fullmatch(r"--(?:gpus-per-node=|gres=gpu:?)([A-Za-z][\w.-]*)?:?(\d+)?", requested[0])
    if len(requested) > 1 or match is None:
        raise UserError(
            f"{', '.join(requested)}: the GPUs of each node do not follow from it; expected one option, such as "
            "--gpus-per-node=4 or --gpus-per-node=a100:4"
        )
    return int(match[2] or 1), match[1]


def _memory_gib(layout: Layout, job: str, num_nodes: int, cpus: int) -> int:
    """Return the GiB of host memory for a node: its processes, their data outside GPUs, and data workers."""
    config = layout.config
    needed = PROCESS_GIB + WORKER_GIB * _num_workers(config.data, cpus)
    if job == "prepare":
        return needed
    # The node's processors are not known here; LMs in float32 take the most.
    held = host_bytes(layout, known_documents(config) or 0, False, num_nodes)
    processes = 1 + math.ceil(len(layout.actors) / num_nodes)
    return max(needed, PROCESS_GIB * processes + math.ceil(held / 2**30))


def _num_workers(data: DataConfig, cpus: int) -> int:
    """Return the preparing processes of a job; a dataset of the hub may have any number of shards."""
    if data.prepared or not data.source or is_built_in(data.source):
        return 0
    num_bytes = source_bytes(data.source, FieldMap.of(data.fields))
    return cpus if num_bytes is None else num_processes(num_bytes // SOURCE_SHARD_BYTES, cpus)


def _num_nodes(options: Mapping[str, str]) -> int:
    return max(1, _number("nodes", options["nodes"].partition("-")[0]))  # the least of a range such as 2-4


def _number(option: str, text: str) -> int:
    if not text.isdigit():
        raise UserError(f"--{option}: {text!r} cannot be read; expected a number, such as --{option}=2")
    return int(text)


def _summary(path: Path, job: str, given: Mapping[str, str], layout: Layout, folder: Path) -> str:
    rows = {
        "job": f"replug {job} {path}",
        "SLURM": "  ".join(f"--{name}={value}" for name, value in given.items()),
        "actors": layout.describe() or "none",
        "run directory": f"{folder.parents[1]} (all nodes must see it)",
        "Python": f"{sys.executable} (all nodes must see it)",
        "frozen": f"replug {__version__}, in {folder}",
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())
