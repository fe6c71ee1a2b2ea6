"""Made-up texts in two domains for tests and the debug run: each text keeps to its topic's own words."""

from collections.abc import Iterator

import numpy as np

from replug.data.sources.records import SourceText

SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
NUM_TOPICS, WORDS_PER_TOPIC, WORDS_PER_TEXT, TEXTS_PER_TOPIC = 24, 12, 160, 8


def stand_in_vocabulary() -> list[list[str]]:
    """The words of each topic; no word belongs to two."""
    words = [first + second for first in SYLLABLES for second in SYLLABLES]
    order = np.random.default_rng(0).permutation(len(words))[: NUM_TOPICS * WORDS_PER_TOPIC]
    return [
        [words[i] for i in order[topic * WORDS_PER_TOPIC : (topic + 1) * WORDS_PER_TOPIC]]
        for topic in range(NUM_TOPICS)
    ]


def stand_in_texts() -> Iterator[SourceText]:
    """The same texts at every call."""
    vocabulary = stand_in_vocabulary()
    rng = np.random.default_rng(1)
    for number in range(NUM_TOPICS * TEXTS_PER_TOPIC):
        topic = number % NUM_TOPICS
        words = rng.choice(vocabulary[topic], size=WORDS_PER_TEXT)
        yield SourceText(f"text-{number}", " ".join(words), "odd" if topic % 2 else "even")
