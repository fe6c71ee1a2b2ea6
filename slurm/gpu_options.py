"""How many GPUs a job asks SLURM for on each node, and how many a step was given. Pure: options and variables in.

What cannot be counted is refused by its option's name: a count that is wrong is found only after days in the queue, as
actors that wait for a GPU.

    option of sbatch    value                                       counts
    --gpus-per-node     4, a100, a100:4, a100:2,h100:2              each node
    --gpus-per-task     the same                                    each node, since a step here is one task
    --gres              gpu, gpu:4, gpu:a100:4, lustre:1,gpu:2      each node; other resources are passed over
    --gpus              as --gpus-per-node                          the one node; refused where there are several
"""

import re
from collections.abc import Mapping

PARTS_OF_A_GPU = ("shard", "mps")  # which other jobs use too
NO_GPU = ("", "-1", "NoDevFiles", "none", "void")  # what hides every GPU in CUDA_VISIBLE_DEVICES
WISH = "expected GPUs of each node, such as --gpus-per-node=4 or --gpus-per-node=a100:4"


def gpus_per_node(options: Mapping[str, str], num_nodes: int) -> int:
    """Return the GPUs of each node by sbatch's options. Raises ValueError for what cannot be counted, or differs."""
    if "gpus-per-socket" in options:
        raise ValueError(f"--gpus-per-socket: how many sockets a node has is not known here; {WISH}")
    if "gpus" in options and num_nodes > 1:  # SLURM deals them out unevenly, and gives no step of one node any
        raise ValueError(
            f"--gpus={options['gpus']}: how SLURM divides them among {num_nodes} nodes is not known; {WISH}"
        )
    counted = {}
    for name in ("gres", "gpus-per-node", "gpus-per-task", "gpus"):
        wished = [part.strip() for part in options[name].split(",")] if name in options else []
        if name == "gres":
            wished = list(_gpus_of_gres(wished))
        if wished and (count := sum(_count(name, part) for part in wished)):
            counted[f"--{name}"] = count
    if len(set(counted.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counted.items())
        raise ValueError(f"{', '.join(counted)}: they differ in the GPUs of a node ({said}); give one of them")
    return next(iter(counted.values()), 0)


def _gpus_of_gres(entries: list[str]) -> list[str]:
    """Return TYPE:COUNT, as other options have it, of each `[gres:|gres/]gpu[:TYPE][:COUNT]`."""
    found = []
    for entry in entries:
        name, _, rest = re.sub(r"^gres[:/]", "", entry).partition(":")
        if name in PARTS_OF_A_GPU:
            raise ValueError(f"--gres={entry}: {name} is a part of a GPU that other jobs use too; {WISH}")
        found += [rest or "1"] if name == "gpu" else []
    return found


def _count(name: str, part: str) -> int:
    """Count `4`, `a100:4`, or `a100`, which is one."""
    found = re.fullmatch(r"(?:[\w.-]+:)?(\d+)|[A-Za-z][\w.-]*", part)
    if found is None:
        raise ValueError(f"--{name}: {part!r} cannot be read; {WISH}")
    return 1 if found[1] is None else int(found[1])


def gpus_of_step(environment: Mapping[str, str]) -> int:
    """Return the GPUs that SLURM's variables give a process of this step. Raises ValueError where they differ.

    `CUDA_VISIBLE_DEVICES` counts where SLURM gave GPUs at all: without any it is a left-over of the user's shell.
    """
    if (count := environment.get("SLURM_GPUS_ON_NODE")) and not count.isdigit():
        raise ValueError(f"SLURM_GPUS_ON_NODE: expected a number of GPUs, found {count!r}")
    listed = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS") or ""
    given, shown = int(count) if count else len(_ids(listed)), environment.get("CUDA_VISIBLE_DEVICES")
    if given and shown is not None and (visible := len(_ids(shown))) != given:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES: SLURM gave this step {given} GPUs, but {shown!r} shows {visible}; expected all of "
            "them: leave --gpu-bind and --ntasks-per-gpu out, and ask by --gpus-per-node"
        )
    return given


def _ids(listed: str) -> list[str]:
    """Return the entries of `0,1`, `0-3` or `GPU-5a…,GPU-77…`."""
    found: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if span := re.fullmatch(r"(\d+)-(\d+)", entry):
            found += [str(number) for number in range(int(span[1]), int(span[2]) + 1)]
        else:
            found.append(entry)
    return [entry for entry in found if entry not in NO_GPU]
