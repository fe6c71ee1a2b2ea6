"""Batches of labelled texts: what the online loop's pipeline delivers, read from the labels."""

from dataclasses import dataclass

from replug.data.labels import LabelledTexts
from replug.data.records import RetrievedBatch, ScoredBatch
from replug.data.sampler import QuerySampler

NO_INDEX = -1


@dataclass(frozen=True, slots=True)
class LabelledBatches:
    """A `BatchSource`. Which texts make up a step follows from its number, as in the online loop.

    The documents' similarities are those to the retriever as it was when the texts were labelled.
    """

    texts: LabelledTexts
    sampler: QuerySampler

    def take(self, step: int) -> ScoredBatch:
        """The batch of a step."""
        rows, texts = self.sampler.rows(step), self.texts
        found = RetrievedBatch(step, step, NO_INDEX, 0, rows, texts.doc_rows[rows], texts.similarities[rows])
        return ScoredBatch(found, texts.sum_logprobs[rows], texts.num_tokens[rows])
