"""The composition root: `replug train`, from configuration to report, each stage a call.

Every stage leaves its result in the run directory and is passed over when it is there, so the same
command goes on where an interrupted one stopped.
"""

import json
import logging
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning.loggers.logger import Logger

from replug.cluster.interruption import Interruption
from replug.cluster.ray_cluster import ray_cluster
from replug.configs.schema import Config
from replug.data.files import write_json
from replug.data.records import Window
from replug.data.store import PreparedSet
from replug.evals.language_modelling import Choice, measure_bits, random_choice
from replug.evals.report import write_report
from replug.evals.results import RECALL_AT, bpb_results, print_results, retrieval_results
from replug.evals.search import read_choice, write_choice
from replug.index_workers.build import build_version, document_search, index_kind
from replug.index_workers.installation import check_faiss
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import IndexState
from replug.models.build import lm_source, load_encoder
from replug.models.encoder import Encoder
from replug.models.preparing import prepared_set
from replug.train.data_checks import check_data
from replug.train.fitting import fit, loggers_of, lsr_module, publish, quieten_lightning
from replug.train.module import LSRModule
from replug.train.run_dir import RunDirectory, StageTimes
from replug.train.workers import Workers, start_workers

log = logging.getLogger(__name__)

NUM_EXAMPLES = 6  # held-out texts shown in the report with what each retriever finds


def train(config: Config) -> dict:
    """Run or resume a training run; returns what `results.json` holds."""
    run = RunDirectory(Path(config.run_dir).expanduser())
    if run.is_finished:
        log.info(f"{run.path} holds a finished run; give another run_dir to train again")
        return show_results(run)
    check_faiss()
    quieten_lightning()
    interruption = Interruption()
    with interruption.installed():
        return _train(config, run, interruption)


def _train(config: Config, run: RunDirectory, interruption: Interruption) -> dict:
    times = StageTimes(run)
    lm = lm_source(config.lm, run.budget_file, run.scores)
    module_encoder = load_encoder(config.retriever)
    data = prepared_set(config, run.data)
    check_data(config, data, lm)
    index_kind(config, module_encoder.dim, len(data.corpus))
    run.claim(config, lm.identity)  # only now: a mistake mended above must not be a changed key of an unfinished run
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    loggers = loggers_of(config, run)
    with (
        ray_cluster(config, ("train", "index", *lm.roles), interruption) as laid_out,
        start_workers(laid_out, lm, data, run.index, run.scores) as workers,
    ):
        times.next("first_index")
        before = _before(laid_out, run, data, workers)
        times.next("training")
        module = lsr_module(laid_out, module_encoder, data)
        after = _after(laid_out, run, data, workers, module, loggers, interruption, times)
        times.next("measuring")
        results = measure(laid_out, data, workers, {"replug": before, "lsr": after})
    _write_examples(run, data, before, after)
    write_json(run.results, results)
    times.next("publishing")
    publish(config, loggers, run, results)
    run.remove_work_files()
    return show_results(run)


def show_results(run: RunDirectory) -> dict:
    """Write the report, print the table and where things are."""
    results = json.loads(run.results.read_text())
    write_report(run.report, results, run.read_metrics(), run.examples, run.path / "config.yaml")
    print_results(results)
    for what, path in (("run", run.path), ("tuned retriever", run.retriever), ("report", run.report)):
        print(f"{what}: {path}")
    return results


def _before(config: Config, run: RunDirectory, data: PreparedSet, workers: Workers) -> Choice:
    """What the retriever finds for the held-out texts as it was: index version 0."""
    saved = run.path / "heldout_before.npz"
    if saved.exists():
        return read_choice(saved)
    encoder = load_encoder(config.retriever)
    build_version(config, encoder, data, workers.index, IndexState(0, 0))
    choice = search_windows(config, data, workers.index, encoder, version=0)
    write_choice(saved, choice)
    return choice


