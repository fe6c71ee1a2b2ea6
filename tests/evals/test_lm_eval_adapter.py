"""lm-evaluation-harness over our LMs; its own Hugging Face model is the reference."""

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'replug[lm-eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from replug.evals.lm_eval_adapter import HarnessModel
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.replug_lm import ReplugLM, Retrieved
from tests.support.tiny_lms import random_lms_need_make_no_sense, write_gpt2, write_tokenizer  # noqa: F401

PAIRS = [
    ("The capital of France is", " Paris"),
    ("one two three", " four five six"),
    ("def add(a, b):\n    return", " a + b"),
    ("", "A text that nothing stands before"),
]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=row) for row, args in enumerate(arguments)]


class Fixed:
    """Always finds the same document."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def retrieve(self, queries, k):
        return [[Retrieved(text, 0.0, str(row)) for row, text in enumerate(self.texts)][:k] for _ in queries]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLM:
    folder = tmp_path_factory.mktemp("lm")
    torch.manual_seed(0)
    write_gpt2(folder)
    write_tokenizer(folder)
    return HuggingFaceLM(str(folder))


@pytest.fixture(scope="module")
def reference(lm) -> HFLM:
    return HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=1, device="cpu")


def test_log_probabilities_are_those_of_the_harness(lm, reference):
    found = HarnessModel(lm).loglikelihood(requests("loglikelihood", PAIRS))
    expected = reference.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-3)


def test_greedy_continuations_are_told_from_others(lm, reference):
    [written] = lm.generate([PAIRS[0][0]], 3)
    found = HarnessModel(lm, greedy=True).loglikelihood(requests("loglikelihood", [*PAIRS[:2], (PAIRS[0][0], written)]))
    expected = reference.loglikelihood(requests("loglikelihood", PAIRS[:2]), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [*(bool(greedy) for _, greedy in expected), True]
    assert not HarnessModel(lm).loglikelihood(requests("loglikelihood", [(PAIRS[0][0], written)]))[0][1], "not asked"


def test_whole_texts_are_scored_from_their_first_token(lm, reference):
    texts = [("A text of some words.",), ("Another one",)]
    found = HarnessModel(lm).loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    expected = reference.loglikelihood_rolling(requests("loglikelihood_rolling", texts), disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-3)


def test_answers_end_before_the_first_stop(lm):
    model, [whole] = HarnessModel(lm), lm.generate(["one two"], 12)
    stop = whole[3:5]
    how = {"until": [stop, "never there"], "max_gen_toks": 12}
    assert model.generate_until(requests("generate_until", [("one two", how)])) == [whole.split(stop)[0]]
    with pytest.raises(ValueError, match="expected greedy"):
        model.generate_until(requests("generate_until", [("one two", {"do_sample": True})]))


def test_an_ensemble_answers_the_harness_as_the_library_does(lm):
    replug = ReplugLM(lm, Fixed("France is a country.", "Paris is a city."), k=2)
    [(total, _)] = HarnessModel(replug).loglikelihood(requests("loglikelihood", PAIRS[:1]))
    assert total == pytest.approx(replug.score([PAIRS[0][0]], [PAIRS[0][1]])[0].sum_logprob)
    assert total != pytest.approx(lm.score([PAIRS[0][0]], [PAIRS[0][1]])[0].sum_logprob)
