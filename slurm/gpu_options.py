"""Count the GPUs that a job asks SLURM for on each node, and those that a step was given. Pure.

--gpus-per-node     4, a100, a100:4
--gres              gpu, gpu:4, gpu:a100:4, lustre:1,gpu:2
"""

import re
from collections.abc import Mapping

UNSUPPORTED = {"gpus", "gpus-per-task", "gpus-per-socket"}
GPU_RESOURCES = ("gpu", "shard", "mps")  # the latter are parts of a GPU, which other jobs use too
HIDDEN = ("", "-1", "NoDevFiles", "none", "void")  # what hides every GPU in CUDA_VISIBLE_DEVICES


def gpus_per_node(options: Mapping[str, str]) -> tuple[int, str | None]:
    """Return the GPUs of each node by sbatch's options, and their type where it is named.

    Raises ValueError for options that do not tell them.
    """
    resources = [re.sub(r"^gres[:/]", "", part.strip()) for part in options.get("gres", "").split(",")]
    requested = [f"--gres={part}" for part in resources if part.partition(":")[0] in GPU_RESOURCES]
    requested += [f"--{name}={options[name]}" for name in {"gpus-per-node"} | UNSUPPORTED if name in options]
    if not requested:
        return 0, None
    match = re.fullmatch(r"--(?:gpus-per-node=|gres=gpu:?)([A-Za-z][\w.-]*)?:?(\d+)?", requested[0])
    if len(requested) > 1 or match is None:
        raise ValueError(
            f"{', '.join(requested)}: the GPUs of each node do not follow from it; expected one option, such as "
            "--gpus-per-node=4 or --gpus-per-node=a100:4"
        )
    return int(match[2] or 1), match[1]


def gpus_of_step(environment: Mapping[str, str]) -> int:
    """Return the GPUs that SLURM's variables give a process of this step. Raises ValueError where they differ.

    `CUDA_VISIBLE_DEVICES` counts where SLURM gave GPUs at all: without any it is a left-over of the user's shell.
    """
    count, shown = environment.get("SLURM_GPUS_ON_NODE") or "0", environment.get("CUDA_VISIBLE_DEVICES")
    if not count.isdigit():
        raise ValueError(f"SLURM_GPUS_ON_NODE: expected a number of GPUs, found {count!r}")
    given = int(count)
    if given and shown is not None and sum(one.strip() not in HIDDEN for one in shown.split(",")) != given:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {shown!r}, but SLURM gave this step {given} GPUs; expected all of them: leave "
            "--gpu-bind and --ntasks-per-gpu out, and ask by --gpus-per-node"
        )
    return given
