"""Count the GPUs that a job asks SLURM for on each node, and those that a step was given. Pure.

--gpus-per-node     4, a100, a100:4, a100:2,h100:2
--gres              gpu, gpu:4, gpu:a100:4, lustre:1,gpu:2
"""

import re
from collections.abc import Mapping

UNSUPPORTED = {"gpus", "gpus-per-task", "gpus-per-socket"}
PARTS_OF_A_GPU = ("shard", "mps")  # which other jobs use too
NO_GPU = ("", "-1", "NoDevFiles", "none", "void")  # what hides every GPU in CUDA_VISIBLE_DEVICES
WISH = "expected GPUs of each node, such as --gpus-per-node=4 or --gpus-per-node=a100:4"


def gpus_per_node(options: Mapping[str, str]) -> int:
    """Return the GPUs of each node by sbatch's options. Raises ValueError for other options and unreadable values."""
    for name in UNSUPPORTED & options.keys():
        raise ValueError(f"--{name}={options[name]}: the GPUs of each node do not follow from it; {WISH}")
    entries = options.get("gpus-per-node", "0").split(",")
    counts = {"--gpus-per-node": sum(_count("gpus-per-node", entry.strip()) for entry in entries)}
    resources = [re.sub(r"^gres[:/]", "", part.strip()) for part in options.get("gres", "").split(",")]
    if shared := [name for name in resources if name.partition(":")[0] in PARTS_OF_A_GPU]:
        raise ValueError(f"--gres={shared[0]}: other jobs use this GPU too; {WISH}")
    gpus = [name.partition(":")[2] or "1" for name in resources if name.partition(":")[0] == "gpu"]
    counts["--gres"] = sum(_count("gres", entry) for entry in gpus)
    asked = {name: count for name, count in counts.items() if count}
    if len(set(asked.values())) > 1:
        raise ValueError(f"--gpus-per-node and --gres ask for different numbers of GPUs ({asked}); give one of them")
    return max(asked.values(), default=0)


def gpu_type(options: Mapping[str, str]) -> str | None:
    """Return the type that the options name, such as a100; None without one or with several."""
    resources = [re.sub(r"^gres[:/]", "", part.strip()) for part in options.get("gres", "").split(",")]
    gpus = [name.partition(":")[2] for name in resources if name.partition(":")[0] == "gpu"]
    entries = [*options.get("gpus-per-node", "").split(","), *gpus]
    found = {name for entry in entries if (name := entry.strip().partition(":")[0]) and not name.isdigit()}
    return found.pop() if len(found) == 1 else None


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
