"""The local LM against one pair at a time through the whole model, on tiny random models and on SmolLM2."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from replug.config.errors import RunError, UserError
from replug.models import model_files
from replug.models.local.hf_lm import HuggingFaceLM, HuggingFaceSource
from replug.models.model_files import lm_identity
from tests.support.architectures import write_architecture
from tests.support.tiny_lms import (
    CONTINUATIONS,
    DEMONSTRATIONS,
    MAX_TOKENS,
    PAIRS,
    PREFIXES,
    SEPARATOR,
    naive_logprobs,
    num_tokens,
    write_llama,
)


def assert_equals_naive_loop(lm: HuggingFaceLM) -> None:
    for score, (prefix, continuation) in zip(lm.score(PREFIXES, CONTINUATIONS), PAIRS, strict=True):
        expected = naive_logprobs(lm, prefix, continuation)
        assert score.token_logprobs.dtype == np.float32
        np.testing.assert_allclose(score.token_logprobs, expected, atol=1e-4)
        assert score.sum_logprob == pytest.approx(expected.sum(), abs=1e-3)


def assert_same_scores(lm: HuggingFaceLM, other: HuggingFaceLM) -> None:
    ours, theirs = lm.score(PREFIXES, CONTINUATIONS), other.score(PREFIXES, CONTINUATIONS)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=2e-5)


def test_a_loaded_model_scores_as_its_folder_here_and_in_another_process(lm_folder: Path, lm: HuggingFaceLM) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(lm_folder), AutoTokenizer.from_pretrained(lm_folder)
    loaded = HuggingFaceLM(model, tokenizer)
    assert_same_scores(lm, loaded)
    assert_same_scores(lm, pickle.loads(pickle.dumps(loaded)))
    assert HuggingFaceLM(model, tokenizer).identity == loaded.identity
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    assert HuggingFaceLM(model, tokenizer).identity != loaded.identity
    with pytest.raises(UserError, match="tokenizer is missing"):
        HuggingFaceLM(model)


@pytest.mark.parametrize("tokens_per_batch", [None, 1, 60])
def test_log_probs_equal_a_naive_loop_whatever_the_batch(lm_folder: Path, tokens_per_batch: int | None) -> None:
    assert_equals_naive_loop(HuggingFaceLM(str(lm_folder), tokens_per_batch=tokens_per_batch))


def test_a_model_that_scales_its_logits_is_scored_through_its_whole_forward_pass(tmp_path: Path) -> None:
    write_architecture(tmp_path, "cohere", logit_scale=0.25)
    lm = HuggingFaceLM(str(tmp_path))
    assert lm._head is None
    assert_equals_naive_loop(lm)


def test_the_longest_input_is_scored_and_one_token_more_is_an_error_with_both_lengths(lm: HuggingFaceLM) -> None:
    letters = "qzjxvk"  # no merges: one token a letter
    fits = (letters * 30)[: MAX_TOKENS - 5]
    assert num_tokens(lm, fits) == MAX_TOKENS - 5
    assert lm.score([fits], ["zqzqz"])[0].num_tokens == 5
    with pytest.raises(ValueError, match=rf"input 1 has {MAX_TOKENS - 4} \+ 5 tokens .* holds {MAX_TOKENS}"):
        lm.score(["short", fits + "q"], ["zqzqz", "zqzqz"])


def test_the_identity_follows_the_weights_and_the_dtype(lm_folder: Path, lm: HuggingFaceLM, tmp_path: Path) -> None:
    shutil.copytree(lm_folder, tmp_path, dirs_exist_ok=True)
    assert lm_identity(str(tmp_path), torch.float32) == lm.identity
    assert lm_identity(str(tmp_path), torch.bfloat16) != lm.identity
    changed = load_file(tmp_path / "model.safetensors")
    next(iter(changed.values())).view(-1)[0] += 1e-3
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert lm_identity(str(tmp_path), torch.float32) != lm.identity


def test_a_replica_hashes_nothing(lm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = HuggingFaceSource(str(lm_folder))
    sent = pickle.loads(pickle.dumps(source))
    monkeypatch.setattr(model_files, "_digest", None)
    assert sent.load().identity == sent.identity


@pytest.mark.slow
def test_a_real_lm_equals_a_naive_loop_and_knows_a_fact(smollm2: HuggingFaceLM) -> None:
    question = "The capital of France is"
    pairs = [
        (question, " Paris"),
        (question, " Berlin"),
        (f"Paris lies on the Seine.{SEPARATOR}{question}", " Paris, a city of light"),
        ("", "東京は🗼"),
    ]
    scores = smollm2.score([p for p, _ in pairs], [c for _, c in pairs])
    for score, pair in zip(scores, pairs, strict=True):
        np.testing.assert_allclose(score.token_logprobs, naive_logprobs(smollm2, *pair), atol=1e-4)
    assert scores[0].sum_logprob > scores[1].sum_logprob


# A prefix that all inputs share, passes that memory does not hold, and other ways through the model ----------------


def few_shot_pairs(lm: HuggingFaceLM) -> tuple[list[str], list[str]]:
    assert num_tokens(lm, DEMONSTRATIONS) < MAX_TOKENS - 40
    return [f"{DEMONSTRATIONS}{text}" for text in ("a mat", "x", "the cat slept, and", "日")], [" sat", " on", "!", "x"]


def test_a_prefix_that_inputs_and_calls_share_is_computed_once_and_gives_the_same_bits(lm: HuggingFaceLM) -> None:
    prefixes, continuations = few_shot_pairs(lm)
    shared, spent, scores = num_tokens(lm, DEMONSTRATIONS), [], []
    lm._kept = []
    for _ in range(2):
        before = lm.counts["tokens"]
        scores.append(lm.score(prefixes, continuations))
        spent.append(lm.counts["tokens"] - before)
    assert spent[1] < shared < spent[0] < 2 * shared
    for score, again, prefix, continuation in zip(*scores, prefixes, continuations, strict=True):
        np.testing.assert_allclose(score.token_logprobs, naive_logprobs(lm, prefix, continuation), atol=1e-4)
        np.testing.assert_array_equal(score.token_logprobs, again.token_logprobs)


def test_kept_prefixes_give_way_before_a_pass_is_halved(lm: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, continuations = few_shot_pairs(lm)
    lm.score(prefixes, continuations)
    tried, one_pass = [], lm._one_pass

    def fits_without_kept(inputs, shared):
        tried.append(len(inputs))
        if lm._kept:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return one_pass(inputs, shared)

    monkeypatch.setattr(lm, "_one_pass", fits_without_kept)
    lm.score(prefixes, continuations)
    assert tried == [len(prefixes)] * 2


WAYS_TO_SAY_THAT_MEMORY_IS_SPENT = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", WAYS_TO_SAY_THAT_MEMORY_IS_SPENT, ids=lambda error: str(error)[:30])
def test_passes_that_memory_does_not_hold_are_halved_as_often_as_they_come(
    lm_folder: Path, lm: HuggingFaceLM, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = HuggingFaceLM(str(lm_folder))
    passes = limit_memory(small, monkeypatch, 2, error)
    assert_same_scores(lm, small)
    first = passes.copy()
    assert max(first) > 2
    small.score(PREFIXES[:3], CONTINUATIONS[:3])
    passes.clear()
    assert_same_scores(lm, small)
    assert passes == first  # the halves follow from the pass, whatever came before


def limit_memory(lm: HuggingFaceLM, patch: pytest.MonkeyPatch, most_rows: int, error: RuntimeError) -> list[int]:
    """A pass of more rows than `most_rows` runs out of memory; returns a list of all passes' rows, which fills."""
    passes, one_pass = [], lm._one_pass

    def limited(inputs, shared):
        passes.append(len(inputs))
        if len(inputs) > most_rows:
            raise error
        return one_pass(inputs, shared)

    patch.setattr(lm, "_one_pass", limited)
    return passes


