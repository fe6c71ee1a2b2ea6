"""Which GPUs the steps of a job see, on a real SLURM whose GPUs are two files of each node."""

import sys
from pathlib import Path

import pytest

from replug.slurm.gpu_options import gpus_per_node

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(200)]
# As `slurm.ray_job` starts them: Ray on both nodes, which goes on, and `replug` beside it on the first.
STEPS = """
import os, subprocess
from pathlib import Path
from replug.slurm.ray_job import JobAllocation, job_environment
allocation = JobAllocation.from_environment(os.environ)
environment = job_environment(os.environ, Path("/tmp/none"))
shown = "import os, time; from replug.slurm.gpu_options import gpus_of_step; "
shown += "line = os.environ['SLURMD_NODENAME'], str(gpus_of_step(os.environ)), os.environ['CUDA_VISIBLE_DEVICES']; "
shown += "os.write(1, (' '.join(line) + chr(10)).encode()); "
nodes = [*allocation.nodes, allocation.nodes[0]]
steps = [
    subprocess.Popen(allocation.step(node, "-c", shown + f"time.sleep({seconds})"), env=environment)
    for node, seconds in zip(nodes, (4, 4, 0))
]
print("statuses", *(step.wait(60) for step in steps), flush=True)
"""


@pytest.mark.parametrize(
    "option",
    [
        "--gpus-per-node=a100:2",
        "--gres=gpu",
    ],
)
def test_all_steps_on_a_node_see_the_gpus_that_were_counted_in_one_order(slurm, tmp_path, option):
    script = tmp_path / "job.sh"
    (tmp_path / "steps.py").write_text(STEPS)
    script.write_text(f"#!/bin/bash\nexport PYTHONPATH={ROOT}\n{sys.executable} {tmp_path / 'steps.py'}\n")
    asked = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", option, f"--output={tmp_path / 'log'}")
    job = slurm.run("sbatch", "--parsable", *asked, str(script))
    slurm.wait_for(job, "COMPLETED")
    name, _, value = option.removeprefix("--").partition("=")
    count = gpus_per_node({name: value})
    seen = f"{count} {','.join(map(str, range(count)))}"
    said = (tmp_path / "log").read_text().splitlines()
    assert sorted(said) == sorted([f"n1 {seen}", f"n1 {seen}", f"n2 {seen}", "statuses 0 0 0"])
