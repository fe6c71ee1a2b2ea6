"""REPLUG's ensemble as a way to answer: one token is chosen for all passages, which a policy may do without."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from replug.answering.prompts import STOP
from replug.commands.asking.evidence import open_index, temperature_of
from replug.commands.asking.options import AskOptions, Decoding
from replug.commands.asking.policies import Followed
from replug.commands.asking.prompts import EnsemblePrompts, Fitting, FormPrompts, chosen_shots, template_prompts
from replug.commands.asking.reply import CLOSED_BOOK, FollowedPolicy, Reply
from replug.config.evaluation_schema import AskConfig
from replug.config.schema import LMConfig
from replug.models.black_box_lm import AsyncLM
from replug.models.generation import Generated, GenerationOptions
from replug.models.lm_source import LMSource
from replug.models.policy import Policy
from replug.models.replug_lm import Decision, ReplugLM
from replug.web.evidence import passages_of_documents
from replug.web.records import FoundEvidence, Passage

NEW_TOKENS, NEW_TOKENS_OF_TEMPLATE = 32, 64


def generation_options(options: AskOptions, decoding: Decoding) -> GenerationOptions:
    """Of the ensemble: greedy by default. A template's answer ends where the user says, others with their line."""
    is_template = options.template is not None
    return GenerationOptions(
        decoding.max_new_tokens or (NEW_TOKENS_OF_TEMPLATE if is_template else NEW_TOKENS),
        decoding.stop or (None if is_template else STOP),
        0.0 if decoding.temperature is None else decoding.temperature,
        1.0 if decoding.top_p is None else decoding.top_p,
        decoding.seed,
    )


class Ensemble:
    """An LM that is not at work yet, and how it is asked."""

    def __init__(self, source: LMSource, lm: LMConfig, options: AskOptions, decoding: Decoding) -> None:
        self._source, self._lm, self._options = source, lm, options
        self._generation, self._shots = generation_options(options, decoding), chosen_shots(options)

    def answer(self, question: str, found: FoundEvidence) -> Reply:
        """From the passages; the LM alone answers where there are none."""
        prompts = self._prompts(question, found.passages)
        with closing(self._source.open_here()) as lm:
            generated = self._generate(lm, prompts, question, found.passages)
            return self._reply(question, generated, found, lm.identity)

    def follow(self, question: str, k: int, config: AskConfig, followed: Followed) -> Reply:
        """From the index's documents or closed book, as the policy says. No answer that is there is asked for again.

        Raises UserError for a policy that was fitted to another LM, index, number of documents or temperature.
        """
        assert self._options.index is not None  # `options.checked`
        policy, alone = followed.policy, self._prompts(question, ())
        with closing(self._source.open_here()) as lm:
            retriever = open_index(self._options.index)
            temperature = temperature_of(config, retriever)
            replug = ReplugLM(lm, retriever, k, policy=policy, temperature=temperature)
            [decision] = replug.decide([alone.closed(question)], self._generation, [followed.subject], [question])
            found = FoundEvidence(question, tuple(passages_of_documents(decision.documents, temperature)), {})
            generated = decision.closed_answer
            if generated is None:
                generated = self._generate(lm, self._prompts(question, found.passages), question, found.passages)
            reply = self._reply(question, generated, found, lm.identity)
        return replace(reply, policy=_followed_policy(policy, decision, followed.subject.relation))

    def _prompts(self, question: str, passages: Sequence[Passage]) -> EnsemblePrompts:
        num_new = self._generation.max_new_tokens
        if self._options.template is not None:
            return template_prompts(self._options.template, self._lm, self._source, num_new)
        return FormPrompts.fitted(Fitting(self._source, num_new), self._shots, question, passages)

    def _generate(self, lm: AsyncLM, prompts: EnsemblePrompts, question: str, passages: Sequence[Passage]) -> Generated:
        """A passage of weight 0 changes nothing and is not read."""
        weighing = [passage for passage in passages if passage.probability > 0]
        options = replace(self._generation, opening=prompts.opening(bool(weighing)))
        if not weighing:
            return lm.generate_ensemble([prompts.closed(question)], [1.0], options)
        weights = [passage.probability for passage in weighing]
        return lm.generate_ensemble([prompts.of(question, passage) for passage in weighing], weights, options)

    def _reply(self, question: str, generated: Generated, found: FoundEvidence, lm: str) -> Reply:
        return Reply(
            question,
            generated.text.strip() if self._options.template is None else generated.text,
            self._options.way if found.passages else CLOSED_BOOK,
            lm,
            self._options.searched,
            sum_logprob=generated.sum_logprob,
            passages=found.passages,
            failures=found.failures,
        )


def _followed_policy(policy: Policy, decision: Decision, relation: str | None) -> FollowedPolicy:
    reason = policy.reason(decision.value, relation)
    return FollowedPolicy(policy.signal, decision.value, policy.threshold(relation), decision.retrieves, reason)
