"""Requests that wait together are one call; none changes another's result, and who leaves frees their place."""

import asyncio
import threading
from collections.abc import Sequence

from replug.serving.service import BatchQueue


class Panic(BaseException):
    """A panic from a tokenizer's Rust code, which is no Exception."""


class Calls:
    """Multiplies numbers, and keeps what was computed together; 13 cannot be multiplied, nor can 17."""

    def __init__(self) -> None:
        self.made: list[tuple[int, list[int]]] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def multiply(self, factor: int, items: Sequence[int]) -> list[int]:
        self.made.append((factor, list(items)))
        self.may_end.wait(100)
        if 13 in items:
            raise ValueError("13")
        if 17 in items:
            raise Panic("17")
        return [factor * item for item in items]


def with_queue(test):
    """Run `test(submit, calls)` on a loop; `submit(factor, item)` asks for a product."""

    async def run():
        calls = Calls()
        queue = BatchQueue("q", 4)
        try:
            return await test(lambda factor, item: queue.submit((calls.multiply, factor), item), calls)
        finally:
            calls.may_end.set()

    return asyncio.run(run())


def test_what_waits_for_the_same_work_is_one_call_in_its_order_up_to_the_largest_size() -> None:
    async def test(submit, calls):
        asked = [submit(factor, item) for factor, item in ((2, 1), (3, 2), (2, 3), (2, 4), (2, 5), (2, 6))]
        assert await asyncio.gather(*asked) == [2, 6, 6, 8, 10, 12]
        assert calls.made == [(2, [1, 3, 4, 5]), (3, [2]), (2, [6])]

    with_queue(test)


def test_one_that_cannot_be_computed_spoils_no_other_and_ends_no_queue() -> None:
    async def test(submit, calls):
        found = await asyncio.gather(*[submit(2, item) for item in (1, 17, 3, 13)], return_exceptions=True)
        assert (found[0], str(found[1]), found[2], str(found[3])) == (2, "Panic: 17", 6, "13")
        assert await submit(2, 4) == 8

    with_queue(test)


def test_a_cancelled_request_leaves_the_queue_and_its_result_is_dropped() -> None:
    async def test(submit, calls):
        calls.may_end.clear()
        running = asyncio.create_task(submit(2, 1))
        while not calls.made:
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(submit(2, item)) for item in (2, 3)]
        await asyncio.sleep(0.01)
        running.cancel()
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        calls.may_end.set()
        assert await waiting[1] == 6
        assert calls.made == [(2, [1]), (2, [3])]

    with_queue(test)
