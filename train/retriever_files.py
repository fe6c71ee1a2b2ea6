"""The tuned retriever in its run directory: one encoder, or that of queries beside that of documents."""

from replug.models.encoder import Encoder
from replug.models.encoder_files import mark_query_side
from replug.train.run_dir import RunDirectory


def save_retriever(run: RunDirectory, encoder: Encoder, documents: Encoder | None) -> None:
    """`documents` is the encoder of documents where these stayed as they were."""
    encoder.save(run.retriever)
    if documents is not None:
        documents.cpu().save(run.document_encoder)
        mark_query_side(run.retriever)
