"""The queries that an earlier training tuned, whose nearest documents are candidates too (`label.tuned`)."""

import tempfile
from pathlib import Path

from replug.configs.errors import UserError
from replug.configs.schema import Config
from replug.index_workers.version_store import reading_identity, weights_sha256
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.encoder_files import is_query_side
from replug.train.run_dir import RunDirectory


def load_tuned_queries(config: Config, encoder: Encoder) -> Encoder | None:
    """None where none are asked for. They search the index of `encoder`.

    Raises UserError for a run whose documents are encoded by another encoder.
    """
    if config.label.tuned_path is None:
        return None
    run = RunDirectory(Path(config.label.tuned_path).expanduser())
    if not (run.document_encoder.is_dir() and is_query_side(str(run.retriever))):
        raise UserError(
            f"label.tuned_path: {run.path} holds no queries tuned alone; expected the run directory of a training of "
            "one encoder with retriever.train=query"
        )
    documents = load_encoder(config.retriever, run.document_encoder, config.index.dims)
    if (there := retriever_identity(documents)) != (here := retriever_identity(encoder)):
        raise UserError(
            f"label.tuned_path: the documents of {run.path} are encoded by another encoder than retriever.path "
            f"({there} there, {here} here); expected a run that began with this one"
        )
    return load_encoder(config.retriever, run.retriever, config.index.dims)


def retriever_identity(encoder: Encoder) -> str:
    """Equal ones give equal similarities."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        reading = reading_identity(encoder.pooling, encoder.prompts.query, encoder.prompts.document)
        dims = f":first {encoder.dims}" if encoder.dims else ""
        return f"{weights_sha256(Path(folder))[:16]}:{encoder.similarity}:{encoder.max_tokens}{reading}{dims}"
