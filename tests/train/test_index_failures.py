"""Refreshes that fail, on a real service with real Ray: the file is named, the live index goes on serving, and the
next refresh is as if nothing had been. Then the same by whole runs: full disks, kill -9, builders that stand still.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from replug.configs.load import load_config
from replug.configs.schema import Config
from replug.data.store import PreparedSet
from replug.index_workers.build import publish_snapshot
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.service import IndexService, IndexSettings, WatchedTexts
from replug.index_workers.version_store import BuildPlan, IndexState, Missing, VersionStore
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.preparing import prepared_set
from replug.train.fitting import refresh_controller
from replug.train.refresh import RefreshController, StaleIndexError
from replug.train.step_clock import StepClock
from tests.support.command_line import STEPS, finish, start
from tests.support.runs import descendants, metrics, name_of, what_must_be_equal
from tests.support.small_disk import SmallDisk, small_disk, space_of

ROOT = Path(__file__).parent.parent.parent
TEXTS = ["some words of a query", "others that are not the same"]
FULL = os.environ.get("REPLUG_STORM") == "full"
FLAT, LOSSY = "flat_fp16", "IVF8,SQ8"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    with small_disk(tmp_path_factory.mktemp("failures") / "index", megabytes=8) as disk:
        yield disk


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return prepared_set(load_config(ROOT / "configs/debug.yaml"), tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def service(disk: SmallDisk, ray_session: None) -> Iterator[IndexService]:
    """One for all tests, since actors take seconds to start; each test takes `versions` of its own."""
    settings = IndexSettings(num_shards=2, num_builders=2, threads=1, watched=WatchedTexts(("a text",), 5))
    service = IndexService(disk.folder, settings)
    yield service
    service.close()


@pytest.fixture(autouse=True)
def space_at_the_end(disk: SmallDisk) -> Iterator[None]:
    yield
    disk.free()


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return itertools.count(0, 10)


class Trainer:
    """What the trainer does at its step boundaries, and what it asks the index, with every wait bounded."""

    def __init__(self, config: Config, data: PreparedSet, service: IndexService, version: int) -> None:
        self.config, self.data, self.service = config, data, service
        self.encoder = load_encoder(config.retriever)
        plan = publish_snapshot(config, self.encoder, data, service.store, IndexState(version, 0))
        service.build(plan).result(60)
        service.prepare(version)
        self.control = self.new_control()
        self.control.live = IndexState(version, 0)
        service.commit(version)

    def new_control(self) -> RefreshController:
        workers = SimpleNamespace(index=self.service)
        self.config.evaluate.refresh_windows = 0  # there is no LM
        parts = (self.config, SimpleNamespace(encoder=self.encoder), self.data, workers)
        return refresh_controller(*parts, StepClock(), settle=lambda: None, check=lambda: None)

    def step_to(self, *steps: int) -> None:
        """A boundary, then what training does to the weights."""
        for step in steps:
            self.control.at_boundary(step)
            move(self.encoder, step)

    def ask(self) -> tuple[list, list]:
        found = self.service.search(self.control.live.version, queries_of(self.encoder), 8)
        return found.doc_rows.tolist(), found.similarities.tolist()

    def serves_its_files(self) -> bool:
        """Whether the searchers answer what the live version's files say, read here."""
        store, live = self.service.store, self.control.live.version
        store.remove_all_but({live})
        rows, similarities = LocalIndex(store.root, 1).search(queries_of(self.encoder), 8)
        return self.ask() == (rows.tolist(), similarities.tolist())

    def last_error(self) -> str:
        return str(self.control._last_error)


