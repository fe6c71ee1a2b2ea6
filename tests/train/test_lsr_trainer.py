"""`LSRTrainer`: objects instead of files, in a thread, in a Ray that the program has started, and no global changed."""

import importlib
import json
import logging
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import ray
import torch
from datasets import Dataset
from pytorch_lightning.loggers import CSVLogger
from ray._private.state import actors
from sentence_transformers import SentenceTransformer

from replug import BlackBoxLM, Encoder, EncoderRetriever, LSRTrainer, StandInLM, UserError
from replug.config.load import inputs_of
from replug.data.sources.built_in_texts import example_rows
from replug.models.packaged import resolve_encoder_path
from replug.models.preparing import prepared_set
from replug.train.run_dir import RunDirectory
from tests.support.evaluating import without_ray
from tests.support.runs import heldout_bits, what_must_be_equal

importlib.import_module("replug.train.run")  # before the state is noted: imports change it too
ROWS = example_rows()
SMALL = {
    **{"retrieve.k": 4, "train.max_steps": 4, "train.batch_size": 4, "refresh.every_steps": 2, "train.lr": 1e-3},
    **{"evaluate.k": 3, "evaluate.max_examples": 6, "data.questions": None},
}


def own_lm() -> BlackBoxLM:
    class OwnLM(StandInLM):  # as in a notebook: no process can import it
        identity = "own"

    return OwnLM()


def state() -> dict[str, Any]:
    """Settings that a program may have made for its whole process."""
    own, lightning = logging.getLogger("replug"), logging.getLogger("pytorch_lightning")
    return {
        "environment": {**os.environ},
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "threads": torch.get_num_threads(),
        "random": [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())],
        "warnings": list(warnings.filters),
        "logging": [(one.level, list(one.handlers)) for one in (logging.getLogger(), own, lightning)],
        "backend": __import__("matplotlib").rcParams._get("backend"),
    }


def none_alive(seconds: float = 100.0) -> bool:
    """Whether all actors of this cluster end in time: Ray kills them, and notes it a moment later."""
    end = time.monotonic() + seconds
    while any(actor["State"] != "DEAD" for actor in actors().values()):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def trainer(run: Path, lm: BlackBoxLM | str, **given: Any) -> LSRTrainer:
    objects: dict[str, Any] = {
        "corpus": pandas.DataFrame(ROWS["corpus"]),
        "train": Dataset.from_list(ROWS["train"]),
        "heldout": ROWS["heldout"],
    }
    encoder = given.pop("encoder", "stand_in")
    objects |= {"config": "own_data_online", "run_dir": run, "overrides": SMALL}
    return LSRTrainer(encoder, lm, **{**objects, **given})


@pytest.mark.slow
def test_objects_give_in_a_thread_what_the_command_gives_of_files_and_leave_the_process_as_it_was(
    tmp_path: Path, ray_session: None
) -> None:
    run = tmp_path / "objects"
    encoder = SentenceTransformer(resolve_encoder_path("stand_in"))
    given = {"encoder": encoder, "loggers": [CSVLogger(tmp_path / "logs")]}
    before, done = state(), []
    made = trainer(run, own_lm(), **given)
    thread = threading.Thread(target=lambda: done.append(made.train()))
    thread.start()
    thread.join(400)
    assert done and state() == before
    assert ray.is_initialized() and none_alive()
    assert "train/loss" in next((tmp_path / "logs").rglob("metrics.csv")).read_text()

    [results] = done
    assert dict(results) == json.loads((run / "results.json").read_text())
    assert "| lsr |" in results.table and results.report.is_file() and results.improved in (True, False)
    tuned = made.retriever.encode_query(["a market"])
    assert np.abs(tuned - encoder.encode_query(["a market"])).max() > 1e-6

    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [f"data.{name}={tmp_path / name}.jsonl" for name in ("corpus", "train", "heldout")]
    keys = [f"{key}={'null' if value is None else value}" for key, value in SMALL.items()]
    models = ["retriever.path=stand_in", "lm.path=stand_in"]
    with without_ray() as here:
        ended = here("train", "own_data_online", *files, *models, *keys, f"run_dir={tmp_path / 'files'}")
    assert ended.status == 0, ended.printed
    assert what_must_be_equal(run) == what_must_be_equal(tmp_path / "files")
    assert heldout_bits(run) == heldout_bits(tmp_path / "files")

    with pytest.raises(UserError, match=r"corpus.jsonl \(sha256\) is .*, but the set of given objects .* run_dir"):
        trainer(run, own_lm(), encoder=encoder, corpus=ROWS["corpus"][1:]).train()
    with pytest.raises(UserError, match=r"lm.path is python:OwnLM, an object of the program that started this run"):
        LSRTrainer(config=run / "config.yaml").train()


