"""Batches ahead where a search or the LM fails: results are kept, and the rest is done again."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from replug.config.errors import Interrupted, RunError
from replug.data.records import SearchResult
from replug.data.shards import write_examples
from replug.data.store import ExampleStore
from replug.index_workers.build_plan import IndexState
from tests.support.training import InlineLM, exact_search, pipeline_for

LIVE = IndexState(0, 0)


def failing_search(module, data, at: int) -> Callable[..., SearchResult]:
    """Exact search, whose call of this number fails."""
    search, calls = exact_search(module, data), itertools.count(1)

    def fails(*given):
        if next(calls) == at:
            raise RunError("the index's searchers do not answer")
        return search(*given)

    return fails


class SilentLM(InlineLM):
    """Answers the first call; the others fail."""

    _calls = 0

    def submit_sums(self, prefixes, continuations):
        self._calls += 1
        if self._calls == 1:
            return super().submit_sums(prefixes, continuations)
        failed: Future = Future()
        failed.set_exception(RunError("the LM is gone"))
        return failed


def test_a_checkpoint_leaves_out_a_failed_search_and_a_resumed_run_searches_again(module, data, capsys):
    pipeline = pipeline_for(module, data, InlineLM(), depth=2, steps=9, search=failing_search(module, data, at=3))
    pipeline.advance(0, LIVE)
    assert [batch.step for batch in pipeline.state()] == [0, 1]
    warning = "step 2: its search failed, a resumed run searches again with newer weights: the index's searchers do not"
    assert warning in capsys.readouterr().err
    with pytest.raises(RunError, match="the index's searchers do not answer"):
        pipeline.take(2)
    resumed = pipeline_for(module, data, InlineLM(), depth=2, steps=3)
    resumed.restore(pipeline.state())
    resumed.advance(1, LIVE)
    steps = [(batch.step, batch.query_step) for batch in resumed.state()]
    assert steps == [(0, 0), (1, 0), (2, 1)], "nothing beyond the last step"
    assert resumed.take(2).retrieved.query_step == 1


def test_the_query_retrieves_documents_and_the_lm_reads_the_context(module, data, tmp_path):
    rows = [replace(example, query=f"red boat {number}") for number, example in enumerate(data.queries.examples())]
    write_examples(tmp_path / "own.arrow", rows, ["query"])
    data.queries = ExampleStore(tmp_path / "own.arrow")
    encoded, read, encode = [], [], module.encoder.encode_query
    module.encoder.encode_query = lambda texts, **keys: (encoded.extend(texts), encode(texts, **keys))[1]
    lm = InlineLM()
    lm.submit_sums = lambda prefixes, _: (read.extend(prefixes), InlineLM.submit_sums(lm, prefixes, _))[1]
    pipeline = pipeline_for(module, data, lm)
    pipeline.advance(0, LIVE)
    examples = [rows[row] for row in pipeline.take(0).retrieved.query_rows]
    assert encoded == [example.query for example in examples]
    contexts = [example.context for example in examples for _ in range(5)]
    assert all(prefix.endswith(f"\n{context}") for prefix, context in zip(read, contexts, strict=True))


def test_a_switch_waits_for_the_search_under_way_unless_the_run_is_to_end(module, data, capsys, monkeypatch):
    monkeypatch.setattr("replug.train.pipeline.SEARCH_SECONDS_AT_THE_END", 0.3)
    search, begin, calls = exact_search(module, data), threading.Event(), itertools.count()

    def late(*given):
        assert next(calls) == 0 or begin.wait(100)
        return search(*given)

    def interrupted():
        raise Interrupted("interrupted by SIGTERM")

    with ThreadPoolExecutor(1) as executor:
        pipeline = pipeline_for(module, data, InlineLM(), depth=1, search=late, executor=executor)
        pipeline.advance(0, LIVE)
        settled = ThreadPoolExecutor(1).submit(pipeline.settle)
        assert not settled.done()
        pipeline._check_run = interrupted
        with pytest.raises(Interrupted):
            settled.result(100)
        began = time.monotonic()
        assert [batch.step for batch in pipeline.state()] == [0] and time.monotonic() - began < 50
        assert "step 1: its search failed, a resumed run searches again" in capsys.readouterr().err
        begin.set()
        pipeline._check_run = lambda: None
        pipeline.settle()
        assert len(pipeline.state()) == 2


def test_documents_that_the_lm_failed_on_are_kept(module, data):
    pipeline = pipeline_for(module, data, SilentLM(), depth=1)
    pipeline.advance(0, LIVE)
    assert [batch.step for batch in pipeline.state()] == [0, 1]
    pipeline.take(0)
    with pytest.raises(RunError, match="the LM is gone"):
        pipeline.take(1)
    kept = pipeline.state()
    resumed = pipeline_for(module, data, InlineLM(), depth=1)
    resumed.restore(kept)
    np.testing.assert_array_equal(resumed.take(1).retrieved.doc_rows, kept[0].doc_rows)
