"""The composition root: `replug train`, from configuration to report, each stage a call; and its table alone.

Every stage leaves its result in the run directory and is passed over when it is there, so the same
command goes on where an interrupted one stopped.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path

from pytorch_lightning.loggers.logger import Logger

from replug.cluster.interruption import Interruption
from replug.cluster.ray_cluster import ray_cluster
from replug.config.choices import Accelerator
from replug.config.rules import FIT, OWN_LABELS
from replug.config.schema import Config
from replug.data.files import write_json
from replug.data.folder_lock import sole_writer
from replug.data.labels import Labels
from replug.data.store import PreparedSet
from replug.evals.evidence import RetrievedDocuments
from replug.index_workers.build import index_kind
from replug.index_workers.build_plan import IndexState, check_faiss
from replug.models.build import lm_source
from replug.models.hardware import check_gpus, multiplies_bfloat16
from replug.models.preparing import data_folder, prepared_set
from replug.planning.memory import run_sizes
from replug.train.data_checks import check_data
from replug.train.evaluation import (
    evaluate_heldout,
    found_before,
    found_best,
    found_by,
    measured_encoder,
    write_examples,
)
from replug.train.fitting import fit, lsr_module
from replug.train.labels.fitting import label_steps
from replug.train.labels.labelling import label
from replug.train.labels.run import train_on_labels
from replug.train.model_card import write_model_card
from replug.train.module import LSRModule
from replug.train.report import write_report
from replug.train.results import print_results, weights_of
from replug.train.run_dir import RunDirectory
from replug.train.trained_weights import check_training, save_retriever
from replug.train.trainer import loggers_of, publish, quieten_lightning
from replug.train.workers import Workers, start_workers

log = logging.getLogger(__name__)


def train(config: Config) -> dict:
    """Run or resume a training run; returns what `results.json` holds."""
    run = RunDirectory(Path(config.run_dir).expanduser())
    return _train_with_labels(config, run, run.index)


def _train_with_labels(config: Config, run: RunDirectory, index: Path) -> dict:
    """`index` is where labels of the run's own are searched for: documents are embedded once for all that want them."""
    labels = _labels(config, run, index)
    if labels is not None:
        config = label_steps(config, labels.counts["queries"])
    run.require_ours(config)  # before the lock, which is a file in the folder
    with sole_writer(run.path):
        return _train_or_show(config, run, labels)


def _labels(config: Config, run: RunDirectory, index: Path) -> Labels | None:
    """Those that are named, or the run's own, which are made before it begins."""
    if config.train.labels != OWN_LABELS:
        return Labels(Path(config.train.labels).expanduser()) if config.train.labels else None
    begun = run.begun_with()
    if begun is not None and begun.train.labels == OWN_LABELS:
        return Labels(run.labels)  # made again they could be others
    run.require_ours(config)
    with sole_writer(run.path):
        _require_dev_texts(config, prepared_set(config, run.data))
        return label(_with_first_round(config, run, index), run.labels, index)


def _with_first_round(config: Config, run: RunDirectory, index: Path) -> Config:
    """With the queries of a first training, on labels without `label.tuned`, where their documents are wanted too.

    Both rounds have one set, one index and one cache of scores, so no pair is scored twice.
    """
    if not config.label.tuned or config.label.tuned_path:
        return config
    shared = replace(
        config,
        data=replace(config.data, out=config.data.out or str(run.data)),
        lm=replace(config.lm, cache=config.lm.cache or str(run.scores)),
    )
    first = replace(
        shared,
        run_dir=str(run.first),
        label=replace(config.label, tuned=0),
        evaluate=replace(config.evaluate, heldout=False),
    )
    _train_with_labels(first, RunDirectory(run.first), index)
    return replace(shared, label=replace(config.label, tuned_path=str(run.first)))


def _train_or_show(config: Config, run: RunDirectory, labels: Labels | None) -> dict:
    if run.is_finished and not run.goes_on(config):
        # Names that are those of the finished run may stand for other files by now.
        if config.lm.path is not None:  # a server may be gone by now
            run.require_same_lm(lm_source(config.lm, run.budget_file, run.scores).identity)
        if (data_folder(config, run.data) / "manifest.json").is_file():  # who needs the room removes the set
            run.require_same_set(prepared_set(config, run.data).folder)
        log.info(f"{run.path} holds a finished run; give another run_dir to train again, or more train.max_steps")
        return show_results(run)
    check_faiss()
    if config.train.accelerator is not Accelerator.cpu:
        check_gpus()
    quieten_lightning()
    interruption = Interruption()
    with interruption.installed():
        if labels is None:
            return _train(config, run, interruption)
        train_on_labels(config, labels, run, interruption)
        return show_results(run)


