"""How many GPUs a job asks for, and a step was given: SLURM's spellings as a table."""

import pytest

from replug.slurm.gpu_options import gpus_of_step, gpus_per_node

ASKED = [
    ({}, 0),
    ({"gpus-per-node": "4"}, 4),
    ({"gpus-per-node": "a100"}, 1),
    ({"gpus-per-node": "a100:2,h100:1"}, 3),
    ({"gres": "gpu:a100:4"}, 4),
    ({"gres": "lustre:1,gpu:2,nvme:100G"}, 2),
    ({"gres": "gres/gpu:2", "gpus-per-node": "2"}, 2),
]
REFUSED = [
    ({"gres": "gpu:1,mps:50"}, r"--gres=mps:50: other jobs use this GPU too"),
    ({"gpus-per-node": "4x"}, r"--gpus-per-node: '4x' cannot be read"),
    ({"gpus": "8"}, r"--gpus=8: .*expected GPUs of each node, such as --gpus-per-node=4"),
    ({"gres": "gpu:2", "gpus-per-node": "4"}, r"ask for different numbers of GPUs"),
]


@pytest.mark.parametrize(("options", "expected"), ASKED, ids=str)
def test_gpus_of_a_node_are_counted(options, expected):
    assert gpus_per_node(options) == expected


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_cannot_be_counted_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        gpus_per_node(options)


@pytest.mark.parametrize("shown", ["0,1", "", "NoDevFiles"])
def test_a_step_that_sees_fewer_than_it_was_given_says_so(shown):
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES: SLURM gave this step 4 GPUs, but .* shows"):
        gpus_of_step({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": shown})
