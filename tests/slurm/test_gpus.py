"""The GPUs of a job and of a step: SLURM's spellings as a table."""

import sys
from pathlib import Path

import pytest

from replug.commands.slurm import gpus_of_nodes
from replug.config.errors import UserError

COUNTED = [
    ({}, (0, None)),
    ({"gpus-per-node": "4"}, (4, None)),
    ({"gpus-per-node": "a100"}, (1, "a100")),
    ({"gpus-per-node": "a100:2"}, (2, "a100")),
    ({"gres": "gpu"}, (1, None)),
    ({"gres": "gres/gpu:nvidia_h100_nvl:4"}, (4, "nvidia_h100_nvl")),
    ({"gres": "lustre:1,gpu:2,nvme:100G"}, (2, None)),
]
REFUSED = [
    ({"gres": "gpu:1,mps:50"}, "--gres=mps:50"),
    ({"gpus-per-node": "4x"}, "--gpus-per-node=4x"),
    ({"gpus-per-node": "a100:2,h100:1"}, "--gpus-per-node=a100:2,h100:1"),
    ({"gpus": "8"}, "--gpus=8"),
    ({"gres": "gpu:2", "gpus-per-node": "4"}, "--gres=gpu:2"),
]


@pytest.mark.parametrize(("options", "expected"), COUNTED, ids=str)
def test_gpus_of_a_node_are_counted_with_their_type(options, expected):
    assert gpus_of_nodes(options) == expected


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=str)
def test_what_cannot_be_counted_is_refused_by_name(options, named):
    with pytest.raises(UserError, match=named):
        gpus_of_nodes(options)


ROOT = Path(__file__).parent.parent.parent
# As `slurm.ray_job` starts them: Ray on both nodes, which goes on, and `replug` beside it on the first.
STEPS = """
import os, subprocess
from pathlib import Path
from replug.slurm.ray_job import JobAllocation, job_environment
allocation = JobAllocation.from_environment(os.environ)
environment = job_environment(os.environ, Path("/tmp/none"))
shown = "import os, time; names = 'SLURMD_NODENAME', 'SLURM_GPUS_ON_NODE', 'CUDA_VISIBLE_DEVICES'; "
shown += "line = [os.environ[name] for name in names]; "
shown += "os.write(1, (' '.join(line) + chr(10)).encode()); "
nodes = [*allocation.nodes, allocation.nodes[0]]
steps = [
    subprocess.Popen(allocation.step(node, "-c", shown + f"time.sleep({seconds})"), env=environment)
    for node, seconds in zip(nodes, (4, 4, 0))
]
print("statuses", *(step.wait(150) for step in steps), flush=True)
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("option", ["--gpus-per-node=a100:2", pytest.param("--gres=gpu", marks=pytest.mark.nightly)])
def test_all_steps_on_a_node_see_the_gpus_that_were_counted_in_one_order(slurm, tmp_path, option):
    script = tmp_path / "job.sh"
    (tmp_path / "steps.py").write_text(STEPS)
    script.write_text(f"#!/bin/bash\nexport PYTHONPATH={ROOT}\n{sys.executable} {tmp_path / 'steps.py'}\n")
    options = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", option, f"--output={tmp_path / 'log'}")
    job = slurm.run("sbatch", "--parsable", *options, str(script))
    slurm.wait_for(job, "COMPLETED")
    name, _, value = option.removeprefix("--").partition("=")
    count = gpus_of_nodes({name: value})[0]
    seen = f"{count} {','.join(map(str, range(count)))}"
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == sorted([f"n1 {seen}", f"n1 {seen}", f"n2 {seen}", "statuses 0 0 0"])
