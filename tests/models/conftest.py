"""One thread for small models, which several only slow down; LMs; and a server that is asked twice."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from replug.models.http import connection as server_connection
from replug.models.http.http_lm import HttpLM
from replug.models.http.request_budget import RequestBudget
from replug.models.local.hf_lm import HuggingFaceLM
from tests.support.fault_server import server_spec
from tests.support.real_models import real_lm
from tests.support.tiny_lms import (
    random_lms_need_make_no_sense,  # noqa: F401
    write_gpt2,
    write_llama,
    write_with_tokenizer,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[write_llama, write_gpt2], ids=["llama", "gpt2"])
def lm_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_tokenizer(request.param, tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def lm(lm_folder: Path) -> HuggingFaceLM:
    return HuggingFaceLM(str(lm_folder))


@pytest.fixture(scope="session")
def smollm2() -> HuggingFaceLM:
    return HuggingFaceLM(real_lm())


# Opens the LM of a server, within a budget or none, by keys of `lm`.
Opened = Callable[..., HttpLM]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """LMs that are not probed, and are closed at the test's end."""
    with ExitStack() as lms:

        def open_lm(server: object, budget: RequestBudget | None = None, **keys: object) -> HttpLM:
            spec = server_spec(server.url, **keys)  # type: ignore[attr-defined]
            return lms.enter_context(closing(HttpLM(spec, budget or RequestBudget(None))))

        yield open_lm


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "BACKOFF_SECONDS", 0.01)


@pytest.fixture
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "MAX_ATTEMPTS", 2)
