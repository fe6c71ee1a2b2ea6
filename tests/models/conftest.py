"""One thread for small models, which several only slow down; a real LM; and a server that is asked twice."""

from collections.abc import Iterator

import pytest
import torch

from replug.models.http import connection as server_connection
from replug.models.local.hf_lm import HuggingFaceLM
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


@pytest.fixture
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a server twice at the most, and soon."""
    monkeypatch.setattr(server_connection, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(server_connection, "MAX_ATTEMPTS", 2)
