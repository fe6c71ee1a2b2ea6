"""A language model, or one with its documents, as a model of lm-evaluation-harness (the extra `lm-eval`).

    model = HarnessModel(ReplugLM(lm, retriever), query="{question}")
    lm_eval.simple_evaluate(model=model, tasks=["mmlu"], num_fewshot=5)

The harness's context begins with demonstrations, and an encoder would truncate it before the question, so all questions
would retrieve nearly the same documents. The query is therefore the question alone. Prefix and continuation are
tokenized separately, as everywhere in replug; the harness joins them first, which gives the same tokens if the border
is also a token border.
"""

from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from replug.models.black_box_lm import BlackBoxLM
from replug.models.ensemble import Retrieved
from replug.models.generation import GenerationOptions, Stop
from replug.models.replug_lm import ReplugLM

MAX_NEW_TOKENS = 256  # the default for tasks without a limit
BETWEEN_SHOTS = "\n\n"  # the harness's own `fewshot_delimiter`


class HarnessModel(LM):
    """A harness model. `query` is a template with fields of the task's documents, such as "{question}".

    By default the query is the context after its last blank line: the question, if blank lines separate demonstrations
    and the question has none. `greedy` also checks whether each continuation is the LM's greedy output, at the cost of
    a generation each, and otherwise reports False. Only tasks that count exact continuations, such as LAMBADA's
    accuracy, need it.
    """

    def __init__(self, lm: BlackBoxLM | ReplugLM, greedy: bool = False, query: str | None = None) -> None:
        super().__init__()
        self._lm, self._greedy, self._query = lm, greedy, query

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability (nats) of each continuation, and whether it is the greedy one."""
        contexts, continuations = [one.args[0] for one in requests], [one.args[1] for one in requests]
        retrieved = self._retrieve(requests)
        documents = (retrieved,) if isinstance(self._lm, ReplugLM) else ()
        scores = self._lm.score(contexts, continuations, *documents)
        rows = zip(contexts, continuations, scores, retrieved, strict=True)
        return [
            (
                score.sum_logprob,
                self._greedy and self._answer(context, score.num_tokens, None, own).startswith(continuation),
            )
            for context, continuation, score, own in rows
        ]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("whole texts are measured by `replug evaluate configs/eval_lm.yaml texts.path=TEXTS`")

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return greedy answers, cut before the first of the task's stop texts."""
        answers = []
        for request, documents in zip(requests, self._retrieve(requests), strict=True):
            context, how = request.args
            if how.get("do_sample") or how.get("temperature"):
                raise ValueError(f"generation options {how}; expected greedy ones (do_sample: false)")
            answers.append(self._answer(context, how.get("max_gen_toks", MAX_NEW_TOKENS), how.get("until"), documents))
        return answers

    def _retrieve(self, requests: Sequence[Instance]) -> list[Sequence[Retrieved]]:
        """Return the documents of each request; none without a retriever or for a blank query."""
        if not isinstance(self._lm, ReplugLM):
            return [() for _ in requests]
        if self._query is None:
            queries = [str(request.args[0]).rstrip().rpartition(BETWEEN_SHOTS)[2] for request in requests]
        else:
            queries = [self._query.format_map(request.doc) for request in requests]
        retrieved = iter(self._lm.retrieve([query for query in queries if query.strip()]))
        return [next(retrieved) if query.strip() else () for query in queries]

    def _answer(self, context: str, length: int, stop: Stop, documents: Sequence[Retrieved]) -> str:
        options = GenerationOptions(length, stop)
        if isinstance(self._lm, ReplugLM):
            return self._lm.generate(context, options, documents).text
        return self._lm.generate([context], options)[0].text
