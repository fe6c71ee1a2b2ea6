"""What this machine has, as a node of a cluster that is started here: GPUs as torch sees them, and memory."""

import math
import os

import torch

from replug.cluster.packing import Node

NAME = "this machine"


def this_node() -> Node:
    """Logical CPUs are made for as many actors as there are."""
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Node(NAME, math.inf, torch.cuda.device_count(), _smallest_gpu(), memory_bytes, is_driver=True)


def _smallest_gpu() -> float | None:
    sizes = (torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count()))
    return min(map(float, sizes), default=None)
