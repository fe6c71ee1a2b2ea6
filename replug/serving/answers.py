"""Responses in OpenAI's shapes, with what is REPLUG's own under `replug`: documents, weights, index version."""

import base64
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from replug.index_workers.local_index import FoundDocument
from replug.serving.errors import ApiError
from replug.serving.requests import LM_NAME, RETRIEVER_NAME, EmbeddingRequest
from replug.serving.service import AnswerEvidence, Embedded, Searched, ServedAnswer

Json = dict[str, Any]


def embeddings(request: EmbeddingRequest, embedded: Embedded, version: int) -> Json:
    vectors, counts = embedded
    as_text = request.encoding_format == "base64"
    rows = [_base64(vector) if as_text else vector.tolist() for vector in vectors]
    return {
        "object": "list",
        "model": request.model,
        "data": [{"object": "embedding", "index": number, "embedding": row} for number, row in enumerate(rows)],
        "usage": {"prompt_tokens": sum(counts), "total_tokens": sum(counts)},
        "replug": {"index_version": version},
    }


def _base64(vector: np.ndarray) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def search_results(searched: Searched, version: int) -> Json:
    found, are_cut = searched
    return {
        "object": "list",
        "index_version": version,
        "data": [
            {"index": number, "query_is_cut": is_cut, "documents": [_document(one) for one in documents]}
            for number, (documents, is_cut) in enumerate(zip(found, are_cut, strict=True))
        ],
    }


def _document(found: FoundDocument) -> Json:
    document = found.document
    return {"id": document.id, "text": document.text, "source": document.source, "score": found.similarity}


class AnswerForm:
    """The responses to one request: a completion, or a chat. One `id` and time stand in all of its parts."""

    def __init__(self, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._name = "chat.completion" if is_chat else "text_completion"
        self._head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}

    def whole(self, answers: Sequence[ServedAnswer], evidence: Sequence[AnswerEvidence], most: int) -> Json:
        """Of every prompt a choice; `replug` is of the one, or a list of those of all. `most` tokens were asked for."""
        own = [evidence_of(found, answer) for found, answer in zip(evidence, answers, strict=True)]
        choices = [self._choice(number, answer, most) for number, answer in enumerate(answers)]
        return {
            **self._head,
            "object": self._name,
            "model": LM_NAME,
            "choices": choices,
            "usage": usage(answers),
            "replug": own[0] if len(own) == 1 else own,
        }

    def _choice(self, number: int, answer: ServedAnswer, most: int) -> Json:
        text = answer.generated.text
        said: Json = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return {"index": number, **said, "logprobs": None, "finish_reason": finish_reason(answer, most)}

    def first(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""} if self._is_chat else "", None)

    def piece(self, text: str) -> Json:
        return self._chunk({"content": text} if self._is_chat else text, None)

    def last(self, answer: ServedAnswer, evidence: AnswerEvidence, most: int) -> Json:
        chunk = self._chunk({} if self._is_chat else "", finish_reason(answer, most))
        return {**chunk, "replug": evidence_of(evidence, answer)}

    def counts(self, answer: ServedAnswer) -> Json:
        """The chunk after the last, for who asks for it."""
        return {**self._chunk_head(), "choices": [], "usage": usage([answer])}

    def _chunk(self, said: Any, reason: str | None) -> Json:
        choice = {"index": 0, "delta" if self._is_chat else "text": said, "logprobs": None, "finish_reason": reason}
        return {**self._chunk_head(), "choices": [choice]}

    def _chunk_head(self) -> Json:
        name = "chat.completion.chunk" if self._is_chat else self._name
        return {**self._head, "object": name, "model": LM_NAME}


def evidence_of(evidence: AnswerEvidence, answer: ServedAnswer) -> Json:
    """Weights are the ensemble's, and sum to 1. `is_cut`: the LM did not read the document's end."""
    weights, are_cut = answer.prompted.mixture.weights, answer.prompted.are_cut
    return {
        "index_version": evidence.index.version,
        "temperature": evidence.index.temperature,
        "query_is_cut": evidence.query_is_cut,
        "documents": [
            {**_document(found), "weight": weight, "is_cut": is_cut}
            for found, weight, is_cut in zip(evidence.documents, weights[: len(are_cut)], are_cut, strict=True)
        ],
    }


def finish_reason(answer: ServedAnswer, most: int) -> str:
    return "length" if answer.generated.num_tokens >= most else "stop"


def usage(answers: Sequence[ServedAnswer]) -> Json | None:
    """Prompt tokens are those of all documents' prompts, as the LM read them; nothing where it does not tell."""
    generated = [answer.generated for answer in answers]
    read = [one.prompt_tokens for one in generated]
    if any(count is None for count in read):
        return None
    prompt, made = sum(count or 0 for count in read), sum(one.num_tokens for one in generated)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def models(lm: str, retriever: str, version: int) -> Json:
    """Both that are served; what they are is under `replug`."""
    own = {LM_NAME: {"lm": lm, "retriever": retriever}, RETRIEVER_NAME: {"retriever": retriever}}
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "replug",
                "replug": of | {"index_version": version},
            }
            for name, of in own.items()
        ],
    }


def event(content: Json | str) -> bytes:
    """A server-sent event."""
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    return event(error.as_json())
