"""One thread for small models, which several only slow down; a real LM; and a server that is asked twice."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Protocol

import pytest
import torch

from replug.models.http import connection as server_connection
from replug.models.http.http_lm import HttpLM
from replug.models.http.request_budget import RequestBudget
from replug.models.local.hf_lm import HuggingFaceLM
from tests.support.fault_server import server_spec
from tests.support.real_models import real_lm
from tests.support.tiny_lms import random_lms_need_make_no_sense  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2() -> HuggingFaceLM:
    return HuggingFaceLM(real_lm())


class Opened(Protocol):
    """Opens the LM of a server by keys of `lm`."""

    def __call__(self, server: object, budget: RequestBudget | None = None, **keys: object) -> HttpLM: ...


@pytest.fixture
def opened() -> Iterator[Opened]:
    """LMs that are not probed, and are closed at the test's end."""
    with ExitStack() as lms:

        def open_lm(server: object, budget: RequestBudget | None = None, **keys: object) -> HttpLM:
            spec = server_spec(server.url, **keys)  # type: ignore[attr-defined]
            return lms.enter_context(closing(HttpLM(spec, budget or RequestBudget(None))))

        yield open_lm


@pytest.fixture
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a server twice at the most, and soon."""
    monkeypatch.setattr(server_connection, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(server_connection, "MAX_ATTEMPTS", 2)