def _after(
    config: Config,
    run: RunDirectory,
    data: PreparedSet,
    workers: Workers,
    module: LSRModule,
    loggers: list[Logger],
    interruption: Interruption,
    times: StageTimes,
) -> Choice:
    """Train, export, embed the corpus once more, and search the held-out texts again."""
    saved = run.path / "heldout_after.npz"
    if saved.exists():
        return read_choice(saved)
    version = fit(config, run, data, workers, module, loggers, interruption)
    times.next("last_index")
    module.encoder.cpu().eval()
    build_version(config, module.encoder, data, workers.index, IndexState(version, config.train.max_steps))
    choice = search_windows(config, data, workers.index, module.encoder, version)
    module.encoder.save(run.retriever)
    write_choice(saved, choice)
    # Only now: a checkpoint may need other versions until then.
    workers.index.store.remove_all_but({version - 1, version})
    return choice


def search_windows(config: Config, data: PreparedSet, index: IndexService, encoder: Encoder, version: int) -> Choice:
    """The documents of every held-out text, as many as any measurement needs."""
    k = min(len(data.corpus), max(config.evaluate.k, *RECALL_AT))
    windows = data.heldout.windows()
    vectors = encoder.encode([window.context for window in windows]).numpy()
    exclude = [window.source for window in windows] if config.retrieve.exclude_own_source else None
    found = document_search(config, encoder, data, index)(version, vectors, k, exclude)
    return Choice(found.doc_rows, found.similarities)


def measure(config: Config, data: PreparedSet, workers: Workers, found: dict[str, Choice]) -> dict:
    """Bits per byte of every method on the held-out texts; recall where gold documents are known.

    `found` maps `replug` (the retriever as it was) and `lsr` (the tuned one) to their documents.
    """
    everything = data.heldout.windows()
    windows = everything[: config.evaluate.max_windows]
    if len(windows) < len(everything):
        log.info(
            f"bits per byte on the first {len(windows)} of {len(everything)} held-out texts (evaluate.max_windows)"
        )
    choices = {"random": random_documents(config, data, windows)}
    choices |= {name: first_k(choice, config.evaluate.k) for name, choice in found.items()}
    bits = measure_bits(workers.lm, data.corpus, windows, choices, workers.template)
    results = bpb_results(windows, bits, config.evaluate.num_resamples, config.seed)
    sides = {"replug": "before", "lsr": "after"}
    retrieval = retrieval_results(data.corpus, everything, {sides[name]: c for name, c in found.items()})
    return {**results, "retrieval": retrieval} if retrieval else results


def first_k(choice: Choice, k: int) -> Choice:
    return Choice(choice.doc_rows[:, :k], choice.similarities[:, :k])


def random_documents(config: Config, data: PreparedSet, windows: list[Window]) -> Choice:
    """Random documents, weighted evenly: they were not chosen by any similarity."""
    rows = random_choice(len(data.corpus), len(windows), config.evaluate.k, config.seed)
    return Choice(rows, np.zeros(rows.shape))


def _write_examples(run: RunDirectory, data: PreparedSet, before: Choice, after: Choice) -> None:
    """A few held-out texts with the documents that each retriever ranks first, those that changed most first."""
    changed = [row for row in range(len(data.heldout)) if before.doc_rows[row, 0] != after.doc_rows[row, 0]]
    same = [row for row in range(len(data.heldout)) if row not in changed]
    rows = (changed + same)[:NUM_EXAMPLES]
    examples = []
    for row, window in zip(rows, data.heldout.windows(rows), strict=True):
        found = {name: _found(data, c, row) for name, c in (("before", before), ("after", after))}
        examples.append({"context": window.context, "continuation": window.continuation, **found})
    write_json(run.examples, examples)


def _found(data: PreparedSet, choice: Choice, row: int, k: int = 3) -> list[dict]:
    documents = data.corpus.documents(choice.doc_rows[row, :k])
    return [
        {"id": doc.id, "text": doc.text, "similarity": float(similarity)}
        for doc, similarity in zip(documents, choice.similarities[row], strict=False)
    ]