def test_an_input_that_does_not_fit_alone_ends_the_run(lm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = HuggingFaceLM(str(lm_folder))
    limit_memory(small, monkeypatch, 0, WAYS_TO_SAY_THAT_MEMORY_IS_SPENT[0])
    with pytest.raises(RunError, match="out of memory on a single input of"):
        small.score(["the cat"], [" sat"])


@pytest.mark.slow
@pytest.mark.parametrize("lm_folder", [write_llama], indirect=True)
def test_real_exhaustion_of_memory_is_survived(lm_folder: Path) -> None:
    """In a process of its own, which may not grow by more than a few hundred megabytes."""
    done = subprocess.run(
        [sys.executable, "-c", EXHAUST, str(lm_folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ran out of memory at" in done.stderr
    assert "equal" in done.stdout


EXHAUST = """
import re, resource, sys
from unittest import mock
import numpy as np
from replug.config.errors import RunError
from replug.models.local.hf_lm import HuggingFaceLM

mock.patch("replug.models.local.hf_lm.require_sense").start()  # the LM is random

folder = sys.argv[1]
rows = 20_000
prefixes, continuations = [f"the cat {i} sat" for i in range(rows)], [" on the mat"] * rows
lm = HuggingFaceLM(folder, tokens_per_batch=10_000_000)
expected = HuggingFaceLM(folder, tokens_per_batch=2_000).score(prefixes[:200], continuations[:200])
used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
scores = lm.score(prefixes, continuations)
for a, b in zip(scores, expected):
    np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4)
print("equal")
"""


LETTERS = ["x", "z", "q", "j"]  # each one token


def choices(prefixes: list[str]) -> tuple[list[str], list[str]]:
    """Every letter after every prefix, a letter at a time, with longer continuations among them."""
    rows = [(prefix, letter) for letter in LETTERS for prefix in prefixes] + [(prefixes[0], " the cat sat")]
    return [prefix for prefix, _ in rows], [continuation for _, continuation in rows]


@pytest.mark.parametrize("shots", ["", DEMONSTRATIONS], ids=["alone", "after shared demonstrations"])
def test_choices_are_read_from_one_pass_over_their_prefix(lm: HuggingFaceLM, shots: str) -> None:
    prefixes = [f"{shots}{text}" for text in ("the cat sat on the mat", "x", "日本語の文書")]
    before, before_padded = lm.counts["tokens"], lm.counts["padded_tokens"]
    scores = lm.score(*choices(prefixes))
    lengths = [num_tokens(lm, prefix) for prefix in prefixes]
    longer = lengths[0] + num_tokens(lm, " the cat sat")
    if shots:
        assert lm.counts["tokens"] - before < 2 * num_tokens(lm, shots)
    else:
        assert lm.counts["tokens"] - before == sum(lengths) + longer
        assert lm.counts["padded_tokens"] - before_padded == 4 * max(*lengths, longer)
    for score, prefix, continuation in zip(scores, *choices(prefixes), strict=True):
        np.testing.assert_allclose(score.token_logprobs, naive_logprobs(lm, prefix, continuation), atol=1e-4)
