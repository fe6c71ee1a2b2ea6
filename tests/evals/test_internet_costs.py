"""What an answer costs: calls, tokens and FLOP against sums by hand."""

import numpy as np
import pytest

from replug.answering.prompts import AnswerPrompts, Shot
from replug.answering.rerankers import RERANKERS, Factors
from replug.evals.internet_deciding import LineTokens, cost_numbers, line_tokens, reranking_costs

# 100 tokens of shots, a question of 10, two passages of 20 and 30, answers of 2 and 3; "b" came from both passages.
LINES = LineTokens(100, 10, [20, 30], {"a": 2, "b": 3})
FACTORS = Factors(
    ("a", "b", "b"),
    np.array([0, 0, 1]),
    *(np.full(3, -1.0) for _ in range(3)),
    *(np.full(2, -1.0) for _ in range(2)),
)
ASKED = (100 + 20 + 10) + (100 + 30 + 10)  # the two prompts that answers are sampled from
GIVEN = (130 + 2) + (130 + 3) + (140 + 3)  # p(a|q,p), or p(q|a,p), of each candidate
ALONE = (120 + 2) + (120 + 3) + (130 + 3)  # p(a|p)


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("reranker", "calls", "scored"),
    [
        ("direct", 0, 0),
        ("rag", 0, 0),
        ("noisy_channel", 8, GIVEN + ALONE + ASKED),
        ("poe", 8, GIVEN + ALONE + ASKED),
    ],
)
def test_a_reranker_costs_the_factors_that_it_reads(reranker, calls, scored):
    found = reranking_costs(RERANKERS[reranker], FACTORS, LINES, LINES, [7, 9])
    assert found == (calls + 2, ASKED, 16, scored)


def test_in_classification_nothing_is_sampled():
    assert reranking_costs(RERANKERS["direct"], FACTORS, LINES, LINES, []) == (3, GIVEN, 0, 0)


def test_flop_are_two_for_each_parameter_and_token_of_its_own_lm_and_left_out_where_unknown():
    assert cost_numbers((50.0, 3.0), 2, 100, 10, 1000)["flop"] == 2 * (110 * 50 + 1000 * 3)
    unknown = cost_numbers((None, 3.0), 2, 100, 10, 1000)
    assert unknown == {"lm_calls": 2.0, "prompt_tokens": 1100.0, "generated_tokens": 10.0}


def test_lines_are_counted_as_the_prompt_has_them():
    prompts = AnswerPrompts([Shot("who?", "me", "it was me")])
    lines = line_tokens(words, prompts, "what colour?", ["it is blue"], ["dark blue"])
    assert lines == LineTokens(words(prompts.opening(has_evidence=True)), 4, [4], {"dark blue": 2})
    assert lines.opening + lines.question + 4 == words(prompts.ask("what colour?", "it is blue"))
