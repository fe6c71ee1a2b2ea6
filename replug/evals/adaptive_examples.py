"""Show questions that retrieval harms and helps, with their documents (Mallen et al. 2023, tables 3 and 4)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from replug.config.errors import UserError
from replug.config.methods import GENREAD
from replug.data.answers import answer_spans
from replug.data.rows import one_line
from replug.evals.adaptive import AnsweredQuestions, MethodOutcomes, Pair, documents_of
from replug.evals.outcomes import OutcomeFile
from replug.evals.tables import Block, Marked, Table

NUM_SHOWN = 4  # of each group, spread over the relations
NUM_REFERENCES = 3
EXCERPT = 400  # characters of a document
COLUMNS = ["id", "method", "question", "references", "answer", "documents"]


def example_blocks(answered: AnsweredQuestions, pair: Pair) -> list[Block]:
    """Return a table of questions that only the first method answers right, and one of the second's."""
    right = answered.right(pair)
    blocks: list[Block] = []
    for winner, verb in ((0, "harms"), (1, "helps")):
        rows = np.flatnonzero((right[winner] == 1) & (right[1 - winner] == 0))
        if not len(rows):
            continue
        places = np.linspace(0, len(rows) - 1, min(NUM_SHOWN, len(rows))).round().astype(int)
        ids = [answered.ids[row] for row in rows[places].tolist()]
        said = f"{pair[1]} {verb} {len(rows)} questions, which only {pair[winner]} answers right; {len(ids)} of them:"
        try:
            blocks += [said, _table(answered, pair, ids)]
        except UserError as error:
            return [f"No question that {pair[1]} helps or harms is shown: {error}"]
    return blocks


def _table(answered: AnsweredQuestions, pair: Pair, ids: Sequence[str]) -> Table:
    closed, augmented = (_examples(answered.methods[name], name, ids) for name in pair)
    read = _documents(answered.methods[pair[1]], pair[1], [augmented[name] for name in ids])
    rows = []
    for name, document in zip(ids, read, strict=True):
        example = augmented[name]
        references = "; ".join(example["references"][:NUM_REFERENCES])
        asked = f"{one_line(example['question'])} ({references})"
        excerpt = _excerpt(one_line(document), example["references"])
        rows.append([asked, closed[name]["answer"], example["answer"], excerpt])
    return Table(["question (answers)", *pair, "first document; answers are marked"], rows)


def _examples(method: MethodOutcomes, name: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    path = method.folder.examples
    if not path.is_file():
        raise UserError(f"{path} is missing; run the evaluation again")
    found = pq.read_table(path, columns=COLUMNS, filters=[("id", "in", list(ids)), ("method", "=", name)])
    return {row["id"]: row for row in found.to_pylist()}


def _documents(method: MethodOutcomes, name: str, examples: Sequence[dict[str, Any]]) -> list[str]:
    """Return the first document of each example."""
    if name.partition("@")[0] == GENREAD:
        written = {row["question"]: row["text"] or "" for row in OutcomeFile(method.folder.written).rows}
        return [written[example["question"]] for example in examples]
    corpus = documents_of(method.config, method.folder).corpus
    first = [example["documents"][0] for example in examples]
    rows = corpus.rows_of(first)
    return corpus.texts([rows[name] for name in first])


def _excerpt(document: str, references: Sequence[str]) -> Marked:
    """Return the part of a document round the first answer that it holds, or its beginning."""
    spans = answer_spans(document, references)
    start = max(0, min(spans[0][0] - EXCERPT // 2, len(document) - EXCERPT)) if spans else 0
    text = document[start : start + EXCERPT]
    before, after = "…" * (start > 0), "…" * (start + EXCERPT < len(document))
    moved = [(low - start + len(before), high - start + len(before)) for low, high in spans if start <= low]
    return Marked(f"{before}{text}{after}", [span for span in moved if span[1] <= len(before) + len(text)])
