"""Answer several prompts of a server by one text: the likeliest of the prompts' own answers under their mixture.

A server shows answers and no distributions, so it cannot be decoded token by token as local weights are (REPLUG,
section 3.2). Every prompt's own greedy answer is scored after every prompt instead: one request for each prompt, and
one scored input for each prompt and each different answer. Weights follow the tokens of an answer, as they do for local
weights.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from replug.models.black_box_lm import Mixture
from replug.models.ensemble import mix_and_weigh
from replug.models.generation import Generated, GenerationOptions, before_stop, stop_texts
from replug.models.http.completions_api import Pair, ServerText

if TYPE_CHECKING:
    from replug.models.http.http_lm import HttpLM


async def likeliest_answer(
    lm: "HttpLM", prompts: list[Pair], mixture: Mixture, options: GenerationOptions
) -> Generated:
    """Return the likeliest whole answer to the prompts [K], with one log-prob for all of it."""
    read = await _read_logprobs(lm, prompts, mixture)
    shown, prompt_tokens = await lm.answers(prompts, options.max_new_tokens, None)
    candidates, count = _candidates(shown, options), len(prompts)
    if not candidates:  # nothing was generated after any prompt
        return Generated("", np.empty(0, dtype=np.float32), None, mixture.moving(read).weights, prompt_tokens)
    rows = [(prompt.prefix, scored) for _, scored in candidates for prompt in prompts]
    scores = await lm.score_pairs([lm.pair(row, *texts) for row, texts in enumerate(rows)])
    given = [
        np.stack([score.token_logprobs for score in scores[start : start + count]])
        for start in range(0, len(scores), count)
    ]
    mixed = [mix_and_weigh(one, mixture.log_prior, mixture.share, mixture.prune, read) for one in given]
    sums = [logprobs.sum() for logprobs, _ in mixed]
    best = int(np.argmax(sums))
    whole, weights = np.array([sums[best]], dtype=np.float32), mixed[best][1]
    num_tokens = given[best].shape[1]
    return Generated(candidates[best][0], whole, None, weights[:, -1], prompt_tokens, answer_tokens=num_tokens)


async def _read_logprobs(lm: "HttpLM", prompts: Sequence[Pair], mixture: Mixture) -> np.ndarray | None:
    """Return log-probs [K, N] of the prompts' last tokens that move the weights; None if none do."""
    rows = [prompt.ids[0] for prompt in prompts if prompt.ids is not None]
    if not mixture.read or not (num_read := mixture.num_read(rows)):
        return None
    pairs = [Pair(number, "", "", (row[:-num_read], row[-num_read:])) for number, row in enumerate(rows)]
    return np.stack([score.token_logprobs for score in await lm.score_pairs(pairs)])


def _candidates(shown: Sequence[ServerText], options: GenerationOptions) -> list[tuple[str, str]]:
    """Return each different answer (white space round it aside) in the first prompt's form, and the text to score.

    An answer is scored with the stop that ended it, or with one if the server itself ended it: without the stop a
    short answer would always be likelier.
    """
    by_text: dict[str, tuple[str, str]] = {}
    stops = stop_texts(options.stop)
    for answer in shown:
        text = before_stop(answer.text, options.stop)
        rest, ending = answer.text[len(text) :], stops[0] if stops and answer.is_ended else ""
        if rest:
            ending = min((one for one in stops if rest.startswith(one)), key=len)  # the one that was complete first
        if scored := text + ending:
            by_text.setdefault(text.strip(), (text, scored))
    return list(by_text.values())
