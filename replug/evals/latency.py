"""How long a question takes, retriever and LM together: asked one at a time, without a cache.

The loop keeps several questions in flight, and answers from the cache, so its clock says nothing of a single question.
"""

import time
from collections.abc import Callable, Mapping

from replug.config.methods import GENREAD, Method
from replug.data.progress import Progress
from replug.evals.evidence import EvidenceBook
from replug.evals.genread import write_document
from replug.evals.kinds import EvalDataset, PromptedLM
from replug.evals.loop import Metric
from replug.evals.outcomes import OutcomeFile, Row

SECONDS = Metric("seconds")
Search = Callable[[str, int], object]  # for the k nearest documents of a text


class LatencyPass:
    """Asks the first questions again, each method in turn; `lm.lm` is to be an LM without a cache.

    The documents that are read are those of the evaluation; searching for them again is what is timed. Each method's
    first question is asked once before, untimed: what begins all prompts is computed then, and never again.
    """

    def __init__(
        self, dataset: EvalDataset, lm: PromptedLM, book: EvidenceBook, searches: Mapping[str, Search]
    ) -> None:
        self._dataset, self._lm, self._book, self._searches = dataset, lm, book, searches
        self._task = dataset.make_task(lm, book)

    def run(self, file: OutcomeFile, num_questions: int) -> list[Row]:
        """Rows of the first questions; those that the file does not hold yet are measured."""
        asked = [example.id for example in self._task.examples[:num_questions]]
        known = file.by("id", {example.id for example in self._task.examples})
        progress = Progress("latency", len(asked), sum(name in known for name in asked))
        if not known.keys() >= set(asked):
            self._measure(0)
        for row, name in enumerate(asked):
            if name not in known:
                known[name] = self._measure(row)
                file.append(known[name])
                progress.advance()
        return [known[name] for name in asked]

    def _measure(self, row: int) -> Row:
        example = self._task.examples[row]
        timed = {method.name: {"numbers": self._time(method, row), "detail": {}} for method in self._book.methods}
        return {"id": example.id, "group": example.group, "methods": timed}

    def _time(self, method: Method, row: int) -> dict[str, float]:
        """Seconds until the documents are there, and until the answer is."""
        evidence = {method.name: self._book.of(row)[method.name]}
        begin = time.perf_counter()
        self._find(method, row)
        found = time.perf_counter()
        self._task.submit(row, evidence)()
        return {"seconds": time.perf_counter() - begin, "evidence_seconds": found - begin}

    def _find(self, method: Method, row: int) -> None:
        query = self._dataset.queries[row]
        if method.source in self._searches and query.strip():
            self._searches[method.source](query, method.k)
        if method.source == GENREAD:
            write_document(self._lm, self._dataset.questions[row])
