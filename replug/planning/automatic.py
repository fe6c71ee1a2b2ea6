"""What `resources.*=auto` comes to in a training whose roles may share GPUs: the split that `replug plan` finds best.

The layout asks it where all that the actors hold is known. A few simulations take seconds.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from replug.cluster.gpu_shares import Sizes
from replug.cluster.packing import Node
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.planning.accelerators import Devices, accelerator_named
from replug.planning.estimate import job_of
from replug.planning.sizes import run_sizes
from replug.planning.split import SplitRoom, best_split

log = logging.getLogger(__name__)


def training_sizes(config: Config, num_documents: int | None, has_bfloat16: bool, gpu_name: str = "") -> Sizes:
    """As `run_sizes`, for a run of all roles on GPUs of that name, as the driver has it."""
    sizes = run_sizes(config, num_documents, has_bfloat16)
    return replace(sizes, choose=partial(best_gpus, num_documents=num_documents, gpu_name=gpu_name))


def best_gpus(
    config: Config, nodes: Sequence[Node], num_documents: int | None = None, gpu_name: str = ""
) -> Mapping[str, float] | None:
    """GPUs by role with which the run ends soonest; None where nothing fits, or the plan does not know a model."""
    with_gpus = [node for node in nodes if node.gpus]
    memory_gb = min(node.gpu_bytes or 0.0 for node in with_gpus) / 1e9
    devices = Devices(accelerator_named(gpu_name, memory_gb), int(sum(n.gpus for n in with_gpus)), len(with_gpus))
    try:
        laid, _ = best_split(
            job_of(config, num_documents=num_documents), devices, room=SplitRoom(nodes, may_recompute=False)
        )
    except UserError as error:
        log.info(f"resources.*=auto splits the GPUs among the roles, since no plan of shared ones can be made: {error}")
        return None
    return {key.partition(".")[2]: gpus for key, gpus in laid.settings.items() if key.startswith("resources.")}
