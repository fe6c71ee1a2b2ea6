"""The composition root of a training on labels: `replug train` with `train.labels`, each stage a call.

The LM is asked for the held-out texts at the end alone, and not even there with `evaluate.heldout=false`. The tuned
retriever has the weights that did best on the labelled development texts, or the last ones where there are none.
"""

from dataclasses import asdict

from replug.cluster.interruption import Interruption
from replug.cluster.ray_cluster import ray_cluster
from replug.config.errors import UserError
from replug.config.rules import FIT
from replug.config.schema import Config
from replug.data.files import file_sha256, read_json, write_json
from replug.data.labels import MARK, Labels, require_labels_of
from replug.data.store import PreparedSet
from replug.evals.evidence import RetrievedDocuments
from replug.index_workers.build import index_kind
from replug.index_workers.build_plan import IndexState
from replug.models.build import lm_source, load_encoder
from replug.models.encoder import Encoder
from replug.models.ensemble_temperature import write_temperature
from replug.models.hardware import multiplies_bfloat16
from replug.models.lm_source import LMSource
from replug.models.preparing import prepared_set
from replug.planning.memory import run_sizes
from replug.train.data_checks import check_data, check_texts
from replug.train.evaluation import evaluate_heldout, found_before, found_by, measured_encoder, write_examples
from replug.train.labels.fitting import LabelTraining, fit_labels, label_module
from replug.train.labels.labelling import label_origin
from replug.train.model_card import write_model_card
from replug.train.run_dir import MEND, RunDirectory
from replug.train.trained_weights import check_training
from replug.train.trainer import loggers_of, publish
from replug.train.workers import Workers, start_workers


def train_on_labels(config: Config, labels: Labels, run: RunDirectory, interruption: Interruption) -> dict:
    """Run or resume it; returns what `results.json` holds."""
    source = lm_source(config.lm, run.budget_file, run.scores) if needs_lm(config) else None
    encoder, data = measured_encoder(config), prepared_set(config, run.data)
    check_data(config, data, source) if source else check_texts(config, data)
    index_kind(config, encoder.dim, len(data.corpus))
    check_training(config, encoder)
    require_fitting_labels(config, labels, data, source, encoder)
    claim(config, labels, run, data)
    loggers, training = loggers_of(config, run), LabelTraining.of(config, labels, data)
    module = label_module(config, encoder, data, training)
    fitted = fit_labels(config, run, module, training, loggers, interruption)
    results: dict = {"labels": {**asdict(fitted), "dev_alone": training.dev.bpb_alone if training.dev else None}}
    if config.evaluate.heldout:
        assert source is not None
        results |= _measure(config, run, data, source, interruption)
    write_model_card(run.retriever, config, fitted.describe(), run.provenance(), results)
    run.finish(results)
    publish(config, loggers, run, results)
    run.remove_work_files()
    return results


def needs_lm(config: Config) -> bool:
    """Local weights are always looked at, for whether the labels are theirs; a server is asked only if it must be."""
    return config.evaluate.heldout or config.lm.path is not None


def require_fitting_labels(
    config: Config, labels: Labels, data: PreparedSet, source: LMSource | None, encoder: Encoder
) -> None:
    """Raise UserError where the labels are of another set or LM than the training."""
    lm = source.identity if source else labels.origin.lm
    require_labels_of(labels.origin, label_origin(config, data, lm, encoder), labels.folder)
    asks = {
        "train.patience": config.train.patience is not None,
        "ensemble.temperature=fit": config.ensemble.temperature == FIT,
    }
    for key, is_asked in asks.items():
        if is_asked and not labels.has_dev:
            raise UserError(f"{key}: {labels.folder} has no development texts to look at; leave it out")


def claim(config: Config, labels: Labels, run: RunDirectory, data: PreparedSet) -> None:
    """Begin the run, or check that it was begun with the same labels as well."""
    now = file_sha256(labels.folder / MARK)
    if run.labels_mark.is_file() and read_json(run.labels_mark, MEND)["mark_sha256"] != now:
        raise UserError(
            f"train.labels: the run in {run.path} was begun with other labels than those in {labels.folder} now: bring "
            "the first ones back, or give another run_dir"
        )
    run.claim(config, labels.origin.lm, data.folder)
    write_json(run.labels_mark, {"mark_sha256": now})


def _measure(
    config: Config,
    run: RunDirectory,
    data: PreparedSet,
    source: LMSource,
    interruption: Interruption,
) -> dict:
    """Bits per byte of the held-out texts before and after, as at the end of an online training."""
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    with (
        ray_cluster(config, ("index", *source.roles), interruption, sizes) as laid_out,
        start_workers(laid_out, source, data, run.index, run.scores) as workers,
    ):
        before = found_before(laid_out, run, data, workers)
        after = _after(laid_out, run, data, workers)
        results = evaluate_heldout(laid_out, data, workers, {"replug": before, "lsr": after}, run.evaluation)
    write_examples(run, data, before, after)
    return results


def _after(config: Config, run: RunDirectory, data: PreparedSet, workers: Workers) -> RetrievedDocuments:
    if run.found_after.exists():
        return RetrievedDocuments.load(run.found_after)
    tuned = load_encoder(config.retriever, run.retriever, config.index.dims)
    found = found_by(config, data, workers, tuned, IndexState(1, config.train.max_steps))
    if tuned.temperature is not None:  # fitted again, to what a search of the whole corpus finds
        write_temperature(run.retriever, tuned.temperature)
    found.save(run.found_after)
    return found
