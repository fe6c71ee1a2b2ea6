"""A rehearsal: stand-ins and a fake cluster are made; `replug train` runs on them, is interrupted, and is watched."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from replug.cluster.interruption import EXIT_STATUS
from replug.config.load import config_to_yaml
from replug.config.schema import Config
from replug.planning.accelerators import Devices
from replug.rehearsal.fake_cluster import fake_cluster
from replug.rehearsal.scaling import CorpusFiles, Places, corpus_files, num_texts, scaled_config, scaled_files
from replug.rehearsal.stand_ins import write_stand_ins
from replug.rehearsal.watching import Watch

log = logging.getLogger(__name__)

LOOK_SECONDS, MEASURE_SECONDS = 0.1, 3.0
LONGEST_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a rehearsal was of, and what was seen."""

    files: CorpusFiles
    scaled_files: CorpusFiles
    config: Config
    watch: Watch
    statuses: list[int]  # of each start of the run: interrupted, then ended
    metrics: list[dict]
    output: str
    seconds: float


def rehearse(config: Config, devices: Devices, num_documents: int) -> Rehearsed:
    """Run a configuration that is laid out on these devices, on nothing but this machine."""
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what was started ends
    files = corpus_files(config, num_documents)
    small = scaled_files(files, max(config.retrieve.k, config.evaluate.k))
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        with fake_cluster(devices.nodes, _gpus_of_node(devices), devices.accelerator.memory_gb) as cluster:
            places = Places(folder / "run", folder / "prepared", folder / "retriever", cluster.address)
            scaled = scaled_config(config, small, places)
            write_stand_ins(places.retriever, places.prepared, small, *num_texts(config, scaled))
            log.info(f"rehearsing {scaled.train.max_steps} steps in {folder}")
            watch = Watch(cluster, places.prepared, places.run / "index")
            run = _Run(scaled, folder, watch)
            statuses = run.to_the_end()
        output, metrics = run.output.read_text(errors="replace"), run.metrics()
    return Rehearsed(files, small, scaled, watch, statuses, metrics, output, time.monotonic() - began)


def _gpus_of_node(devices: Devices) -> int:
    return 0 if devices.accelerator.is_cpu else devices.count // devices.nodes


class _Run:
    """`replug train` in processes of its own."""

    def __init__(self, config: Config, folder: Path, watch: Watch) -> None:
        self._config, self._watch = config, watch
        self._metrics = Path(config.run_dir) / "metrics.jsonl"
        self._yaml, self.output = folder / "scaled.yaml", folder / "output.txt"
        self._yaml.write_text(config_to_yaml(config))
        self._deadline = time.monotonic() + LONGEST_SECONDS

    def to_the_end(self) -> list[int]:
        """Exit statuses: of the first start, which is interrupted half-way, and of the second."""
        first = self._start(interrupt_at=self._config.train.max_steps // 2)
        return [first, self._start(interrupt_at=None)] if first == EXIT_STATUS else [first]

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in self._metrics.read_text().splitlines()] if self._metrics.is_file() else []

    def _steps(self) -> int:
        return self._metrics.read_bytes().count(b"\n") if self._metrics.is_file() else 0

    def _start(self, interrupt_at: int | None) -> int:
        command = [sys.executable, "-m", "replug.commands.cli", "train", str(self._yaml)]
        with self.output.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        measured = 0.0
        try:
            while process.poll() is None and time.monotonic() < self._deadline:
                if time.monotonic() > measured + MEASURE_SECONDS:
                    self._watch.look(process.pid)
                    measured = time.monotonic()
                if interrupt_at is not None and self._steps() >= interrupt_at:
                    process.send_signal(signal.SIGTERM)
                    interrupt_at = None
                time.sleep(LOOK_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            self._watch.look(process.pid)
        return process.wait()