@pytest.mark.slow
def test_an_lm_that_cannot_be_sent_is_refused(tmp_path: Path, ray_session: None) -> None:
    class Locked(StandInLM):
        """Holds what no other process can have."""

        lock = threading.Lock()

    with pytest.raises(UserError, match=r"lm: a Locked cannot be sent to the scorers: .*first call"):
        trainer(tmp_path / "run", Locked()).train()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"overrides": {"train.max_step": 3}}, r"train\.max_step: unknown key; did you mean train\.max_steps"),
        ({"overrides": {"train.lr": {1}}}, "train.lr: a set is not text, a number or a list"),
        ({"lm": 3}, "lm is a int; expected a name, a folder, a URL or a BlackBoxLM"),
        ({"retriever": 3}, "retriever is a int; expected a hub name, a folder or a SentenceTransformer"),
        ({"heldout": "nowhere.jsonl"}, "data.heldout: nowhere.jsonl does not exist"),
        ({"train": ["a text"]}, r"train\[0\] is a str; expected a dict with context and continuation"),
        ({"train": {"context": "a"}}, "train is a dict; expected a path, or rows such as a list of dicts"),
        ({"corpus": [{"text": "a"}]}, r"given/corpus.jsonl:1: field 'id' is missing"),
        ({"corpus": [{"id": 1, "text": b"a"}]}, r"corpus\[0\] is not a row of JSON: a bytes is not text"),
    ],
)
def test_objects_are_refused_as_files_are(given: dict, reason: str, tmp_path: Path) -> None:
    valid = {"corpus": ROWS["corpus"], "train": ROWS["train"], "heldout": ROWS["heldout"]}
    arguments = {"retriever": "stand_in", "lm": "stand_in", **valid, "config": "own_data_online", **given}
    with pytest.raises(UserError, match=reason):
        LSRTrainer(**arguments, run_dir=tmp_path / "run").train()


def test_rows_are_replaced_until_something_was_made_from_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="field 'continuation' is missing"):
        trainer(tmp_path, "stand_in", train=[{"context": "a"}]).train()
    right = trainer(tmp_path, "stand_in")
    right._given.write(tmp_path)
    assert len(prepared_set(right.config, tmp_path / "data").queries) == len(ROWS["train"])
    (tmp_path / "inputs.json").touch()
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"train.jsonl \(sha256\) is .*, but the set of given objects"):
        trainer(tmp_path, "stand_in", train=ROWS["train"][1:])._given.write(tmp_path)


def test_a_model_of_queries_alone_is_refused_as_an_object_which_lacks_its_documents_encoder(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    encoder = Encoder("stand_in")
    encoder.save(folder, {"path": "stand_in", "sha256": encoder.documents_sha256()})
    tuned = SentenceTransformer(str(folder))
    with pytest.raises(UserError, match="encodes queries alone; expected that path as the retriever"):
        LSRTrainer(tuned, "stand_in", source=["a text"])
    with pytest.raises(UserError, match="encodes queries alone"):
        EncoderRetriever(tuned, ["a text"])
    assert EncoderRetriever(Encoder(str(folder)), ["a text"]).retrieve(["a text"], 1)


def test_the_retriever_of_another_training_in_the_folder_is_refused_and_a_generator_is_read_once(
    tmp_path: Path,
) -> None:
    first = trainer(tmp_path, "stand_in")
    with pytest.raises(UserError, match="holds no tuned retriever yet"):
        _ = first.retriever
    RunDirectory(tmp_path).folder.claim(inputs_of(first.config))
    first._given.write(tmp_path)
    Encoder("stand_in").save(tmp_path / "retriever")
    (tmp_path / "fitted.json").write_text("{}")
    assert isinstance(first.retriever, SentenceTransformer)
    with pytest.raises(UserError, match=r"train.jsonl \(sha256\) is"):
        _ = trainer(tmp_path, "stand_in", train=ROWS["train"][1:]).retriever
    with pytest.raises(UserError, match=r"retriever\.path is"):
        _ = trainer(tmp_path, "stand_in", encoder="package:minilm").retriever
    made = trainer(tmp_path / "generator", "stand_in", train=(row for row in ROWS["train"]))
    for _round in range(2):  # a generator is read once, whenever the run resumes
        made._given.write(tmp_path / "generator")
