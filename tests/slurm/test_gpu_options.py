"""How many GPUs a job asks for, and a step was given: SLURM's spellings as a table."""

import pytest

from replug.slurm.gpu_options import gpus_of_step, gpus_per_node

ASKED = [
    # options of sbatch, nodes, GPUs of each node
    ({"gpus-per-node": "4"}, 2, 4),
    ({"gpus-per-node": "a100"}, 2, 1),
    ({"gpus-per-node": "a100:2,h100:1"}, 1, 3),
    ({"gres": "gpu:a100:4"}, 2, 4),
    ({"gres": "lustre:1,gpu:2,nvme:100G"}, 1, 2),
    ({"gres": "gres/gpu:2"}, 1, 2),
    ({"gpus": "a100:4,h100:4"}, 1, 8),
    ({"gres": "gpu:4", "gpus-per-node": "a100:4"}, 2, 4),
]
REFUSED = [
    ({"gres": "gpu:1,mps:50"}, r"mps is a part of a GPU"),
    ({"gres": "gpu:four:many"}, r"--gres: 'four:many' cannot be read"),
    ({"gpus-per-node": "4x"}, r"--gpus-per-node: '4x' cannot be read"),
    ({"gpus": "8"}, r"--gpus=8: how SLURM divides them among 2 nodes is not known"),
    ({"gpus-per-socket": "2"}, r"--gpus-per-socket: how many sockets"),
    ({"gres": "gpu:2", "gpus-per-node": "4"}, r"they differ .*--gres 2, --gpus-per-node 4"),
]


@pytest.mark.parametrize(("options", "num_nodes", "expected"), ASKED, ids=str)
def test_every_spelling_of_gpus_is_counted(options, num_nodes, expected):
    assert gpus_per_node(options, num_nodes) == expected


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_cannot_be_counted_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        gpus_per_node(options, 2)


@pytest.mark.parametrize("shown", ["0,1", "", "NoDevFiles"])
def test_a_step_that_sees_fewer_than_it_was_given_says_so(shown):
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES: SLURM gave this step 4 GPUs, but .* shows"):
        gpus_of_step({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": shown})
