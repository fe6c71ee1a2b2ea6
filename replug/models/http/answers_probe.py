"""What a server must show that scores no text (`lm.api=answers`): that its answers go on as it says.

Its likeliest tokens must be named by the tokenizer, it must go on with the likeliest, and an answer must go on alike
when its beginning is sent back. A document's help cannot be looked at, since no given text is scored.
"""

from collections.abc import Sequence

import numpy as np

from replug.config.errors import UserError
from replug.models.http.agreement import TOLERANCE_NATS, agree
from replug.models.http.connection import ServerError
from replug.models.http.http_lm import HttpLM
from replug.models.http.top_tokens import TopTokens, own_logprobs

NUM_SHOWN = 4  # tokens of each answer


def probe_answers(lm: HttpLM, beginnings: Sequence[str]) -> np.ndarray:
    """The fingerprint: log-probs (nats) of answers to fixed texts, float32 [T]. Raises UserError for what lacks."""
    try:
        answers = [lm.likeliest(beginning, [], NUM_SHOWN) for beginning in beginnings]
        shortcoming = shown_shortcoming(answers) or likeliest_shortcoming(answers) or alike_shortcoming(answers)
        shortcoming = shortcoming or _continued_shortcoming(lm, beginnings, answers)
    except ServerError as error:
        raise UserError(f"lm.url: {lm.spec.url} does not pass the first look: {error}") from error
    if shortcoming:
        raise UserError(f"lm.url: {lm.spec.url} {shortcoming}")
    return np.concatenate([own_logprobs(answer) for answer in answers])


def shown_shortcoming(answers: Sequence[Sequence[TopTokens]]) -> str | None:
    if all(len(answer) >= 2 for answer in answers):
        return None
    return (
        "does not show the five likeliest tokens of its answers with their log-probs, or shows such as lm.tokenizer "
        "does not name; expected completions with logprobs=5, and the tokenizer of the server's model"
    )


def likeliest_shortcoming(answers: Sequence[Sequence[TopTokens]]) -> str | None:
    gaps = [max(step.logprobs.values()) - step.logprobs[step.own] for answer in answers for step in answer]
    if max(gaps) <= TOLERANCE_NATS:
        return None
    return f"goes on with a token that is {max(gaps):.2f} nats less likely than another, at temperature 0"


def alike_shortcoming(answers: Sequence[Sequence[TopTokens]]) -> str | None:
    first, *others = (own_logprobs(answer) for answer in answers)
    if all(np.array_equal(first, other) for other in others):
        return "gives log-probs that do not follow the text: those after different texts are the same"
    return None


def continued_shortcoming(whole: Sequence[TopTokens], rest: Sequence[TopTokens]) -> str | None:
    """`rest` is what followed when the first token of `whole` was sent back behind the prompt."""
    seen = min(len(whole) - 1, len(rest))
    if seen and agree(own_logprobs(whole[1 : seen + 1]), own_logprobs(rest[:seen])):
        return None
    return "goes on otherwise when the beginning of its answer is sent back: it does not continue what it is sent"


def _continued_shortcoming(lm: HttpLM, beginnings: Sequence[str], answers: Sequence[Sequence[TopTokens]]) -> str | None:
    for beginning, whole in zip(beginnings, answers, strict=True):
        rest = lm.likeliest(beginning, [whole[0].own], NUM_SHOWN - 1)
        if shortcoming := continued_shortcoming(whole, rest):
            return shortcoming
    return None
