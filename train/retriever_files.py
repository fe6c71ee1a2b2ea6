"""The tuned retriever in its run directory: one encoder, or that of queries beside that of documents."""

from replug.models.encoder import Encoder
from replug.models.encoder_files import mark_query_side
from replug.train.run_dir import RunDirectory


def save_retriever(run: RunDirectory, encoder: Encoder, documents: Encoder) -> None:
    """`documents` is the encoder of documents, the same one or another that stayed as it was."""
    encoder.save(run.retriever)
    if documents is not encoder and not run.document_encoder.is_dir():
        documents.save(run.document_encoder)
    if run.document_encoder.is_dir():
        mark_query_side(run.retriever)
