"""The tuned retriever in its run directory: one encoder, a pair, or that of queries beside that of documents."""

from replug.configs.choices import TrainedSide
from replug.models.encoder import Encoder
from replug.models.encoder_files import mark_query_side
from replug.train.run_dir import RunDirectory


def save_retriever(run: RunDirectory, encoder: Encoder, documents: Encoder | None, side: TrainedSide) -> None:
    """`documents` is the encoder of documents where these stayed as they were and are no pair's.

    Queries tuned alone are marked: the index of the run stays that of its beginning, which they search.
    """
    encoder.save(run.retriever)
    if documents is not None:
        documents.cpu().save(run.document_encoder)
    if side is TrainedSide.query:
        mark_query_side(run.retriever)
