"""Requests that wait together are one call; none changes another's result, and who leaves frees their place."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from replug.serving.batching import BatchQueue, Metrics


class Calls:
    """Doubles numbers, and keeps what was computed together; 13 cannot be doubled."""

    def __init__(self) -> None:
        self.made: list[tuple[str, list[int]]] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def run(self, key: str, items: Sequence[int]) -> list[int]:
        self.made.append((key, list(items)))
        self.may_end.wait(10)
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]


def with_queue(test, max_size: int = 4):
    """Run `test(queue, calls, metrics)` on a loop."""

    async def run():
        calls, metrics = Calls(), Metrics()
        with ThreadPoolExecutor(1) as thread:
            queue = BatchQueue("q", calls.run, max_size, thread, metrics)
            try:
                return await test(queue, calls, metrics)
            finally:
                calls.may_end.set()
                await queue.close()

    return asyncio.run(run())


def test_what_waits_with_the_same_key_is_one_call_in_its_order() -> None:
    async def test(queue, calls, metrics):
        asked = [queue.submit(key, item) for key, item in (("a", 1), ("b", 2), ("a", 3), ("a", 4))]
        assert await asyncio.gather(*asked) == [2, 4, 6, 8]
        assert calls.made == [("a", [1, 3, 4]), ("b", [2])]
        assert 'replug_batch_size_sum{queue="q"} 4.0' in metrics.text().decode()

    with_queue(test)


def test_one_that_cannot_be_computed_spoils_no_other() -> None:
    async def test(queue, calls, metrics):
        found = await asyncio.gather(*[queue.submit("a", item) for item in (1, 13, 3)], return_exceptions=True)
        assert (found[0], str(found[1]), found[2]) == (2, "13", 6)

    with_queue(test)


def test_who_leaves_is_taken_out_and_its_result_dropped() -> None:
    async def test(queue, calls, metrics):
        calls.may_end.clear()
        running = asyncio.create_task(queue.submit("a", 1))
        while not calls.made:
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(queue.submit("a", item)) for item in (2, 3)]
        await asyncio.sleep(0.01)
        assert 'replug_queue_length{queue="q"} 2.0' in metrics.text().decode()
        running.cancel()
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert 'replug_queue_length{queue="q"} 1.0' in metrics.text().decode()
        calls.may_end.set()
        assert await waiting[1] == 6
        assert calls.made == [("a", [1]), ("a", [3])]

    with_queue(test)
