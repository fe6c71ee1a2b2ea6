"""How methods are written."""

import pytest

from replug.config.errors import UserError
from replug.config.methods import Method, meaningful_comparisons, parse_methods

RETRIEVERS = {"replug": "a", "lsr": "b"}


def test_every_form_is_read():
    names = ["none", "random@3", "bm25", "replug", "lsr@1", "replug@5/concat", "genread"]
    assert parse_methods(names, 10, RETRIEVERS) == [
        Method("none", "none", 0, False),
        Method("random@3", "random", 3, False),
        Method("bm25", "bm25", 10, False),
        Method("replug", "replug", 10, False),
        Method("lsr@1", "lsr", 1, False),
        Method("replug@5/concat", "replug", 5, True),
        Method("genread", "genread", 1, False),
    ]


def test_weights_are_even_or_a_softmax_or_follow_the_text_where_the_name_says_so():
    names = ["bm25", "bm25/softmax", "replug", "replug@3/even", "random/even"]
    names += ["bm25@3/posterior", "random/posterior", "lsr/posterior"]
    methods = parse_methods(names, 10, RETRIEVERS)
    assert [method.is_weighted for method in methods] == [False, True, True, False, False, False, False, True]
    assert [method.follows_text for method in methods] == [False] * 5 + [True] * 3
    assert [method.k for method in methods] == [10, 10, 10, 3, 10, 3, 10, 10]
    assert [methods[at].series for at in (2, 3, 5)] == ["replug", "replug/even", "bm25/posterior"]


def test_comparisons_are_with_the_first_and_with_methods_that_differ_in_one_thing():
    def compared(*names: str) -> list[str]:
        pairs = meaningful_comparisons(parse_methods([*names], 10, RETRIEVERS))
        return [f"{method} - {other}" for other, method in pairs if other != "none"]

    posterior = "replug/posterior", "lsr/posterior"
    of_posterior = ["replug/posterior - replug", "lsr/posterior - lsr", "lsr/posterior - replug/posterior"]
    assert compared("none", "random", "replug", "lsr", *posterior) == [
        *("replug - random", "lsr - random", "lsr - replug"),
        *of_posterior,
    ]
    assert compared("none", "replug@1", "replug@5", "replug") == ["replug@5 - replug@1", "replug - replug@5"]
    assert compared("none", "replug", "replug@10/concat", "lsr@1") == ["replug@10/concat - replug"]
    assert compared("lsr", "replug@2/even", "none") == ["replug@2/even - lsr", "none - lsr", "none - replug@2/even"]


def test_methods_may_be_named_in_words():
    untuned, tuned = parse_methods(["untuned@3", "tuned/concat"], 10, RETRIEVERS)
    assert untuned == Method("untuned@3", "replug", 3, False)
    assert tuned == Method("tuned/concat", "lsr", 10, True)
    [own] = parse_methods(["tuned"], 10, {**RETRIEVERS, "tuned": "c"})
    assert own.source == "tuned"
    with pytest.raises(UserError, match="methods: tuned is unknown"):
        parse_methods(["tuned"], 10, {"replug": "a"})
