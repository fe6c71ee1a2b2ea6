"""Bound the work of an evaluation: its examples, LM calls and tokens.

Every method is counted by itself, with answers as long as they may be. Lengths that no key sets are assumed;
demonstrations, embedding and the web are not counted.
"""

from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import GENREAD, INTERNET_QA, Method
from replug.config.rules import evaluation_methods
from replug.data.rows import count_rows
from replug.data.shards import prepared_folder
from replug.planning.stages import count_texts, template_tokens

TEXTS = ("language_modelling", "token_gain")
LETTERS, SUBJECTS = 4, 57  # of MMLU
SAMPLES, SAMPLES_ALONE, FACTORS = 4, 50, 3  # answers and scores of a question from passages (answering/answerer.py)
WRITTEN_TOKENS = 150  # of a document that the LM writes (evals/search.py)
QUESTION_TOKENS = {"mmlu": 100, "popqa": 15}  # with choices; of other questions 20
ANSWER_TOKENS, PASSAGE_TOKENS = 5, 150


def plan_evaluation(config: EvaluationConfig, num_examples: int | None = None) -> dict[str, Any]:
    """Return examples, LM calls and tokens, at most. Raises UserError naming the flag or key that is missing."""
    num, data = count_examples(config, num_examples), config.data
    made_from = prepared_folder(Path(data.prepared).expanduser()).inputs if data.prepared else None
    lengths: dict[str, Any] = {"data.context_tokens": data.context_tokens, "data.document_tokens": data.document_tokens}
    lengths |= made_from or {}  # a prepared set was cut to its own lengths
    context, document = lengths["data.context_tokens"], lengths["data.document_tokens"]
    methods = [] if config.evaluation == "retrieval" else evaluation_methods(config)
    work = [_work(config, method, context, document or context) for method in methods]
    return {
        "evaluation": config.evaluation,
        "examples": num,
        "lm_calls": num * sum(calls for calls, _ in work),
        "tokens": num * sum(calls * tokens for calls, tokens in work),
    }


def _work(config: EvaluationConfig, method: Method, context: int, document: int) -> tuple[int, int]:
    """Return the LM calls of one example, and the tokens of each, read or generated."""
    query = QUESTION_TOKENS.get(config.evaluation, 20)
    if config.evaluation == INTERNET_QA:
        answers = (SAMPLES if method.k else SAMPLES_ALONE) * (ANSWER_TOKENS + query)
        return max(1, method.k) * (1 + FACTORS * bool(method.k)), PASSAGE_TOKENS + query + answers
    is_text, texts = config.evaluation in TEXTS, config.texts
    if is_text:
        query = texts.context_tokens + texts.scored_tokens if texts.path else 2 * context
        document = min(document, texts.document_tokens or document)
    answer = 0 if is_text else LETTERS if config.evaluation == "mmlu" else config.questions.max_new_tokens
    if method.source == GENREAD:
        return 2, query + WRITTEN_TOKENS + answer  # the document is written by a call of its own
    at_once = method.k if method.is_concatenated else min(1, method.k)
    calls = 1 if method.is_concatenated else max(1, method.k)
    calls += calls * method.follows_text  # tokens that move weights may take a second pass
    return calls, query + at_once * document + answer + template_tokens(config.lm)


def count_examples(config: EvaluationConfig, given: int | None) -> int:
    """Return `given`, or the examples that files or keys tell. Raises UserError where nothing tells."""
    if given is not None:
        return given
    if config.evaluation in TEXTS:
        key, most, counted = "texts.max_examples", config.texts.max_examples, None
        if config.texts.path is None:  # whole texts are not cut here, so their number is not known
            counted = count_texts(config.run_config(), num_documents=1)[0].heldout
    else:
        key, most, path = "questions.max_questions", config.questions.max_questions, config.questions.path
        most = most and most * (SUBJECTS if config.evaluation == "mmlu" else 1)
        counted = count_rows(path) if path and Path(path).expanduser().is_file() else None
    numbers = [number for number in (most, counted) if number is not None]
    if not numbers:
        raise UserError(f"{key} is not set and there is no file to count; expected --examples N, such as 3610")
    return min(numbers)
