"""From a request to the questions that the ensemble answers, with everything refused that cannot be."""

from replug.config.errors import UserError
from replug.models.black_box_lm import GreedyLM
from replug.models.generation import GenerationOptions
from replug.serving.errors import ApiError, refused
from replug.serving.index_holder import ServedIndex
from replug.serving.requests import (
    DEFAULT_TOKENS,
    LM_NAME,
    QUERY,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EnsembleOptions,
    Side,
    require_model,
)
from replug.serving.service import Question, Service


def side_of(asked: EmbeddingRequest, index: ServedIndex) -> Side:
    """Which side of the retriever embeds; it must be said where the two are not the same."""
    dim = index.encoder(QUERY).dim
    if asked.dimensions not in (None, dim):
        raise refused(
            "dimensions", f"{asked.dimensions}; expected {dim}, which the retriever has", "unsupported_parameter"
        )
    if asked.input_type is None and index.is_asymmetric:
        raise refused("input_type", "this retriever embeds queries and documents apart; expected query or document")
    return asked.input_type or QUERY


def completion_questions(asked: CompletionRequest, service: Service) -> list[Question]:
    """One for each prompt, all of one version."""
    require_model(asked.model, LM_NAME)
    service.limits.require_texts("prompt", len(asked.prompt))
    if asked.stream and len(asked.prompt) > 1:
        raise refused("stream", f"{len(asked.prompt)} prompts; expected one that is streamed")
    if len(asked.prompt) > 1 and asked.replug.query is not None:
        raise refused("replug.query", f"one query for {len(asked.prompt)} prompts; expected one prompt")
    options, k = _options(asked, DEFAULT_TOKENS, service), _num_documents(asked.replug, service)
    build, index = service.prompting.of_text, service.index.served
    return [
        Question(build(prompt), prompt if asked.replug.query is None else asked.replug.query, k, options, index)
        for prompt in asked.prompt
    ]


def chat_question(asked: ChatRequest, service: Service) -> Question:
    """Documents are found for the user's last message."""
    require_model(asked.model, LM_NAME)
    service.limits.require_texts("messages", len(asked.messages))
    options = _options(asked, service.limits.max_new_tokens, service)
    build, k = service.prompting.of_chat(asked.messages), _num_documents(asked.replug, service)
    query = asked.messages[-1].text if asked.replug.query is None else asked.replug.query
    return Question(build, query, k, options, service.index.served)


def _options(asked: CompletionRequest | ChatRequest, default_tokens: int, service: Service) -> GenerationOptions:
    """How the answer is decoded, as this LM can: what it cannot is refused here, before a stream begins."""
    options = asked.options(service.limits, default_tokens)
    if isinstance(service.lm, GreedyLM):
        try:
            service.lm.require_greedy(options)
        except UserError as error:
            raise ApiError(400, str(error), str(error).partition(" ")[0], "unsupported_parameter") from error
    return options


def _num_documents(asked: EnsembleOptions, service: Service) -> int:
    if asked.k is None:
        return service.k
    service.limits.require_documents("replug.k", asked.k, least=0)
    return asked.k
