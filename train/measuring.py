"""What a run measures by the held-out texts: their documents before and after, and a few of them to show."""

from dataclasses import replace
from pathlib import Path

from replug.config.choices import TrainedSide
from replug.config.rules import FIT
from replug.config.schema import Config
from replug.data.files import write_json
from replug.data.store import PreparedSet
from replug.evals.evidence import RetrievedDocuments
from replug.index_workers.build import build_version
from replug.index_workers.build_plan import IndexState
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.ensemble_temperature import EnsembleTemperature, own_temperature, write_temperature
from replug.train.evaluation import fit_on_development, search_heldout
from replug.train.run_dir import RunDirectory
from replug.train.workers import Workers

NUM_EXAMPLES = 6  # held-out texts shown in the report with what each retriever finds


def found_before(config: Config, run: RunDirectory, data: PreparedSet, workers: Workers) -> RetrievedDocuments:
    """What the retriever finds for the held-out texts as it was: index version 0."""
    saved = run.found_before
    if saved.exists():
        return RetrievedDocuments.load(saved)
    found = found_with(config, data, workers, measured_encoder(config), IndexState(0, 0), "replug")
    found.save(saved)
    return found


def found_best(config: Config, run: RunDirectory, data: PreparedSet, workers: Workers) -> dict[str, RetrievedDocuments]:
    """What the weights find that did best while training, where they are asked for and are not the last ones."""
    best = run.best_weights() if config.evaluate.best else None
    if best is None or best["step"] == config.train.max_steps:
        return {}
    version = workers.index.store.versions()[-1] + 1
    index = IndexState(version, best["step"])
    found = found_tuned(config, data, workers, measured_encoder(config, run.best), index, "best")
    workers.index.store.remove_all_but({*workers.index.store.versions()} - {version})
    return {"best": found}


def found_with(
    config: Config, data: PreparedSet, workers: Workers, encoder: Encoder, index: IndexState, name: str
) -> RetrievedDocuments:
    """What an encoder finds for the held-out texts in an index of its own, and its ensemble's temperature.

    One that is fitted is saved with the encoder where the index's version is, too.
    """
    build_version(config, encoder, data, workers.index, index)
    found = _searched(config, data, workers, encoder, index.version, name)
    if config.ensemble.temperature == FIT:
        write_temperature(workers.index.store.encoder_folder(index.version), found.temperature, is_listed=False)
    return found


def _searched(
    config: Config, data: PreparedSet, workers: Workers, encoder: Encoder, version: int, name: str
) -> RetrievedDocuments:
    """In the index of a version that is there. A temperature that is fitted becomes the encoder's."""
    if config.ensemble.temperature == FIT:
        encoder.temperature = fit_on_development(config, data, workers, encoder, version, name)
    found = search_heldout(config, data, workers.index, encoder, version)
    return replace(found, temperature=own_temperature(encoder))


def measured_encoder(config: Config, path: Path | None = None) -> Encoder:
    """The retriever of the configuration, or another of its kind, with the temperature that is asked for.

    One that is to be fitted has none until then.
    """
    encoder, asked = load_encoder(config.retriever, path, config.index.dims), config.ensemble.temperature
    if asked is not None:
        encoder.temperature = None if asked == FIT else EnsembleTemperature(float(asked))
    return encoder


def found_tuned(
    config: Config, data: PreparedSet, workers: Workers, encoder: Encoder, index: IndexState, name: str = "lsr"
) -> RetrievedDocuments:
    """As `found_with`; where documents stay as they are, in version 0, which is theirs."""
    if config.retriever.train is TrainedSide.query and index.version > 0:
        return _searched(config, data, workers, encoder, 0, name)
    return found_with(config, data, workers, encoder, index, name)


def write_examples(run: RunDirectory, data: PreparedSet, before: RetrievedDocuments, after: RetrievedDocuments) -> None:
    """A few held-out texts with the documents that each retriever ranks first, those that changed most first."""
    changed = [row for row in range(len(data.heldout)) if before.doc_rows[row, 0] != after.doc_rows[row, 0]]
    same = [row for row in range(len(data.heldout)) if row not in changed]
    rows = (changed + same)[:NUM_EXAMPLES]
    examples = []
    for row, window in zip(rows, data.heldout.windows(rows), strict=True):
        found = {name: _found(data, c, row) for name, c in (("before", before), ("after", after))}
        examples.append({"context": window.context, "continuation": window.continuation, **found})
    write_json(run.examples, examples)


def _found(data: PreparedSet, found: RetrievedDocuments, row: int, k: int = 3) -> list[dict]:
    documents = data.corpus.documents(found.doc_rows[row, :k])
    return [
        {"id": doc.id, "text": doc.text, "similarity": float(similarity)}
        for doc, similarity in zip(documents, found.similarities[row], strict=False)
    ]
