"""Processes that tests start to kill them: forked from one that has imported what they need, so each starts at once.

Never from the test process, which has threads. It has one such server, which the first of them starts; so what any of
them needs is listed here.
"""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pytest", "tests.support.preparing"])
