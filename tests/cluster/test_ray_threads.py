"""Who calls Ray is waited for before it ends, but not for ever."""

import threading
import time

from replug.cluster.background import start_ray_thread, wait_for_ray_threads


def test_threads_that_end_are_waited_for_and_one_that_hangs_is_left_behind() -> None:
    ended, never = threading.Event(), threading.Event()
    start_ray_thread(lambda: (time.sleep(0.2), ended.set()), name="ends")
    wait_for_ray_threads(10)
    assert ended.is_set()
    start_ray_thread(never.wait, name="hangs")
    begun = time.monotonic()
    wait_for_ray_threads(0.2)
    assert 0.15 < time.monotonic() - begun < 5
    never.set()
