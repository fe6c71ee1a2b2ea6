"""The tuned retriever as a folder: one encoder, or a pair where queries or documents have their own."""

import copy
from pathlib import Path

from replug.config.choices import TrainedSide
from replug.models.encoder import Encoder
from replug.models.encoder_files import QUERY_FOLDER, mark_query_side
from replug.models.lora import keep_adapter


def save_retriever(
    folder: Path, encoder: Encoder, side: TrainedSide, documents: Encoder | None = None, source: Path | None = None
) -> None:
    """`documents` encodes documents, as it was, where one encoder had both sides and its queries alone were tuned.

    `source` is the folder that `encoder` was read from, whose adapters are kept. Queries tuned alone are marked: an
    index that was made before holds the documents' vectors as they are, and they search it.
    """
    (encoder if documents is None else _pair(documents, encoder)).save(folder)
    if source is not None:
        keep_adapter(source, folder if documents is None else folder / QUERY_FOLDER)
    if side is TrainedSide.query:
        mark_query_side(folder)


def _pair(documents: Encoder, queries: Encoder) -> Encoder:
    """A copy, with the temperature that was fitted to the queries."""
    pair = copy.deepcopy(documents).cpu()
    pair.pair_with(queries)
    pair.temperature = queries.temperature
    return pair
