"""The process that takes main texts out of pages: `python -m replug.web.extraction_process`, one page a line.

HTML is a stranger's data. Some of it keeps a parser busy for hours (an element with 100,000 attributes takes lxml more
than five minutes), and a parser is C code. So it is read in a process of its own, that has limits of time and memory,
and that ends with its caller. A line that comes in is JSON `{"html", "today", "seconds"}`; one that goes out is
`{"text", "title", "published"}`. trafilatura is given the text and never a URL, so it fetches nothing.
"""

import json
import logging
import os
import resource
import signal
import sys
from typing import IO, Any

MAX_MEMORY_BYTES = 4 * 2**30  # of addresses
READY = "ready"


def main() -> None:
    from trafilatura import bare_extraction  # a second to import: before the caller is told that we are ready

    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    print(READY, file=answers, flush=True)
    # What a page makes of us is the caller's to count, not the user's to read
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        _answer(json.loads(line), bare_extraction, answers)


def _answer(request: dict[str, Any], bare_extraction: Any, answers: IO[str]) -> None:
    """The alarm ends this process, also within C code, and though the caller is gone.

    It counts this process's own time: a busy machine makes no page fail.
    """
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    found = bare_extraction(
        request["html"],
        include_comments=False,
        with_metadata=True,
        # Only dates that the page's markup gives; the last change, since that is what `before` must hold for.
        date_extraction_params={"original_date": False, "extensive_search": False, "max_date": request["today"]},
    )
    signal.setitimer(signal.ITIMER_PROF, 0)
    texts = ("", "", None) if found is None else (found.text or "", found.title or "", found.date)
    print(json.dumps(dict(zip(("text", "title", "published"), texts, strict=True))), file=answers, flush=True)


if __name__ == "__main__":
    main()
