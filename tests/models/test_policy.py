"""Policies: what they decide, how they are kept, what is refused, and `ReplugLM` that follows one."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from replug.answering.genread import GenRead, genread_prompt
from replug.config.errors import UserError
from replug.models.black_box_lm import as_mixtures
from replug.models.ensemble import REPLUG_WEIGHTS, Retrieved, Weighting
from replug.models.generation import Generated, GenerationOptions
from replug.models.local.stand_in_lm import StandInLM
from replug.models.policy import Policy, PolicyPrompts, Subject, load_policy
from replug.models.prompt import PromptTemplate
from replug.models.replug_lm import ReplugLM
from tests.support.lm_answers import mixed

POLICY = Policy(
    lm="stand-in",
    retriever="shelf",
    closed="none",
    augmented="replug@1",
    signal="popularity",
    thresholds={"capital": 1000.0, "genre": "always", "sport": "never"},
    pooled=50.0,
)
OPTIONS = GenerationOptions(4)


def by(signal: str, threshold: object) -> Policy:
    return replace(POLICY, signal=signal, thresholds={}, pooled=threshold)


# Deciding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relation", "value", "retrieves"),
    [
        ("capital", 999.0, True),
        ("capital", 1000.0, False),
        ("genre", 10**9, True),
        ("sport", 0.0, False),
        ("author", 49.0, True),  # unseen in fitting: the pooled threshold
        (None, 50.0, False),
        ("capital", math.nan, True),  # nothing is known of it
        ("sport", None, False),
    ],
)
def test_a_question_retrieves_below_the_threshold_of_its_relation(relation, value, retrieves):
    assert POLICY.retrieves(value, relation) is retrieves


def test_a_policy_says_why():
    assert POLICY.reason(7.0, "capital") == "documents: popularity is 7; capital: below 1000"
    assert POLICY.reason(61000.0, "author") == "no document: popularity is 61000; all relations together: below 50"
    assert POLICY.reason(7.0, "sport") == "no document: popularity is 7; sport: never"


def test_another_prompt_than_the_policys_is_refused_by_its_form():
    shot, asked = "Q: in what city was Bo born? A: Rome\n\n", "Q: {question} A:"
    prompts = PolicyPrompts({"capital": [asked]}, {"capital": ["{document}\n\n" + asked]}, 15)
    policy = replace(POLICY, prompts=prompts)
    joined = "{document}\n\nQ: where? A:"
    policy.require_prompt("Q: where? A:", joined, "capital")
    policy.require_prompt("Q: where? A:", joined, None)
    with pytest.raises(UserError, match=r"prompts of the form 'Q: \{question\} A:', found 'where\?'"):
        policy.require_prompt("where?", joined, None)
    with pytest.raises(UserError, match=r"joined as '\{document\}\\nQ: where.*separator"):
        policy.require_prompt("Q: where? A:", joined.replace("\n\n", "\n"), None)
    shown = replace(policy, prompts=replace(prompts, augmented={"capital": [shot, "{document}\n\n" + asked]}))
    with pytest.raises(UserError, match="after 1 shots"):
        shown.require_prompt("Q: where? A:", joined, None)


# On disk ----------------------------------------------------------------------------------------------------------


def test_a_policy_comes_back_from_its_file(tmp_path):
    form = {"capital": ["Q: {question} A:"]}
    policy = replace(POLICY, fitted={"questions": 5}, prompts=PolicyPrompts(form, form, 15))
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signal": "page_rank"}, "signal 'page_rank' is unknown; expected one of popularity, frequency"),
        ({"format": 1}, "not a policy of format 3"),
        ({"weighting": {"share": 2}}, "share is 2; expected 0"),
        ({"retrieves_when": "above"}, "retrieves_when is 'above'; expected 'below' of popularity"),
        ({"pooled": "sometimes"}, "threshold 'sometimes' of pooled: expected a finite number, 'never' or 'always'"),
        ({"thresholds": {"capital": True}}, "threshold True of capital"),
        ({"thresholds": [1.0]}, "policy.json: "),
        ({"threshold": 3}, "threshold is unknown"),
        ({"lm": ...}, "lm is missing"),
    ],
)
def test_what_is_no_policy_is_refused_by_the_file_and_what_is_wrong(tmp_path, change, message):
    path = tmp_path / "policy.json"
    POLICY.save(path)
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    with pytest.raises(UserError, match=message) as caught:
        load_policy(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_policy(tmp_path / "policy.json")
    (tmp_path / "policy.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        load_policy(tmp_path / "policy.json")


# ReplugLM ---------------------------------------------------------------------------------------------------------


class Shelf:
    """Two documents for every query, and which were asked for."""

    identity = "shelf"

    def __init__(self, similarities: Sequence[float] = (0.75, 0.5)) -> None:
        self.similarities, self.asked = similarities, []

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        self.asked += [(query, k) for query in queries]
        found = [Retrieved(f"document {row}", given, f"d{row}") for row, given in enumerate(self.similarities)]
        return [found[:k] for _ in queries]


class Counted(StandInLM):
    """Counts the prompts of its answers, and is as sure of them as it is told."""

    identity = "stand-in"

    def __init__(self, logprobs: Sequence[float] = (), entropies: Sequence[float] | None = None) -> None:
        super().__init__()
        self.prompts: list[str] = []
        self.logprobs, self.entropies = logprobs, entropies

    def generate(self, prompts, options, watch=None) -> list[Generated]:
        mixtures = as_mixtures(prompts)
        self.prompts += [text for mixture in mixtures for text in mixture.prompts]
        entropies = None if self.entropies is None else np.array(self.entropies, np.float32)
        texts = [f"from {len(mixture.prompts)}: {mixture.prompts[0]}" for mixture in mixtures]
        return [Generated(text, np.array(self.logprobs, np.float32), entropies, prompt_tokens=1) for text in texts]


def following(policy: Policy, lm: Counted | None = None, shelf: Shelf | None = None) -> ReplugLM:
    return ReplugLM(lm or Counted([-1.0]), shelf or Shelf(), k=1, policy=policy)


def test_popularity_costs_nothing_and_only_who_retrieves_is_searched_for():
    lm, shelf = Counted([-1.0]), Shelf()
    subjects = [Subject("capital", 3), Subject("capital", 5000), Subject(None, 3)]
    answers = following(POLICY, lm, shelf).generate(["rare?", "known?", "other?"], OPTIONS, subjects=subjects)
    assert [answer.text for answer in answers] == [
        "from 1: document 0\nrare?", "from 1: known?", "from 1: document 0\nother?",
    ]  # fmt: skip
    assert shelf.asked == [("rare?", 1), ("other?", 1)] and len(lm.prompts) == 3


@pytest.mark.parametrize(("logprob", "prompts"), [(-0.1, ["a"]), (-3.0, ["a", "document 0\na"])])
def test_a_signal_of_the_closed_book_answer_costs_one_call_which_is_the_answer_where_it_is_used(logprob, prompts):
    lm, shelf = Counted([logprob]), Shelf()
    [answer] = following(by("mean_logprob", -1.0), lm, shelf).generate(["a"], OPTIONS)
    assert lm.prompts == prompts and answer.text == f"from 1: {prompts[-1]}"
    assert len(shelf.asked) == len(prompts) - 1


@pytest.mark.parametrize(
    ("signal", "threshold", "similarities", "retrieves"),
    [
        ("top_score", 0.5, (0.75, 0.5), True),
        ("top_score", 0.75, (0.75, 0.5), False),
    ],
)
def test_a_signal_of_the_search_costs_one_search(signal, threshold, similarities, retrieves):
    lm, shelf = Counted([-1.0]), Shelf(similarities)
    [decision] = following(by(signal, threshold), lm, shelf).decide(["a"], OPTIONS)
    assert decision.retrieves is retrieves and shelf.asked == [("a", 1)] and not lm.prompts
    assert [found.id for found in decision.documents] == (["d0"] if retrieves else [])


@pytest.mark.parametrize("signal", ["popularity", "mean_logprob", "top_score"])
def test_documents_may_be_found_by_another_text_than_the_prompt(signal):
    lm, shelf = Counted([-3.0]), Shelf()
    policy = by(signal, {"popularity": 1000.0, "mean_logprob": -1.0, "top_score": 0.5}[signal])
    decisions = following(policy, lm, shelf).decide(["Q: a? A:"], OPTIONS, [Subject(None, 3)], ["a?"])
    assert decisions[0].retrieves and [query for query, _ in shelf.asked] == ["a?"]
    assert lm.prompts == (["Q: a? A:"] if signal == "mean_logprob" else [])
    with pytest.raises(ValueError, match="2 queries, but 1 prompts"):
        following(policy, lm, shelf).decide(["Q: a? A:"], OPTIONS, [Subject(None, 3)], ["a?", "b?"])


ASKED = PolicyPrompts({"": ["Q: {question} A:"]}, {"": ["{document}\n\nQ: {question} A:"]}, 4, query="about {question}")


def test_documents_are_found_by_the_question_as_in_fitting():
    policy, lm, shelf = replace(POLICY, prompts=ASKED), Counted(), Shelf()
    replug = ReplugLM(lm, shelf, 1, PromptTemplate("\n\n"), policy)
    replug.generate("Q: where? A:", OPTIONS, subjects=Subject(None, 3))
    assert shelf.asked == [("about where?", 1)] and lm.prompts == ["document 0\n\nQ: where? A:"]


def test_the_lm_writes_the_document_of_a_policy_to_genread():
    policy, lm = replace(POLICY, prompts=ASKED, augmented="genread", retriever="genread"), Counted()
    replug = ReplugLM(lm, GenRead(lm), 1, PromptTemplate("\n\n"), policy)
    replug.generate(["Q: where? A:", "Q: who? A:"], OPTIONS, subjects=[Subject(None, 3), Subject(None, 5000)])
    asked = genread_prompt("where?")
    assert lm.prompts == [asked, f"from 1: {asked}\n\nQ: where? A:", "Q: who? A:"]


def test_an_empty_closed_book_answer_retrieves_and_an_lm_without_entropies_is_refused():
    assert following(by("mean_entropy", 1.0), Counted([], [])).decide(["a"], OPTIONS)[0].retrieves
    with pytest.raises(UserError, match="mean_entropy, and the LM, such as a server, shows no entropies"):
        following(by("mean_entropy", 1.0)).decide(["a"], OPTIONS)


@pytest.mark.parametrize("subjects", [None, [Subject("capital")], [Subject("capital", math.nan)]])
def test_popularity_must_be_given(subjects):
    with pytest.raises(UserError, match=r"popularity is missing: the policy decides by popularity"):
        following(POLICY).generate(["a"], OPTIONS, subjects=subjects)
    with pytest.raises(ValueError, match="0 subjects, but 1 prompts"):
        following(POLICY).decide(["a"], OPTIONS, [])


@pytest.mark.parametrize(
    ("change", "k", "message"),
    [
        ({"lm": "other"}, 1, "another LM .other then, stand-in now"),
        ({"retriever": "other"}, 1, "another retriever or to other documents .other then, shelf now"),
        ({}, 3, "k is 3, but the policy was fitted to replug@1"),
        ({"closed": "genread"}, 1, "chooses between genread and replug@1"),
        ({"augmented": "random@1"}, 1, "chooses between none and random@1"),
        ({"augmented": "replug@3/concat"}, 3, "chooses between none and replug@3/concat"),
    ],
)
def test_a_policy_for_another_lm_retriever_or_way_is_refused_by_name(change, k, message):
    with pytest.raises(UserError, match=message):
        ReplugLM(Counted(), Shelf(), k, policy=replace(POLICY, **change))


def test_a_policy_is_followed_with_the_weights_that_it_was_fitted_to():
    fixed, moving = replace(POLICY, augmented="replug@3"), Weighting(0.05, prune=0.01)
    posterior = replace(fixed, weighting=moving)
    ReplugLM(Counted(), Shelf(), 3, policy=fixed, weighting=REPLUG_WEIGHTS)
    ReplugLM(Counted(), Shelf(), 3, policy=posterior, weighting=moving)
    with pytest.raises(UserError, match=r"share is 0.05, but .* at 1; expected ensemble.share=1"):
        ReplugLM(Counted(), Shelf(), 3, policy=fixed)
    with pytest.raises(UserError, match=r"prune is 0, but .* at 0.01; expected ensemble.prune=0.01"):
        ReplugLM(Counted(), Shelf(), 3, policy=posterior)


def test_documents_that_are_handed_in_are_used_whatever_the_policy_and_scores_need_them():
    lm = Counted([-1.0])
    replug = following(POLICY, lm)
    found = [[Retrieved("given", 1.0, "d")]]
    assert replug.generate(["a"], OPTIONS, documents=found)[0].text == "from 1: given\na"
    assert replug.score(["a"], [" b"], found)
    for act in (
        lambda: replug.score(["a"], [" b"]),
        lambda: mixed(replug, ["a"], [1.0], OPTIONS),
    ):
        with pytest.raises(UserError, match="a policy decides what `generate` retrieves"):
            act()
    with pytest.raises(ValueError, match="no policy was given to decide by"):
        ReplugLM(lm, Shelf(), 1).decide(["a"], OPTIONS)


def test_bm25_may_be_followed_where_one_document_is_read():
    assert replace(POLICY, augmented="bm25@1").ensemble_size == 1
    assert replace(POLICY, augmented="lsr@4").ensemble_size == 4
    assert replace(POLICY, augmented="lsr@4/posterior").ensemble_size == 4
    assert replace(POLICY, augmented="lsr").ensemble_size is None
    assert replace(POLICY, augmented="lsr@4/even").ensemble_size is None
    assert replace(POLICY, augmented="poe@4").ensemble_size is None  # reranked candidates are no ensemble
