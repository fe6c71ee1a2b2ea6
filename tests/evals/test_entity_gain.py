"""Names in texts, and what their tokens gain."""

import json

import pytest

from replug.config.errors import UserError
from replug.evals.tasks.tokens import EntityNames, entity_bins, entity_table, gains_by_popularity, read_popularity
from replug.evals.token_gain import TokenGain

POPULARITY = {"Li Bai": 50.0, "Bai": 5000.0, "Paris": 90000.0, "Live": 7.0, "Li Bai House": 3.0}


def gains(*tokens: tuple[str, float]) -> list[TokenGain]:
    return [TokenGain("t", i, token, None, None, 0.1, 0.1, bits) for i, (token, bits) in enumerate(tokens)]


def test_the_longest_name_that_begins_at_a_word_is_the_mention_and_case_counts():
    names = EntityNames(POPULARITY)
    found = names.mentions("Bai met Li Bai, not Li Bai House; they live in Paris-Live.")
    assert [mention.name for mention in found] == ["Bai", "Li Bai", "Li Bai House", "Paris", "Live"]
    text = "so Li Bai left"
    [mention] = names.mentions(text)
    assert text[mention.start : mention.end] == "Li Bai"
    assert names.mentions("Baiting Lives") == []
    assert [mention.name for mention in names.mentions("a poem of Li Bai")] == ["Li Bai"]  # longer names begin so too


def test_tokens_of_a_name_gain_in_the_bin_of_its_popularity():
    first = gains(("The", 0.0), (" Li", 2.0), (" B", 3.0), ("ai", 1.0), (" of", 0.5), (" Paris", -1.0))
    second = gains((" Paris", 0.0), (" and", 0.25), (" Bai", 4.0), (".", 0.25))
    bins = entity_bins([first, second], POPULARITY, num_resamples=100)
    assert [(b.popularity, b.num_mentions, b.num_names, b.num_tokens) for b in bins] == [
        ("popularity 10^1-10^2", 1, 1, 3),
        ("popularity 10^3-10^4", 1, 1, 1),
        ("popularity 10^4-10^5", 2, 1, 2),
        ("no entity", 0, 0, 4),
    ]
    assert [b.gain.value for b in bins] == pytest.approx([2.0, 4.0, -0.5, 0.25])
    entries = gains_by_popularity(bins)
    assert (
        entries["entity_gain_bits/popularity 10^4-10^5"]["n"] == 2 and entries["entity_gain_bits/no entity"]["n"] == 4
    )
    assert len(entity_table(bins).rows) == 4


def test_popularity_is_that_of_popqas_subjects(tmp_path):
    row = {"subj": "Li Bai", "prop": "occupation", "obj": "poet", "possible_answers": ["poet"]}
    path = tmp_path / "popqa.jsonl"
    path.write_text(json.dumps(row | {"s_pop": 50}) + "\n")
    assert read_popularity(path) == {"Li Bai": 50.0}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="tells no popularity"):
        read_popularity(path)
