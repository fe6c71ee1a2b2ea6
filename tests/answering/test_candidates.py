"""Which answers are ranked."""

import numpy as np

from replug.answering.factors import Candidate, logprobs_of_samples, sampled_candidates
from replug.models.generation import Sampled


def drawn(text: str, *logprobs: float) -> Sampled:
    return Sampled(text, np.array(logprobs, np.float32))


def test_equal_answers_of_a_passage_are_one_and_empty_ones_none() -> None:
    samples = [[drawn(" Paris"), drawn("  "), drawn(" Rome"), drawn(" Paris ")], [drawn("")], [drawn(" New\t York")]]
    expected = [Candidate("Paris", 0), Candidate("Rome", 0), Candidate("New York", 2)]
    assert sampled_candidates(samples) == expected


def test_an_answer_that_was_drawn_in_several_ways_has_its_largest_log_prob() -> None:
    samples = [drawn(" Rome", -2, -1), drawn("", -0.1), drawn(" Paris", -2), drawn(" Rome ", -0.5, -0.5)]
    assert logprobs_of_samples(samples) == {"Rome": -1.0, "Paris": -2.0}
