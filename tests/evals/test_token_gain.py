"""Gains of tokens by hand, by the rarity of their words and by the popularity of names."""

import numpy as np
import pytest

from replug.evals.token_gain import (
    EntityNames,
    gain_bits,
    mean_gains,
    popularities,
    rarities,
    words_of_tokens,
)

TEXT = (
    (" The", " Tap", "pah", "annock", ",", " river"),
    np.log([0.5, 0.01, 0.5, 0.5, 0.25, 0.4]),
    np.log([0.5, 0.16, 0.5, 1.0, 0.125, 0.1]),
)
COUNTS = {"the": 1200, "river": 37, "tappahannock": 3}


def test_a_gain_is_the_change_in_bits_and_rarity_that_of_the_word_a_token_is_a_part_of() -> None:
    tokens, without, with_documents = TEXT
    assert gain_bits(without, with_documents) == pytest.approx([0, 4, 0, 1, -1, -2])
    of_words = ["1000-9999", "1-9", "1-9", "1-9", "no word", "10-99"]
    assert rarities(words_of_tokens(tokens), COUNTS) == of_words
    assert rarities(words_of_tokens(tokens), {})[0] == "0"


def rarity_gains(by_text, **resampling):
    """The mean gains of texts of (bits, times that the corpus has the word, None for no word)."""
    names = [[rarities([None if n is None else "x"], {"x": n or 0})[0] for _, n in text] for text in by_text]
    return mean_gains("gain", [[bits for bits, _ in text] for text in by_text], names, **resampling)


def test_bins_go_by_powers_of_ten_and_the_mean_is_of_their_tokens() -> None:
    counts = [0, 1, 9, 10, 99, 100, 12_345, None, 0]
    bins = rarity_gains([[(float(i), count) for i, count in enumerate(counts)]])
    means = {name: mean for name, mean in bins.items() if not name.endswith(" - rest")}
    assert [(name, mean["n"], mean["value"]) for name, mean in means.items()] == [
        ("gain/0", 2, 4.0),
        ("gain/1-9", 2, 1.5),
        ("gain/10-99", 2, 3.5),
        ("gain/100-999", 1, 5.0),
        ("gain/10000-99999", 1, 6.0),
        ("gain/no word", 1, 7.0),
    ]
    assert all(mean["interval"] == [mean["value"]] * 2 for mean in means.values()), "there is one text"


def test_intervals_are_over_texts_that_have_such_tokens() -> None:
    texts = [[(1.0, 5), (1.0, 5), (2.0, 0)], [(4.0, 5)], [(7.0, None)]]
    means = rarity_gains(texts, num_resamples=500)
    assert means["gain/1-9"] == {"value": 2.0, "n": 3, "clusters": 2, "interval": [1.0, 4.0]}
    assert means["gain/0"]["interval"] == [2.0, 2.0] and means["gain/no word"]["interval"] == [7.0, 7.0]


def test_a_bin_is_compared_with_all_other_tokens_over_the_same_resamples() -> None:
    rng = np.random.default_rng(0)
    texts = [
        [(level + 2 + noise, 5), (level + noise, 50), (level - noise, 5000)]
        for level, noise in zip(rng.normal(0, 5, 40), rng.normal(0, 0.1, 40), strict=True)
    ]
    entries = rarity_gains(texts, num_resamples=300)
    low, high = entries["gain/1-9"]["interval"]
    assert high - low > 2, "texts differ far more than bins do"
    rest = entries["gain/1-9 - rest"]
    assert rest["value"] == pytest.approx(2, abs=0.1) and rest["interval"][0] > 1.9 and rest["p_holm"] < 0.05
    assert all(entries[f"gain/{name} - rest"]["interval"][1] < 0 for name in ("10-99", "1000-9999"))


# Names of entities ------------------------------------------------------------------------------------------------

POPULARITY = {"Li Bai": 50.0, "Bai": 5000.0, "Paris": 90000.0, "Live": 7.0, "Li Bai House": 3.0}


def test_the_longest_name_that_begins_at_a_word_is_the_mention_and_case_counts():
    names = EntityNames(POPULARITY)
    found = names.mentions("Bai met Li Bai, not Li Bai House; they live in Paris-Live.")
    assert [name for name, _, _ in found] == ["Bai", "Li Bai", "Li Bai House", "Paris", "Live"]
    text = "so Li Bai left"
    [mention] = names.mentions(text)
    assert text[mention[1] : mention[2]] == "Li Bai"
    assert names.mentions("Baiting Lives") == []
    assert [name for name, _, _ in names.mentions("a poem of Li Bai")] == ["Li Bai"]  # longer names begin so too


def test_tokens_of_a_name_gain_in_the_bin_of_its_popularity():
    texts = [
        [("The", 0.0), (" Li", 2.0), (" B", 3.0), ("ai", 1.0), (" of", 0.5), (" Paris", -1.0)],
        [(" Paris", 0.0), (" and", 0.25), (" Bai", 4.0), (".", 0.25)],
    ]
    tokens = [[token for token, _ in of] for of in texts]
    names = EntityNames(POPULARITY)
    labels = [popularities(own, names.mentions("".join(own)), POPULARITY) for own in tokens]
    bins = mean_gains("gain", [[bits for _, bits in of] for of in texts], labels, num_resamples=100)
    assert [(name, of["n"], of["value"]) for name, of in bins.items() if not name.endswith(" - rest")] == [
        ("gain/popularity 10^1-10^2", 3, pytest.approx(2.0)),
        ("gain/popularity 10^3-10^4", 1, pytest.approx(4.0)),
        ("gain/popularity 10^4-10^5", 2, pytest.approx(-0.5)),
        ("gain/no entity", 4, pytest.approx(0.25)),
    ]
