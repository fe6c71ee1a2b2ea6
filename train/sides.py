"""Which side of the retriever is trained: queries, documents or both, of a pair or of one encoder that has both."""

import copy

from replug.config.choices import TrainedSide
from replug.models.encoder import Encoder


def freeze_sides(side: TrainedSide, encoder: Encoder) -> Encoder | None:
    """Freeze what is not trained of a pair; with documents alone an encoder is one.

    Returns what encodes documents where one encoder has both sides and these stay as they are, else None.
    """
    if side is TrainedSide.documents:
        encoder.freeze_queries()
    if side is not TrainedSide.query:
        return None
    if encoder.own_queries is None:
        return copy.deepcopy(encoder).requires_grad_(False).eval()
    encoder.freeze_documents()
    return None
