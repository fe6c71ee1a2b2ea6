"""`replug plan --rehearse`: from a plan to what was found, on the screen and as the exit status."""

import os
import shutil
from pathlib import Path

from replug.cluster.gpu_shares import Sizes, host_bytes
from replug.cluster.layout import Layout
from replug.cluster.packing import SCORER
from replug.config.errors import RunError, UserError
from replug.config.schema import Config
from replug.models.hardware import available_memory
from replug.planning.plans import Plan, disk_gb
from replug.rehearsal.findings import Needed, Room, findings
from replug.rehearsal.report import misfits, print_report
from replug.rehearsal.run import rehearse
from replug.rehearsal.scaling import MOST_SCORERS

BYTES_PER_PROCESS = 300_000_000  # of its own, with a share of Ray's on each node


def rehearse_plan(title: str, plan: Plan, disk: float | None, host_memory: float | None) -> None:
    """Raises RunError where something does not fit. GB that are not given are those of this machine."""
    check_memory(plan.layout)
    rehearsed = rehearse(plan.layout.config, plan.devices, plan.job.shape.num_documents)
    found = findings(plan.layout, rehearsed, _needed(plan), _room(plan.job.config, disk, host_memory))
    print_report(title, plan.layout, rehearsed, found)
    if wrong := misfits(found):
        raise RunError(f"--rehearse: {len(wrong)} of {len(found)} things do not fit, each with what to change above")


def check_memory(layout: Layout) -> None:
    """Raises UserError where this machine cannot hold the processes, which is no misfit of the run."""
    left_out = max(0, sum(actor.key == SCORER for actor in layout.actors) - MOST_SCORERS)
    processes = len(layout.actors) - left_out
    needed, free = processes * BYTES_PER_PROCESS, available_memory()
    if needed > free:
        raise UserError(
            f"--rehearse starts {processes} processes on this machine, which take about {needed / 1e9:.0f} GB, and "
            f"{free / 1e9:.0f} GB are free; expected a machine with more memory, or a --split with fewer index GPUs"
        )


def _needed(plan: Plan) -> Needed:
    hours = plan.estimate.simulated.times.wall / 3600
    return Needed(disk_gb(plan.job)["total"], _host_gb(plan), hours)


def _host_gb(plan: Plan) -> float:
    """Of each node, for vectors that no GPU holds; 0 where GPUs do."""
    index, vectors = plan.layout.config.index, plan.job.shape.num_documents * plan.job.index.bytes_per_vector
    return 0.0 if index.gpus_per_searcher else host_bytes(index, Sizes(vectors), plan.devices.nodes) / 1e9


def _room(config: Config, disk: float | None, host_memory: float | None) -> Room:
    folder = Path(config.run_dir).expanduser().absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Room(disk or shutil.disk_usage(there).free / 1e9, host_memory or own / 1e9)
