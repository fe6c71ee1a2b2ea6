"""How many GPUs a job asks SLURM for on each node, and how many a step was given. Pure: options and variables in.

SLURM takes the same wish in several spellings. What cannot be counted is refused by its option's name: a count that
is wrong is found only after days in the queue, as actors that wait for a GPU.

    option of sbatch    value                                       counts
    --gpus-per-node     4, a100, a100:4, a100:2,h100:2              each node
    --gres              gpu, gpu:4, gpu:a100:4, lustre:1,gpu:2      each node; what is no GPU is passed over
    --gpus-per-task     as --gpus-per-node                          each node, since a step here is one task
    --gpus              as --gpus-per-node                          the one node; refused where there are several
"""

import re
from collections.abc import Mapping

COUNT = re.compile(r"(?P<number>\d+)(?P<suffix>[kmgtp]?)", re.IGNORECASE)
SHARED = ("shard", "mps")  # parts of a GPU that other jobs use too
NO_GPU = ("", "-1", "NoDevFiles", "none", "void")  # what hides every GPU in CUDA_VISIBLE_DEVICES
BY_TYPE = ("gpus-per-node", "gpus-per-task")  # whose value is a count, or TYPE:COUNT
WISH = "expected GPUs of each node, such as --gpus-per-node=4 or --gpus-per-node=a100:4"


def gpus_per_node(options: Mapping[str, str], num_nodes: int) -> int:
    """GPUs of each node by sbatch's options. Raises ValueError for what cannot be counted, and for two that differ."""
    if "gpus-per-socket" in options:
        raise ValueError(f"--gpus-per-socket: how many sockets a node has is not known here; {WISH}")
    counted = {
        "--gres": _of_gres(options.get("gres", "")),
        **{f"--{name}": _of_types(name, options[name]) for name in BY_TYPE if name in options},
    }
    if "gpus" in options:
        counted["--gpus"] = _of_all_nodes(options["gpus"], num_nodes)
    wanted = {name: count for name, count in counted.items() if count}
    if len(set(wanted.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in wanted.items())
        raise ValueError(f"{', '.join(wanted)}: they differ in the GPUs of a node ({said}); give one of them")
    return next(iter(wanted.values()), 0)


def gpus_of_step(environment: Mapping[str, str]) -> int:
    """GPUs that a process of this step sees, by the variables that SLURM set. Raises ValueError where they differ.

    `CUDA_VISIBLE_DEVICES` counts where SLURM gave GPUs at all: without any it is a left-over of the user's shell.
    """
    given = _given(environment)
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if given and shown is not None and (count := len(_ids(shown))) != given:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES: SLURM gave this step {given} GPUs, but {shown!r} shows {count}; expected all of "
            "them: leave --gpu-bind and --ntasks-per-gpu out, and ask by --gpus-per-node"
        )
    return given


def _given(environment: Mapping[str, str]) -> int:
    if count := environment.get("SLURM_GPUS_ON_NODE"):
        return _count("SLURM_GPUS_ON_NODE", count)
    return len(_ids(environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS") or ""))


def _ids(listed: str) -> list[str]:
    """Entries of `0,1`, `0-3` or `GPU-5a…,GPU-77…`."""
    found: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        first, dash, last = entry.partition("-")
        is_range = bool(dash) and first.isdigit() and last.isdigit()
        found += [str(number) for number in range(int(first), int(last) + 1)] if is_range else [entry]
    return [entry for entry in found if entry not in NO_GPU]


def _of_gres(value: str) -> int:
    """Of `[gres:|gres/]NAME[:TYPE][:COUNT],…` only the GPUs."""
    total = 0
    for entry in (part.strip() for part in value.split(",")):
        name, _, rest = re.sub(r"^gres[:/]", "", entry).partition(":")
        if name in SHARED:
            raise ValueError(f"--gres={value}: {name} is a part of a GPU that other jobs use too; {WISH}")
        total += _of_type("gres", rest, value) if name == "gpu" else 0
    return total


def _of_all_nodes(value: str, num_nodes: int) -> int:
    """SLURM deals them out unevenly (3 and 1 of 4 were seen), and gives no step of one node any."""
    if num_nodes > 1:
        raise ValueError(f"--gpus={value}: how SLURM divides them among {num_nodes} nodes is not known; {WISH}")
    return _of_types("gpus", value)


def _of_types(name: str, value: str) -> int:
    return sum(_of_type(name, part.strip(), value) for part in value.split(","))


def _of_type(name: str, part: str, value: str) -> int:
    """Of `4`, `a100:4`, or `a100` and nothing, which are one."""
    kind, colon, count = part.rpartition(":")
    if not colon and (re.fullmatch(r"[A-Za-z][\w.-]*", count) or (name == "gres" and not count)):
        return 1  # a type, or a bare `gpu`
    if (colon and not re.fullmatch(r"[\w.-]+", kind)) or not COUNT.fullmatch(count):
        raise ValueError(f"--{name}={value}: {part!r} cannot be read; {WISH}")
    return _count(f"--{name}", count)


def _count(name: str, text: str) -> int:
    found = COUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"{name}: expected a number of GPUs, found {text!r}")
    return int(found["number"]) * 1024 ** " kmgtp".index(found["suffix"].lower() or " ")
