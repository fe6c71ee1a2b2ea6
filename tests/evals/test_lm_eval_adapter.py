"""lm-evaluation-harness over our LMs; its own Hugging Face model is the reference."""

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'replug[lm-eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from replug.evals.lm_eval_adapter import HarnessModel
from replug.models.ensemble import Retrieved
from replug.models.generation import GenerationOptions
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.replug_lm import ReplugLM
from tests.support.lm_answers import texts_of
from tests.support.tiny_lms import load, random_lms_need_make_no_sense, write_gpt2  # noqa: F401

PAIRS = [
    ("The capital of France is", " Paris"),
    ("one two three", " four five six"),
    ("def add(a, b):\n    return", " a + b"),
    ("", "A text that nothing stands before"),
]


def requests(kind: str, arguments: list[tuple], doc: dict | None = None) -> list[Instance]:
    return [Instance(request_type=kind, doc=doc or {}, arguments=args, idx=row) for row, args in enumerate(arguments)]


class Recorded:
    """Finds a document that repeats the query, and keeps what was searched for."""

    def __init__(self) -> None:
        self.queries: list[str] = []

    def retrieve(self, queries, k):
        self.queries += queries
        return [[Retrieved(f"about {query}", 0.0, "d")] for query in queries]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLM:
    return load(write_gpt2, tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def reference(lm) -> HFLM:
    return HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=1, device="cpu")


def test_log_probabilities_are_those_of_the_harness(lm, reference):
    found = HarnessModel(lm).loglikelihood(requests("loglikelihood", PAIRS))
    expected = reference.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-3)


def test_greedy_continuations_are_told_from_others(lm, reference):
    [written] = texts_of(lm, [PAIRS[0][0]], 3)
    found = HarnessModel(lm, greedy=True).loglikelihood(requests("loglikelihood", [*PAIRS[:2], (PAIRS[0][0], written)]))
    expected = reference.loglikelihood(requests("loglikelihood", PAIRS[:2]), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [*(bool(greedy) for _, greedy in expected), True]
    assert not HarnessModel(lm).loglikelihood(requests("loglikelihood", [(PAIRS[0][0], written)]))[0][1], "not asked"


def test_answers_end_before_the_first_stop(lm):
    model, [whole] = HarnessModel(lm), texts_of(lm, ["one two"], 12)
    stop = whole[3:5]
    how = {"until": [stop, "never there"], "max_gen_toks": 12}
    assert model.generate_until(requests("generate_until", [("one two", how)])) == [whole.split(stop)[0]]
    with pytest.raises(ValueError, match="expected greedy"):
        model.generate_until(requests("generate_until", [("one two", {"do_sample": True})]))


def test_a_question_is_searched_for_without_its_demonstrations(lm):
    asked = ("Q: one\nA: two\n\nQ: who?\nA:", " me")
    request = requests("loglikelihood", [asked], {"question": "who?", "place": "here"})
    for query, expected in ((None, "Q: who?\nA:"), ("{question} {place}", "who? here")):
        retriever = Recorded()
        HarnessModel(ReplugLM(lm, retriever, k=1), query=query).loglikelihood(request)
        assert retriever.queries == [expected]
    with pytest.raises(KeyError, match="passage"):
        HarnessModel(ReplugLM(lm, Recorded(), k=1), query="{passage}").loglikelihood(request)


def test_scores_and_answers_are_those_of_the_ensemble(lm):
    replug, how = ReplugLM(lm, Recorded(), k=1), {"max_gen_toks": 6}
    model, document = HarnessModel(replug, query="{topic}"), [Retrieved("about boats", 0.0, "d")]
    [(logprob, _)] = model.loglikelihood(requests("loglikelihood", [("one two", " three")], {"topic": "boats"}))
    [answer] = model.generate_until(requests("generate_until", [("one two", how)], {"topic": "boats"}))
    assert logprob == replug.score("one two", " three", document).sum_logprob
    assert answer == replug.generate("one two", GenerationOptions(6), document).text
