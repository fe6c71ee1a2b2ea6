import pytest

from replug.cluster.layout import lay_out
from replug.config.errors import UserError
from replug.config.schema import Config
from replug.planning.accelerators import Devices, parse_devices
from replug.planning.automatic import training_sizes
from replug.planning.estimate import job_of
from replug.planning.simulate import SharedGPUs
from replug.planning.split import best_split, estimate_split, fitting_splits, given_split, nodes_of


@pytest.fixture
def short(paper: Config) -> Config:
    """The paper's run in a tenth of the steps with a corpus to match: the same shares of the work, sooner simulated."""
    paper.train.max_steps, paper.refresh.every_steps, paper.refresh.lag_steps = 2500, 300, 100
    paper.data.num_documents = 3_600_000
    return paper


@pytest.fixture
def apart(short: Config) -> Config:
    """A scorer that is to have a whole GPU shares it with nobody."""
    short.lm.gpus_per_replica = 1
    return short


def test_the_best_of_eight_that_are_not_shared_gives_most_gpus_to_scoring(apart: Config) -> None:
    found = best_split(job_of(apart), parse_devices("8xA100"))[1]
    counts = found.split.by_role()
    assert sum(counts.values()) == 8
    assert counts["score"] >= 5
    assert counts["train"] <= 1


@pytest.mark.parametrize("devices", ["8xA100", "8xH100"])
def test_roles_that_share_eight_gpus_leave_nearly_nothing_idle(short: Config, devices: str) -> None:
    laid, found = best_split(job_of(short), parse_devices(devices))
    hours = sum(found.hours[role] for role in ("score", "embed", "train"))
    assert found.simulated.times.wall / 3600 < 1.15 * hours / 8
    assert laid.split.score == 8 and laid.split.placed is not None
    assert sorted(laid.settings) == ["resources.index", "resources.score", "resources.train"]


SLOW = pytest.mark.slow  # seconds of simulations, of the same kinds as the others


@pytest.mark.parametrize("lm", ["gpt2", "gpt2-xl", "llama-2-7b"])
@pytest.mark.parametrize(
    "devices",
    ["2xA100", "4xH100", "8xA100", *(pytest.param(of, marks=SLOW) for of in ("16xA100", "8xA100-40GB", "64xH100"))],
)
def test_what_auto_lays_out_ends_as_soon_as_any_split(short: Config, devices: str, lm: str) -> None:
    short.lm.path = lm
    job, gpus = job_of(short), parse_devices(devices)
    shared = estimate_split(job, gpus, given_split(job, gpus, automatic(short, gpus)).split).simulated.times.wall
    short.lm.gpus_per_replica = 1
    assert shared <= best_split(job_of(short), gpus)[1].simulated.times.wall


def automatic(config: Config, gpus: Devices) -> str:
    """What a run with `auto` lays out, as `--split` has it."""
    name = f"NVIDIA {gpus.accelerator.name}-SXM4"
    sizes = training_sizes(config, config.data.num_documents, has_bfloat16=True, gpu_name=name)
    resources = lay_out(config, nodes_of(gpus), sizes).config.resources
    return "/".join(f"{float(getattr(resources, key)):g}" for key in ("score", "index", "train"))


def test_auto_is_the_split_of_the_plan(short: Config) -> None:
    gpus = parse_devices("4xH100")
    counts = best_split(job_of(short), gpus)[1].split.by_role()
    assert automatic(short, gpus) == "/".join(f"{count:g}" for count in counts.values()) == "4/4/1"


@pytest.mark.parametrize("lm", ["gpt2", "gpt2-xl"])
def test_no_other_split_ends_sooner(short: Config, lm: str) -> None:
    short.lm.path = lm
    job, devices = job_of(short), parse_devices("4xA100")
    best = best_split(job, devices)[1]
    walls = [estimate_split(job, devices, split).simulated.times.wall for split in fitting_splits(job, devices)]
    assert best.simulated.times.wall == min(walls)


