"""The queries that an earlier training tuned, whose nearest documents are candidates too (`label.tuned`)."""

import tempfile
from pathlib import Path

from torch import Tensor

from replug.config.errors import UserError
from replug.config.schema import Config
from replug.index_workers.build_plan import reading_identity
from replug.index_workers.version_store import weights_sha256
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.encoder_files import is_query_side, query_encoder_in
from replug.train.run_dir import RunDirectory


def load_tuned_queries(config: Config, encoder: Encoder) -> Encoder | None:
    """A pair whose queries search the index of `encoder`; None where none are asked for.

    Raises UserError for a run whose documents are encoded by another encoder.
    """
    if config.label.tuned_path is None:
        return None
    run = RunDirectory(Path(config.label.tuned_path).expanduser())
    if not is_query_side(str(run.retriever)) or query_encoder_in(str(run.retriever)) is None:
        raise UserError(
            f"label.tuned_path: {run.path} holds no queries tuned alone; expected the run directory of a training with "
            "retriever.train=query"
        )
    tuned = load_encoder(config.retriever, run.retriever, config.index.dims)
    if not _encode_documents_alike(tuned, encoder):
        raise UserError(
            f"label.tuned_path: the documents of {run.path} are encoded by another encoder than retriever.path; "
            "expected a run that began with this one"
        )
    return tuned


def retriever_identity(encoder: Encoder) -> str:
    """Equal ones give equal similarities."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        reading = reading_identity(encoder.pooling, encoder.prompts.query, encoder.prompts.document)
        dims = f":first {encoder.dims}" if encoder.dims else ""
        return f"{weights_sha256(Path(folder))[:16]}:{encoder.similarity}:{encoder.max_tokens}{reading}{dims}"


def _encode_documents_alike(one: Encoder, other: Encoder) -> bool:
    """To the last bit, and compared alike."""
    if _reading(one) != _reading(other):
        return False
    weights, others = _weights(one), _weights(other)
    return weights.keys() == others.keys() and all(weights[name].equal(others[name]) for name in weights)


def _reading(encoder: Encoder) -> tuple[object, ...]:
    pooling = encoder.head.describe(implied=encoder.similarity == "cosine")
    return pooling, encoder.similarity, encoder.prompts.document, encoder.max_tokens, encoder.dims


def _weights(encoder: Encoder) -> dict[str, Tensor]:
    """Of the documents' encoder alone."""
    parts = (encoder.backbone, encoder.head)
    return {f"{place}.{name}": value for place, part in enumerate(parts) for name, value in part.state_dict().items()}
