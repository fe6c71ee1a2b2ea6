"""The overlap of an evaluation with its corpus, measured once and kept: the whole corpus is read for it.

found/overlaps.jsonl   what was found, as JSON; of other texts or documents it is measured again
leakage.json           the same of the examples that results are of
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from replug.config.evaluation_schema import EvaluationConfig
from replug.data.files import read_json, write_json
from replug.data.progress import Progress
from replug.data.records import Document
from replug.data.store import Corpus
from replug.evals.leakage import ComparedTexts, Overlaps, find_overlaps, overlap_counts
from replug.evals.loop import ComparedTask, Measured

DOCUMENTS_PER_STEP = 1024


def overlaps_with(config: EvaluationConfig, corpus: Corpus, task: Measured, path: Path) -> Overlaps:
    """Of every example of a task, as the file has it where it is of the same texts and documents."""
    examples = compared_examples(task)
    digest = _digest(examples, corpus.corpus_sha256, config.exclude_own_source)
    kept = read_json(path, "remove it") if path.is_file() else None
    if kept is not None and kept.pop("digest", None) == digest:
        return Overlaps(**kept)
    progress = Progress("comparing with the corpus", len(corpus.corpus))
    found = find_overlaps(examples, _advancing(corpus, progress), config.exclude_own_source)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"digest": digest, **asdict(found)})
    return found


def compared_examples(task: Measured) -> list[ComparedTexts]:
    """What the task says of each example, or what is retrieved for."""
    says = task.compared if isinstance(task, ComparedTask) else lambda row: (task.examples[row].query,)
    return [ComparedTexts(example.id, says(row), example.source) for row, example in enumerate(task.examples)]


def write_leakage(path: Path, overlaps: Overlaps, ids: Sequence[str]) -> None:
    """Of the examples that results are of: their share in the corpus, how many for each reason, and which."""
    own = {identifier: overlaps.reasons[identifier] for identifier in ids if identifier in overlaps.reasons}
    said = {name: value for name, value in asdict(overlaps).items() if name not in ("reasons", "num_examples")}
    counts = overlap_counts(overlaps, ids)
    write_json(path, {"n": len(ids), "share": len(own) / len(ids), "by": counts, **said, "examples": own})


def _advancing(corpus: Corpus, progress: Progress) -> Iterator[Document]:
    for number, document in enumerate(corpus.corpus.iterate(), start=1):
        yield document
        if number % DOCUMENTS_PER_STEP == 0:
            progress.advance(DOCUMENTS_PER_STEP)


def _digest(examples: Sequence[ComparedTexts], corpus_sha256: str, excludes_own: bool) -> str:
    compared = [[example.id, example.texts, example.source] for example in examples]
    return hashlib.sha256(json.dumps([compared, corpus_sha256, excludes_own]).encode()).hexdigest()
