"""How methods are written."""

import pytest

from replug.config.errors import UserError
from replug.config.methods import Method, meaningful_comparisons, parse_methods

RETRIEVERS = {"replug": "a", "lsr": "b"}


def test_every_form_is_read():
    names = [
        "none",
        "random@3",
        "bm25/softmax",
        "replug",
        "lsr/posterior",
        "replug@5/concat",
        "genread",
        "untuned@3/even",
    ]
    methods = parse_methods(names, 10, RETRIEVERS)
    assert methods == [
        Method("none", "none", 0, False),
        Method("random@3", "random", 3, False),
        Method("bm25/softmax", "bm25", 10, False, "softmax"),
        Method("replug", "replug", 10, False),
        Method("lsr/posterior", "lsr", 10, False, "posterior"),
        Method("replug@5/concat", "replug", 5, True),
        Method("genread", "genread", 1, False),
        Method("untuned@3/even", "replug", 3, False, "even"),
    ]
    assert [method.is_weighted for method in methods] == [False, False, True, True, True, False, False, False]
    [own] = parse_methods(["tuned"], 10, {**RETRIEVERS, "tuned": "c"})
    assert own.source == "tuned"  # not a synonym of lsr


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
