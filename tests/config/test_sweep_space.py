"""What is swept, as it is typed."""

import pytest

from replug.config.errors import UserError
from replug.config.sweep_space import Choices, Range, read_space


def test_lists_and_ranges_are_swept_and_the_rest_is_fixed() -> None:
    space, fixed = read_space(
        [
            "loss.gamma=[0.03, 1e-1]",
            "train.labels=x",
            "train.lr=log(1e-5,1e-3)",
            "loss.contrastive=uniform(0,1)",
            "seed=[1,2]",
        ]
    )
    assert list(space.items()) == [
        ("loss.gamma", Choices((0.03, 0.1))),
        ("train.lr", Range(1e-5, 1e-3, is_log=True)),
        ("loss.contrastive", Range(0.0, 1.0, is_log=False)),
        ("seed", Choices((1, 2))),
    ]
    assert fixed == ["train.labels=x"]


def test_words_and_truths_are_values_too() -> None:
    space, _ = read_space(["retriever.train=[both,query]", "loss.in_batch=[true,false]"])
    assert space["retriever.train"] == Choices(("both", "query"))
    assert space["loss.in_batch"] == Choices((True, False))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "nothing is swept"),
        (["train.lr=1e-3"], "nothing is swept"),
        (["train.lr=[1e-3]"], "two or more values"),
        (["train.lr=[1,1]"], "no two of them equal"),
        (["train.lr=[[1],2]"], "no list of values"),
        (["train.lr=[1,2"], "is no list"),
        (["train.lr=log(0,1)"], "is no range"),
        (["train.lr=uniform(2,1)"], "is no range"),
        (["train.lr=uniform(a,1)"], "has no two numbers"),
        (["train.lr=uniform(0,inf)"], "is no range"),
        (["train.lr=[1,2]", "train.lr=[3,4]"], "swept twice"),
        (["train.lr=[1,2]", "train.lr=3"], "swept and set as well"),
        (["data.window=[1,2]"], "must share what they are trained and measured on"),
        (["train.labels=[a,b]"], "must share"),
        (["run_dir=[a,b]"], "must share"),
    ],
)
def test_what_cannot_be_swept_is_refused_by_its_key(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_space(overrides)
