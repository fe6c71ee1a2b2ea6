"""Any `BlackBoxLM`, so also `ReplugLM`, as a model of lm-evaluation-harness (the extra `lm-eval`).

    lm_eval.simple_evaluate(model=HarnessModel(ReplugLM(lm, retriever)), tasks=["lambada_openai"])

The harness's context is what documents are retrieved for. Prefix and continuation are tokenized apart, as everywhere
here; the harness joins them first, which gives the same tokens where the continuation begins with a space.
"""

from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from replug.models.black_box_lm import BlackBoxLM

MAX_NEW_TOKENS = 256  # where a task does not say


class HarnessModel(LM):
    """`greedy`: also say whether each continuation is what the LM would write, which costs a generation each.

    Without it the answer is no; only tasks that count exact continuations, such as LAMBADA's accuracy, ask for it.
    """

    def __init__(self, lm: BlackBoxLM, greedy: bool = False) -> None:
        super().__init__()
        self._lm, self._greedy = lm, greedy

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability (nats) of each continuation after its context, and whether it is the greedy one."""
        pairs = [request.args for request in requests]
        scores = self._lm.score([context for context, _ in pairs], [continuation for _, continuation in pairs])
        return [
            (score.sum_logprob, self._greedy and self._writes(context, continuation, score.num_tokens))
            for (context, continuation), score in zip(pairs, scores, strict=True)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, which must fit the LM: raises UnscorableText where they do not."""
        texts = [request.args[0] for request in requests]
        return [score.sum_logprob for score in self._lm.score([""] * len(texts), texts)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers that end before the first of the task's stops."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, how: dict) -> str:
        if how.get("do_sample") or how.get("temperature"):
            raise ValueError(f"generation options {how}; expected greedy ones (do_sample: false)")
        length = int(how.get("max_gen_toks", MAX_NEW_TOKENS))
        [text] = self._lm.generate([context], length, how.get("until"))
        return text

    def _writes(self, context: str, continuation: str, num_tokens: int) -> bool:
        [text] = self._lm.generate([context], num_tokens)
        return text.startswith(continuation)
