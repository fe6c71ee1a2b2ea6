"""What becomes of batches ahead when a search or the LM fails: what is known is kept, what is not is done again."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from replug.config.errors import Interrupted, RunError
from replug.data.shards import write_examples
from replug.data.store import ExampleStore
from replug.index_workers.build_plan import IndexState
from tests.support.training import InlineLM, exact_search, pipeline_for

LIVE = IndexState(0, 0)


class Searches:
    """Exact search, but the call of the number that fails, and how often it was asked."""

    def __init__(self, module, data, fails: int) -> None:
        self._search, self._fails, self.calls = exact_search(module, data), fails, 0

    def __call__(self, *given):
        self.calls += 1
        if self.calls == self._fails:
            raise RunError("the index's searchers do not answer")
        return self._search(*given)


class SilentLM(InlineLM):
    """Its answers to a call after the first are errors."""

    _calls = 0

    def submit_sums(self, prefixes, continuations):
        self._calls += 1
        if self._calls == 1:
            return super().submit_sums(prefixes, continuations)
        failed: Future = Future()
        failed.set_exception(RunError("the LM is gone"))
        return failed


def test_a_checkpoint_holds_the_batches_beside_the_one_whose_search_failed(module, data, capsys):
    pipeline = pipeline_for(module, data, InlineLM(), depth=1, steps=9, search=Searches(module, data, fails=3))
    pipeline.advance(0, LIVE)
    pipeline.advance(1, LIVE)
    kept = pipeline.state()
    assert [batch.step for batch in kept] == [0, 1]
    said = "step 2: its search failed, a resumed run searches again with newer weights: the index's searchers do not"
    assert said in capsys.readouterr().err
    with pytest.raises(RunError, match="the index's searchers do not answer"):
        pipeline.take(2)


def test_a_resumed_run_searches_again_and_the_batch_says_with_which_weights(module, data):
    pipeline = pipeline_for(module, data, InlineLM(), depth=2, steps=9, search=Searches(module, data, fails=3))
    pipeline.advance(0, LIVE)
    resumed = pipeline_for(module, data, InlineLM(), depth=2, steps=9)
    resumed.restore(pipeline.state())
    resumed.advance(1, LIVE)
    assert [(batch.step, batch.query_step) for batch in resumed.state()] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert resumed.take(2).retrieved.query_step == 1


def test_documents_are_found_by_the_query_and_the_lm_reads_the_context(module, data, tmp_path):
    asked = [replace(example, query=f"red boat {number}") for number, example in enumerate(data.queries.examples())]
    write_examples(tmp_path / "asked.arrow", asked, ["query"])
    data.queries = ExampleStore(tmp_path / "asked.arrow")
    encoded, read, encode = [], [], module.encoder.encode_query
    module.encoder.encode_query = lambda texts, **keys: (encoded.extend(texts), encode(texts, **keys))[1]
    lm = InlineLM()
    lm.submit_sums = lambda prefixes, _: (read.extend(prefixes), InlineLM.submit_sums(lm, prefixes, _))[1]
    pipeline = pipeline_for(module, data, lm)
    pipeline.advance(0, LIVE)
    examples = [asked[row] for row in pipeline.take(0).retrieved.query_rows]
    assert encoded == [example.query for example in examples]
    contexts = [example.context for example in examples for _ in range(5)]
    assert all(prefix.endswith(f"\n{context}") for prefix, context in zip(read, contexts, strict=True))


def test_a_switch_waits_for_the_search_under_way(module, data):
    search, begin = exact_search(module, data), threading.Event()

    def late(*given):
        assert begin.wait(100)
        return search(*given)

    with ThreadPoolExecutor(1) as executor:
        pipeline = pipeline_for(module, data, InlineLM(), search=late, executor=executor)
        pipeline.advance(0, LIVE)
        settled = ThreadPoolExecutor(1).submit(pipeline.settle)
        assert not settled.done()
        begin.set()
        settled.result(100)
        assert len(pipeline.state()) == 1


def test_a_search_that_hangs_does_not_hold_up_a_run_that_is_to_end(module, data, capsys, monkeypatch):
    monkeypatch.setattr("replug.train.pipeline.SEARCH_SECONDS_AT_THE_END", 0.3)
    search, end = exact_search(module, data), threading.Event()
    calls = iter(range(9))

    def hangs(*given):
        if next(calls) == 1:
            end.wait(100)
        return search(*given)

    def interrupted():
        raise Interrupted("interrupted by SIGTERM")

    with ThreadPoolExecutor(1) as executor:
        pipeline = pipeline_for(module, data, InlineLM(), depth=1, search=hangs, executor=executor)
        pipeline.advance(0, LIVE)
        pipeline._check_run = interrupted
        with pytest.raises(Interrupted):
            pipeline.settle()
        begun = time.monotonic()
        assert [batch.step for batch in pipeline.state()] == [0]
        assert time.monotonic() - begun < 50
        end.set()
    assert "step 1: its search failed, a resumed run searches again with newer weights" in capsys.readouterr().err


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
