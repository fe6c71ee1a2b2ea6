"""`replug slurm` without a SLURM: the script, the layout, GPUs, refusals, and the frozen code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from replug.cluster.layout import Node, lay_out
from replug.commands.slurm import freeze, gpus_of_nodes, render, run_slurm
from replug.config.errors import UserError
from replug.config.load import flatten, load_config
from replug.planning.memory import run_sizes
from replug.slurm import ray_job
from replug.train.run_dir import RunDirectory

ROOT = Path(__file__).parent.parent.parent
DEBUG = ROOT / "configs/debug.yaml"


@pytest.fixture
def prints(tmp_path, monkeypatch, capsys):
    """Run `replug slurm` for the debug configuration in a fresh run directory, with enough CPUs."""

    def run(*overrides: str, job: str = "train", submit: bool = False, **options: str) -> str:
        monkeypatch.chdir(tmp_path)
        given = {"cpus-per-task": "4", **{name.replace("_", "-"): value for name, value in options.items()}}
        run_slurm(DEBUG, [f"run_dir={tmp_path / 'run'}", *overrides], job, given, submit)
        return capsys.readouterr().out

    return run


def test_options_replace_the_scripts_own_and_the_frozen_code_is_run(tmp_path):
    options = {"nodes": "3", "gpus-per-node": "4", "mem": "64G", "exclusive": "", "comment": "a b"}
    lines = render("prepare", options, tmp_path / "run", tmp_path / "a b", "/venv/bin/python").splitlines()
    wanted = {"--nodes=3", "--gpus-per-node=4", "--mem=64G", "--exclusive", '--comment="a b"'}
    wanted |= {"--cpus-per-task=8", f"--output={tmp_path}/run/%j.log"}  # the template's, and the job's log
    assert {f"#SBATCH {option}" for option in wanted} <= set(lines)
    assert lines[0].startswith("#!") and sum(line.startswith("#SBATCH --nodes=") for line in lines) == 1
    settings = {f"folder='{tmp_path}/a b'", f"code={tmp_path}/run/code", "python=/venv/bin/python"}
    assert settings | {f"arguments=(prepare {tmp_path}/run/config.yaml)"} <= set(lines)


def test_without_submit_nothing_is_written(prints, tmp_path):
    printed = prints(nodes="2")
    assert "#SBATCH --nodes=2" in printed and "Nothing is written" in printed
    assert f"#SBATCH --output={tmp_path}/run/submitted/train-20" in printed
    assert "all nodes must see it" in printed
    assert not (tmp_path / "run").exists()


def test_actors_that_no_node_has_room_for_are_refused_before_the_queue(prints):
    with pytest.raises(UserError, match="cpus-per-task"):
        prints("index.num_shards=9")
    with pytest.raises(UserError, match=r"resources\.index=2"):
        prints("resources.index=2", gpus_per_node="1")


def test_a_job_of_a_known_gpu_prints_the_layout_that_it_takes(capsys, tmp_path):
    paper = ROOT / "configs/paper.yaml"
    given = {"nodes": "1", "gpus-per-node": "a100:8", "cpus-per-task": "64"}
    run_slurm(paper, [f"run_dir={tmp_path}"], "train", given, submit=False)
    printed, config = capsys.readouterr().out, load_config(paper)
    node = Node("n1", 64, 8, 80e9, is_driver=True)
    taken = lay_out(config, [node], run_sizes(config, config.data.num_documents, has_bfloat16=True))
    assert f"actors           {taken.describe()}" in printed
    with pytest.raises(UserError, match=r"train\.chunk_tokens"):
        run_slurm(paper, ["resources.train=1"], "train", {**given, "gpus-per-node": "a10:8"}, submit=False)


def test_a_job_asks_for_the_memory_of_its_processes_unless_an_option_does(prints):
    def memory(printed: str) -> int:
        return int(printed.partition("#SBATCH --mem=")[2].partition("G")[0])

    one, more = memory(prints()), memory(prints("resources.score=3", cpus_per_task="8"))
    assert one >= 16 and more == one + 2 * 4  # a process in torch takes 4 GiB
    assert memory(prints("resources.index=2", cpus_per_task="8", nodes="2")) < more
    assert "--mem=" not in prints(mem_per_cpu="4G")
    assert memory(prints(mem="7G")) == 7


def test_a_run_is_submitted_with_its_own_configuration_only_and_not_once_it_is_finished(prints, tmp_path):
    folder = RunDirectory(tmp_path / "run").folder
    folder.claim(flatten(load_config(DEBUG)))
    with pytest.raises(UserError, match=r"loss.gamma is 0.5, but .* made with 0.02"):
        prints("loss.gamma=0.5")
    assert "replug train" in prints()
    folder.finish([])
    with pytest.raises(UserError, match="finished run"):
        prints()
    assert "replug evaluate" in prints(job="evaluate")


def test_each_submission_freezes_a_folder_and_prints_its_job(prints, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 18\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (printed,) = prints(submit=True).splitlines()[-1:]
    (folder,) = (tmp_path / "run/submitted").iterdir()
    assert printed.startswith(f"submitted as job 18; log: {folder}/18.log; ")
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "code", "version.json", "job.sbatch"}


def test_frozen_code_is_whole_and_says_its_version(tmp_path):
    config = load_config(DEBUG, ["lm.cache=|"])
    folder = tmp_path / "submitted"
    freeze(config, folder, "#!/bin/sh\n")
    assert load_config(folder / "config.yaml") == config
    assert [path.name for path in (folder / "code").iterdir()] == ["replug"]
    rooms = {path.name for path in (folder / "code/replug").iterdir()}
    assert rooms >= {"train", "slurm", "configs", "data", "models"}
    assert not list((folder / "code").rglob("__pycache__"))
    assert json.loads((folder / "version.json").read_text())["packages"]


@pytest.mark.parametrize(
    ("rays_seconds", "restarts", "expected"),
    [(0.4, 0, ray_job.INTERRUPTED), (0.4, ray_job.MOST_RESTARTS, 1), (60, 0, 1)],
)
def test_a_command_that_ends_because_its_ray_was_killed_is_requeued(
    rays_seconds, restarts, expected, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setattr(ray_job, "SECONDS_TO_SEE", 0.8)
    (tmp_path / "log").touch()
    step = subprocess.Popen(["sleep", str(rays_seconds)])
    node, fails = ray_job.JobNode("n1", step, tmp_path / "log"), [sys.executable, "-c", "raise SystemExit(1)"]
    assert ray_job.run_replug(fails, [node], dict(os.environ), SimpleNamespace(number=None)) == expected
    step.kill()


# SLURM's spellings of GPUs ----------------------------------------------------------------------------------------

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