def test_the_formula_that_picks_what_is_simulated_does_not_hide_the_best(short: Config) -> None:
    """A small LM, whose trainer sets the pace: the formula puts the best but fifth."""
    short.lm.path = "gpt2"
    job, devices = job_of(short), parse_devices("16xA100")
    texts = ("16/16/8", "16/16/16", "12/12/4", "16/12/4", "8/8/8")
    walls = [estimate_split(job, devices, given_split(job, devices, text).split).simulated.times.wall for text in texts]
    assert best_split(job, devices)[1].simulated.times.wall == min(walls)


def test_more_gpus_never_take_longer(short: Config) -> None:
    job = job_of(short)
    walls = [best_split(job, parse_devices(f"{count}xA100"))[1].simulated.times.wall for count in (1, 2, 4, 8, 64)]
    assert walls == sorted(walls, reverse=True)


def test_one_gpu_is_shared_in_turns(short: Config) -> None:
    short.data.num_documents = 360_000
    found = best_split(job_of(short), parse_devices("1xH200"))[1]
    assert found.split.shared == ("score", "embed", "train")
    assert found.split.by_role() == {role: pytest.approx(1 / 3) for role in ("score", "embed", "train")}
    total = sum(found.hours.values()) + short.train.max_steps * found.durations.encode / 3600
    assert found.simulated.times.wall / 3600 == pytest.approx(total, rel=0.01)


def test_two_gpus_let_the_busiest_role_have_one_for_itself(apart: Config) -> None:
    split = best_split(job_of(apart), parse_devices("2xA100"))[1].split
    assert split.shared == ("embed", "train")
    assert split.by_role() == {"score": 1, "embed": 0.5, "train": 0.5}


def test_an_lm_larger_than_a_gpu_takes_several_for_each_replica(short: Config) -> None:
    short.lm.path = "llama-2-70b"
    found = best_split(job_of(short), parse_devices("16xA100"))[1]
    assert found.split.gpus_per_replica == 2
    assert found.split.score == 2 * found.split.replicas


def test_what_no_gpu_holds_is_an_error_with_the_gigabytes(short: Config) -> None:
    short.lm.path = "llama-2-70b"
    with pytest.raises(UserError, match=r"2xA10 do not hold the run: scoring needs 14\d GB \(7 GPUs for each LM\)"):
        best_split(job_of(short), parse_devices("2xA10"))[1]


def test_small_gpus_train_with_recomputed_activations(paper: Config) -> None:
    paper.train.max_steps, paper.lm.gpus_per_replica = 20, 1
    split = best_split(job_of(paper), parse_devices("4xL4"))[1].split
    assert split.recompute
    assert not split.search_on_gpu


def test_trainers_share_the_batch_evenly(short: Config) -> None:
    short.train.batch_size = 6
    assert {split.train for split in fitting_splits(job_of(short), parse_devices("8xA100"))} == {1, 2, 3, 6}


def test_a_given_split_is_taken_as_it_is(short: Config) -> None:
    split = given_split(job_of(short), parse_devices("8xA100"), "6/1/1").split
    assert (split.score, split.embed, split.train, split.shared, split.placed) == (6, 1, 1, (), None)
    shared = given_split(job_of(short), parse_devices("8xA100"), "8/7/1").split
    others = tuple(range(1, 8))
    assert shared.placed == SharedGPUs(score=(*others, 0), embed=others, train=(0,), search=others)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("6/1", "expected GPUs that"),
        ("9/1/1", "which takes 9 GPUs for one role"),
        ("4/1/3", "cannot share train.batch_size=64"),
    ],
)
def test_a_split_that_cannot_be_is_an_error(short: Config, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"--split is .*{reason}"):
        given_split(job_of(short), parse_devices("8xA100"), text)


def test_resources_that_are_given_are_the_split(short: Config) -> None:
    short.resources.score, short.resources.index = 4, 3
    assert best_split(job_of(short), parse_devices("8xA100"))[1].split.by_role() == {"score": 4, "embed": 3, "train": 1}