def _train(config: Config, run: RunDirectory, interruption: Interruption) -> dict:
    lm = lm_source(config.lm, run.budget_file, run.scores)
    module_encoder = measured_encoder(config)
    data = prepared_set(config, run.data)
    _require_dev_texts(config, data)
    check_data(config, data, lm)
    index_kind(config, module_encoder.dim, len(data.corpus))
    check_training(config, module_encoder)
    # Only now: a mistake that was fixed above must not be a changed key of an unfinished run.
    run.claim(config, lm.identity, data.folder)
    loggers = loggers_of(config, run)
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    with (
        ray_cluster(config, ("train", "index", *lm.roles), interruption, sizes) as laid_out,
        start_workers(laid_out, lm, data, run.index, run.scores) as workers,
    ):
        before = found_before(laid_out, run, data, workers)
        module = lsr_module(laid_out, module_encoder, data)
        after = _after(laid_out, run, data, workers, module, loggers, interruption)
        found = {"replug": before, "lsr": after, **found_best(laid_out, run, data, workers)}
        results = evaluate_heldout(laid_out, data, workers, found, run.evaluation)
    results["weights"] = weights_of(config.train.max_steps, run.best_weights())
    write_examples(run, data, before, after)
    write_model_card(run.retriever, config, f"step {config.train.max_steps}, the last", run.provenance(), results)
    run.finish(results)
    publish(config, loggers, run, results)
    run.remove_work_files()
    return show_results(run)


def _require_dev_texts(config: Config, data: PreparedSet) -> None:
    """Raise UserError where something is to be chosen by development texts and the set has none."""
    if config.ensemble.temperature == FIT or config.train.patience is not None:
        data.require_dev()


def evaluate(config: Config) -> None:
    """The table of `replug train`, for the retriever as it is configured and the run's tuned one, if any."""
    check_faiss()
    check_gpus()
    run = RunDirectory(Path(config.run_dir).expanduser())
    with sole_writer(run.path):
        _evaluate(config, run)


def _evaluate(config: Config, run: RunDirectory) -> None:
    lm = lm_source(config.lm, run.budget_file, run.scores)
    data = prepared_set(config, run.data)
    _require_dev_texts(config, data)
    check_data(config, data, lm)
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    folders = {"lsr": run.retriever, **({"best": run.best} if config.evaluate.best else {})}
    paths = {"replug": None, **{name: folder for name, folder in folders.items() if folder.is_dir()}}
    with (
        ray_cluster(config, ("index", *lm.roles), sizes=sizes) as laid_out,
        start_workers(laid_out, lm, data, run.evaluation / "index", run.scores) as workers,
    ):
        found = {
            name: found_by(laid_out, data, workers, measured_encoder(config, path), IndexState(number, 0), name)
            for number, (name, path) in enumerate(paths.items())  # the first is the retriever as it was
        }
        results = evaluate_heldout(laid_out, data, workers, found, run.evaluation)
    if run.fitted.is_file() and run.is_finished:
        results["labels"] = json.loads(run.results.read_text())["labels"]
    elif "lsr" in paths and (trained := run.begun_with()) is not None:
        results["weights"] = weights_of(trained.train.max_steps, run.best_weights())
    write_json(run.evaluation / "results.json", results)
    print_results(results)
    print(f"results: {run.evaluation / 'results.json'}")


def show_results(run: RunDirectory) -> dict:
    """Write the report, print the table and where things are."""
    run.require_intact()
    results = json.loads(run.results.read_text())
    made_by = run.provenance()
    write_report(
        run.report,
        results,
        metrics=run.read_metrics(),
        device_use=run.read_device_use(),
        examples_path=run.examples,
        config_path=run.path / "config.yaml",
        made_by=made_by,
    )
    print_results(results)
    for line in made_by:
        print(line)
    for what, path in (("run", run.path), ("tuned retriever", run.retriever), ("report", run.report)):
        print(f"{what}: {path}")
    return results


def _after(
    config: Config,
    run: RunDirectory,
    data: PreparedSet,
    workers: Workers,
    module: LSRModule,
    loggers: list[Logger],
    interruption: Interruption,
) -> RetrievedDocuments:
    """Train, export, embed the corpus once more, and search the held-out texts again."""
    saved = run.found_after
    if saved.exists():
        return RetrievedDocuments.load(saved)
    version = fit(config, run, data, workers, module, loggers, interruption)
    module.encoder.cpu().eval()
    found = found_by(config, data, workers, module.encoder, IndexState(version, config.train.max_steps))
    save_retriever(run.retriever, module.encoder, config.retriever.train, module.frozen_documents)
    found.save(saved)
    # Only now: a checkpoint may need other versions until then, and the newest is kept.
    kept = run.checkpoint_marks()[-1:]
    workers.index.store.remove_all_but({version - 1, version, *(needed for mark in kept for needed in mark.versions)})
    return found