def move(encoder: Encoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


def queries_of(encoder: Encoder) -> np.ndarray:
    return encoder.encode(TEXTS).numpy()


def trainer_of(
    tmp_path: Path, data: PreparedSet, service: IndexService, version: int, kind: str = FLAT, max_age: int = 30
) -> Trainer:
    """Refreshes start at steps 10, 20, ... and are adopted three later."""
    keys = ["refresh.every_steps=10", f"refresh.max_age_steps={max_age}", "train.max_steps=99", "index.num_shards=2"]
    overrides = [f"run_dir={tmp_path / 'run'}", f"index.kind={kind}", *keys]
    return Trainer(load_config(ROOT / "configs/debug.yaml", overrides), data, service, version)


def written_before(store: VersionStore, plan: BuildPlan, name: str) -> int:
    """Bytes that a version has taken when the file of this name is about to be written."""
    folder = store.folder(plan.version)
    files = [folder / "encoder", folder / "plan.json"]
    for path in store.files(plan):
        files += [path, store_mark(path)]
    files.append(folder / "manifest.json")
    return space_of(itertools.takewhile(lambda path: path.name != name, files))


def store_mark(path: Path) -> Path:
    return path.with_name(path.name + ".json") if path.suffix == ".faiss" else path.with_suffix(".json")


FULL_AT = [
    (FLAT, "model.safetensors", r"encoder-v0+\d+\.partial"),
    (FLAT, "tokenizer.json", r"encoder-v0+\d+\.partial"),
    (FLAT, "plan.json", r"plan\.json\.partial"),
    (FLAT, "block-00000.npy", r"block-000\d\d\.\S*partial"),
    (FLAT, "block-00005.json", r"block-000\d\d\.\S*partial"),
    (FLAT, "manifest.json", r"manifest\.json\.partial"),
    (LOSSY, "quantizer.faiss", r"quantizer\.faiss\.\S*partial"),
    (LOSSY, "shard-00001.faiss", r"shard-0000[01]\.faiss\.\S*partial"),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("kind", "name", "named"), FULL_AT, ids=[f"{name}-{kind}" for kind, name, _ in FULL_AT])
def test_a_disk_that_is_full_leaves_the_live_index_serving_until_it_is_too_old(
    tmp_path, data, disk, service, versions, kind, name, named
):
    trainer = trainer_of(tmp_path, data, service, version := next(versions), kind, max_age=15)
    store = service.store
    store.remove_all_but({version})
    plan, encoder = store.plan(version), store.encoder_folder(version)
    small = {"model.safetensors": space_of([encoder / "model.safetensors"]) // 2}
    small["tokenizer.json"] = space_of([encoder / "model.safetensors", encoder / "config.json"]) + 4096
    disk.leave(small[name] if name in small else written_before(store, plan, name))
    trainer.step_to(9)
    trainer.step_to(10, 11, 12, 13)
    assert trainer.control.live.version == version and trainer.control.num_failed == 1
    assert re.search(rf"{named} cannot be written: .*", trainer.last_error()), trainer.last_error()
    assert "No space left" in trainer.last_error() or "written" in trainer.last_error()
    assert [str(path) for path in disk.folder.rglob("*.partial*")] == []
    trainer.step_to(14, 15)  # training goes on with what there is
    with pytest.raises(StaleIndexError, match=rf"step 16: index v{version} is 16 steps old.*{named}"):
        trainer.control.at_boundary(16)
    disk.free()
    state, trainer.control = trainer.control.state(), trainer.new_control()  # as the same command does
    trainer.control.restore(state)
    trainer.step_to(16, 17, 20, 21, 23)
    assert trainer.control.live == IndexState(version + 1, 20)
    assert trainer.serves_its_files()


def flip(path: Path, place: int = -20) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[str, str, Callable[[Path], None]]] = [
    (FLAT, "block-00000.npy", flip),
    (FLAT, "block-00010.npy", flip),  # of the second shard: the first one loads its own
    (FLAT, "block-00010.npy", Path.unlink),  # half copied
    (FLAT, "manifest.json", flip),
    (LOSSY, "shard-00001.faiss", flip),
    (LOSSY, "shard-00001.faiss", Path.unlink),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("kind", "name", "damage"), DAMAGES, ids=[f"{d.__name__}-{n}" for _, n, d in DAMAGES])
def test_damage_between_building_and_loading_is_named_and_never_served(
    tmp_path, data, service, versions, monkeypatch, kind, name, damage
):
    trainer = trainer_of(tmp_path, data, service, version := next(versions), kind)
    service.store.remove_all_but({version})
    publish = service.store.publish

    def publish_and_damage(plan: BuildPlan) -> None:
        publish(plan)
        damage(service.store.folder(plan.version) / name)

    monkeypatch.setattr(service.store, "publish", publish_and_damage)
    trainer.step_to(10, 11, 12, 13)
    monkeypatch.undo()
    assert trainer.control.live.version == version and trainer.control.num_failed == 1
    assert re.search(rf"v0+{version + 1}/{name} is (damaged|missing)", trainer.last_error()), trainer.last_error()
    assert trainer.serves_its_files()
    trainer.step_to(20, 21, 22, 23)  # the same number again, by other weights
    assert trainer.control.live == IndexState(version + 1, 20)
    assert trainer.serves_its_files()


@pytest.mark.timeout(200)
def test_what_is_asked_after_loading_may_fail_and_leaves_nothing_loaded(tmp_path, data, service, versions, monkeypatch):
    trainer = trainer_of(tmp_path, data, service, version := next(versions))

    def fail(*_: object) -> None:
        raise RuntimeError("no answer")

    monkeypatch.setattr("replug.index_workers.service.Measures", fail)
    trainer.step_to(10, 13)
    monkeypatch.undo()
    assert trainer.control.num_failed == 1
    trainer.step_to(20, 23)
    assert trainer.control.live == IndexState(version + 1, 20)
    assert trainer.serves_its_files()


@pytest.mark.timeout(200)
def test_a_green_group_that_cannot_load_makes_room_again(tmp_path, data, disk, ray_session, monkeypatch):
    """Its searchers stand where the builders were, which the next refresh needs."""
    settings = IndexSettings(num_shards=2, num_builders=2, threads=1, blue_green=True)
    service = IndexService(tmp_path / "index", settings)
    try:
        trainer = trainer_of(tmp_path, data, service, 0)
        publish = service.store.publish

        def publish_and_damage(plan: BuildPlan) -> None:
            publish(plan)
            flip(service.store.folder(plan.version) / "block-00010.npy")

        monkeypatch.setattr(service.store, "publish", publish_and_damage)
        trainer.step_to(10, 13)
        monkeypatch.undo()
        assert trainer.control.num_failed == 1
        assert len(service.searchers) == 2
        assert trainer.serves_its_files()
        trainer.step_to(20, 23)
        assert trainer.control.live == IndexState(1, 20)
        assert len(service.searchers) == 2
        assert trainer.serves_its_files()
    finally:
        service.close()


@pytest.mark.timeout(200)
def test_a_damaged_snapshot_or_quantizer_is_not_built_upon(tmp_path, data, service, versions, monkeypatch):
    trainer = trainer_of(tmp_path, data, service, version := next(versions), LOSSY)
    store = service.store
    begin = store.begin

    def damage_and_begin(plan: BuildPlan) -> Missing:
        flip(store.encoder_folder(plan.version) / "model.safetensors")
        return begin(plan)

    monkeypatch.setattr(store, "begin", damage_and_begin)
    trainer.step_to(9, 10, 13)
    monkeypatch.undo()
    expected = rf"encoder of index version {version + 1} is not the one it was begun with: .*/v0*{version + 1}/encoder"
    assert re.search(expected, trainer.last_error()), trainer.last_error()
    flip(store.quantizer_path(version))
    trainer.step_to(20, 23)
    assert re.search(rf"v0*{version}/quantizer\.faiss is damaged", trainer.last_error()), trainer.last_error()
    flip(store.quantizer_path(version))
    trainer.step_to(30, 33)
    assert trainer.control.live == IndexState(version + 1, 30)
    assert trainer.serves_its_files()


@pytest.mark.timeout(100)
def test_a_killed_builders_half_written_file_does_not_stay_in_a_published_version(tmp_path, data, service, versions):
    trainer = trainer_of(tmp_path, data, service, version := next(versions))
    store = service.store
    plan = publish_snapshot(trainer.config, trainer.encoder, data, store, IndexState(version + 1, 10))
    building = service.build(plan)
    (store.folder(plan.version) / "block-00000.npy.deadbeef.partial").write_text("half")
    building.result(60)
    assert [path.name for path in store.folder(plan.version).glob("*.partial")] == []


WRITE_CUT_SHORT = """
import resource, signal, sys
from pathlib import Path
import numpy as np
import torch
from replug.configs.errors import RunError
from replug.index_workers.faiss_index import fill, train_quantizer
from replug.index_workers.kinds import IndexKind
from replug.index_workers.version_store import VersionStore

store, vectors = VersionStore(Path(sys.argv[1])), np.random.default_rng(0).normal(size=(1000, 33)).astype(np.float16)
kind = IndexKind("SQ8")
store.folder(0).mkdir(parents=True)
store.write_block(0, 0, vectors)
store.write_marked(store.quantizer_path(0), lambda out: train_quantizer(kind, vectors, out))
fill_shard = lambda out: fill(store.quantizer_path(0), [vectors], out)
store.write_marked(store.shard_path(0, 0), fill_shard)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for path, write in (
    (store.block_path(0, 0), lambda: store.write_block(0, 0, vectors)),
    (store.shard_path(0, 0), lambda: store.write_marked(store.shard_path(0, 0), fill_shard)),
):
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 50, resource.RLIM_INFINITY))
    try:
        write()
        print(path.name, "was written short:", path.stat().st_size, "of", size)
    except RunError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.timeout(100)
def test_a_disk_that_takes_all_but_the_last_bytes_is_noticed(tmp_path):
    """numpy and FAISS both close their files without looking whether that succeeded."""
    command = [sys.executable, "-c", WRITE_CUT_SHORT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    assert re.search(r"block-00000\.npy\.\S*partial cannot be written", lines[0])
    assert re.search(r"shard-00000\.faiss\.\S*partial cannot be written", lines[1])


def wait_until(process: subprocess.Popen, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen]]:
    """As `start`; what is left of a test that failed is killed, stopped builders too."""
    processes: list[subprocess.Popen] = []

    def begin(run: Path, *overrides: str) -> subprocess.Popen:
        processes.append(start(run, *overrides))
        return processes[-1]

    yield begin
    for process in processes:
        for each in [*descendants(process.pid), psutil.Process(process.pid)] if process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def end(process: subprocess.Popen, status: int) -> str:
    output, _ = process.communicate(timeout=150)
    assert process.returncode == status, output
    return output


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate(timeout=60)


def steps_done(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def stop_builders(process: subprocess.Popen) -> list[psutil.Process]:
    builders = [child for child in descendants(process.pid) if "Builder" in name_of(child)]
    for builder in builders:
        builder.suspend()
    return builders


SLOW = "lm.path=stand_in:0.15"


@pytest.mark.timeout(300)
def test_a_run_whose_disk_fills_up_stops_with_the_cause_and_goes_on_when_there_is_space(begin, tmp_path):
    """Its losses are no quiet run's from there on: the refresh that failed was not adopted at its lag."""
    run = tmp_path / "run"
    keys = [SLOW, "refresh.max_age_steps=10"]
    with small_disk(run / "index", megabytes=4) as disk:
        process = begin(run, *keys)
        wait_until(process, lambda: steps_done(run) >= 2)
        disk.leave(written_before(VersionStore(run / "index"), VersionStore(run / "index").plan(0), "block-00004.npy"))
        output = end(process, status=1)
        last = output.splitlines()[-1]
        assert re.search(r"^replug: step 11: index v0 is 11 steps old, more than refresh.max_age_steps \(10\)", last)
        assert re.search(r"v000001/block-0000\d\.\S+ cannot be written: No space left on device$", last)
        assert "saved step 11: the same command goes on from there" in output
        assert "Traceback" not in output
        disk.free()
        assert "resuming at step 11" in finish(run, *keys)
        rows = metrics(run)
        assert [row["step"] for row in rows] == list(range(STEPS))
        assert [row["step"] for row in rows if row["index/swapped"]] == [15, 21]
        assert sorted(path.name for path in (run / "index").glob("v*")) == ["v000002", "v000003"]


@pytest.mark.timeout(300)
def test_a_run_killed_before_the_refresh_that_failed_was_due_has_the_losses_of_a_quiet_one(begin, quiet_run, tmp_path):
    run, keys = tmp_path / "run", [SLOW, "checkpoint.every_steps=1"]
    with small_disk(run / "index", megabytes=4) as disk:
        process = begin(run, *keys)
        wait_until(process, lambda: steps_done(run) >= 2)
        disk.leave(written_before(VersionStore(run / "index"), VersionStore(run / "index").plan(0), "block-00004.npy"))
        wait_until(process, lambda: steps_done(run) >= 8)
        kill(process)
        assert json.loads(sorted(run.glob("checkpoints/*.json"))[-1].read_text())["versions"] == [0, 1]
        assert not (run / "index/v000001/manifest.json").exists()
        disk.free()
        finish(run, *keys)
        assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
        assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()


LOSSY_KEYS = [SLOW, f"index.kind={LOSSY}", "index.num_shards=2", "index.num_builders=2"]


@pytest.mark.skipif(not FULL, reason="several minutes of whole runs: REPLUG_STORM=full runs it")
@pytest.mark.timeout(900)
def test_killed_in_a_refresh_of_a_lossy_kind_the_resumed_run_has_the_same_losses(begin, tmp_path):
    """In the first refresh, which takes over version 0's quantizer, and in the second, by a file just written."""
    quiet, run = tmp_path / "quiet", tmp_path / "run"
    finish(quiet, *LOSSY_KEYS)
    kills = [(1, 6, "block-00003.json"), (2, 12, "quantizer.faiss"), (2, 12, "block-00008.json")]
    for version, started_at, file in kills:
        process = begin(run, *LOSSY_KEYS)
        folder = run / f"index/v{version:06d}"
        wait_until(process, lambda step=started_at: steps_done(run) >= step - 2)
        builders = stop_builders(process)
        wait_until(process, lambda step=started_at: steps_done(run) > step)
        for builder in builders:
            builder.resume()
        wait_until(process, (folder / file).exists)
        kill(process)
        assert not (folder / "manifest.json").exists(), "the refresh was done before the kill"
    damaged = run / "index/v000001/block-00002.npy"
    flip(damaged)
    assert re.search(rf"replug: {damaged} is damaged", end(begin(run, *LOSSY_KEYS), status=2))
    flip(damaged)
    assert "resuming at step" in finish(run, *LOSSY_KEYS)
    assert what_must_be_equal(run) == what_must_be_equal(quiet)
    assert (run / "results.json").read_text() == (quiet / "results.json").read_text()


@pytest.mark.timeout(300)
def test_a_blue_green_run_has_the_losses_of_a_double_one(quiet_run, tmp_path):
    """With fewer builders than shards: the new searchers need more room than the builders leave."""
    run = tmp_path / "run"
    finish(run, "index.swap=blue_green", "index.num_shards=2")
    assert what_must_be_equal(run) == what_must_be_equal(quiet_run)
    assert (run / "results.json").read_text() == (quiet_run / "results.json").read_text()


@pytest.mark.timeout(300)
def test_builders_that_stand_still_make_refreshes_be_skipped_and_never_queued(begin, tmp_path):
    run = tmp_path / "run"
    # Measuring held-out texts with so slow an LM would outlast the run.
    slow = ("lm.path=stand_in:0.3", "evaluate.refresh_windows=0")
    process = begin(run, "refresh.adopt=when_ready", "index.num_builders=2", *slow)
    wait_until(process, lambda: steps_done(run) >= 3)
    stopped = stop_builders(process)
    assert len(stopped) == 2
    wait_until(process, lambda: steps_done(run) >= 14)  # past the boundaries of 6 and of 12
    for builder in stopped:
        builder.resume()
    output = end(process, status=0)
    rows = metrics(run)
    assert [row["index/refreshes_skipped"] for row in rows[:12]] == [0.0] * 12
    assert rows[12]["index/refreshes_skipped"] == rows[-1]["index/refreshes_skipped"] == 1.0
    assert output.count("skipping a refresh") == 1
    swaps = re.findall(r"step (\d+): swapped to index v(\d+) \(weights of step (\d+)\)", output)
    assert [(version, weights) for _, version, weights in swaps] == [("1", "6"), ("2", "18")], swaps
    assert int(swaps[0][0]) >= 14
