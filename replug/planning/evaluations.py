"""Estimate an evaluation: tokens that LMs read and generate, GPU hours of LMs and embedding, dollars.

Rates are those of a training plan. Generating a token takes at least the time to read the LM's weights. Lengths that no
key sets are assumed, and documents of different retrievers are assumed to differ.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import BM25, GENREAD, GOLD, LONG_CONTEXT, NONE, REPLUG, WITHOUT_RETRIEVER, Method
from replug.config.rules import evaluation_methods, has_rerank_lm, lm_problems, tokens_read
from replug.config.schema import LMConfig
from replug.data.row_files import count_rows
from replug.data.shards import prepared_folder
from replug.index_workers.build_plan import newest_encoder
from replug.planning.accelerators import Devices, parse_devices
from replug.planning.memory import DTYPE_BYTES, gpus_for, known, scoring_bytes
from replug.planning.model_sizes import ModelSize, encoder_size, lm_size
from replug.planning.training import DEFAULTS, Assumptions
from replug.planning.workload import count_documents, encoded_tokens, template_tokens

TEXTS, QUESTIONS = ("language_modelling", "token_gain"), ("mmlu", "open_qa", "popqa")
LETTERS, SUBJECTS = 4, 57  # of MMLU
SHOTS = {"mmlu": 5, "open_qa": 16, "popqa": 15, "internet_qa": 15}  # where questions.shots is not set
SAMPLES, SAMPLES_ALONE = 4, 50  # answers of a question from passages (answering/answerer.py)
LABELS = {"fever": 3, "strategyqa": 2}  # answers that there are, where nothing is sampled
WRITTEN_TOKENS = 150  # of a document that the LM writes (evals/genread.py)
QUESTION_TOKENS = {"mmlu": 100, "popqa": 15}  # with choices; of other questions 20
ANSWER_TOKENS, LONG_CONTEXT_TOKENS, PASSAGE_TOKENS = 5, 1024, 150


@dataclass(frozen=True, slots=True)
class Prompts:
    """`count` prompts of an `opening`, which many share, and a `prefix`, after which `ends` continuations are scored.

    The opening is read once, which is not counted, and a prefix once for all its ends. Then `samples` answers of
    `new_tokens` are generated; prompts of one of the `calls` are decoded together.
    """

    count: int
    prefix: int
    opening: int = 0
    ends: int = 1
    end_tokens: int = 0
    new_tokens: int = 0
    samples: int = 1
    calls: int = 0

    @property
    def tokens_read(self) -> int:
        return self.count * (self.prefix + self.ends * self.end_tokens)

    @property
    def tokens_generated(self) -> int:
        return self.count * self.samples * self.new_tokens

    def flop(self, size: ModelSize) -> tuple[float, float]:
        """Return the FLOP of reading and of generating."""
        token = size.flop_per_token(self.opening + self.prefix + self.end_tokens + self.new_tokens)
        predicted = self.count * self.ends * self.end_tokens * size.flop_per_prediction
        generating = self.tokens_generated * (token + size.flop_per_prediction)
        return self.tokens_read * token + predicted, generating


def prompts_of(config: EvaluationConfig, num: int) -> list[Prompts]:
    """Return the prompts that `lm` reads for `num` examples. Raises UserError for an unknown evaluation."""
    methods, kind, document = evaluation_methods(config), config.evaluation, _document_tokens(config)
    if kind == "retrieval":
        return []
    if kind == "internet_qa":
        asked, scored = _prompts_of_passages(config, methods, num)
        return asked if has_rerank_lm(config) else [*asked, *scored]
    if kind not in (*TEXTS, *QUESTIONS):
        expected = ", ".join((*TEXTS, *QUESTIONS, "internet_qa", "retrieval"))
        raise UserError(f"evaluation: no plan is known of {kind!r}; expected one of {expected}")
    query = _query_tokens(config)
    reranked = [Prompts(num * method.k, document, end_tokens=query) for method in methods if method.is_reranked]
    of_methods = _prompts_of_texts if kind in TEXTS else _prompts_of_questions
    added = template_tokens(config.lm)
    return [*reranked, *(replace(one, prefix=one.prefix + added) for one in of_methods(config, methods, num))]


def _prompts_of_texts(config: EvaluationConfig, methods: Sequence[Method], num: int) -> Iterator[Prompts]:
    """Yield the prompts of language modelling: a document that several methods of one source read is scored once.

    So is the text without a document, whether a method or a member of an ensemble reads it.
    """
    (before, scored), document = _text_tokens(config), _document_tokens(config)
    if any(method.source == LONG_CONTEXT for method in methods):
        yield Prompts(num, max(0, LONG_CONTEXT_TOKENS - scored), end_tokens=scored)
    if any(method.source == NONE or _reads_alone(config, method) for method in methods):
        yield Prompts(num, before, end_tokens=scored)
    most: dict[str, int] = {}  # documents by the source that finds them
    for method in methods:
        if method.is_concatenated:
            yield Prompts(num, before + method.k * document, end_tokens=scored)
        elif method.takes_from_corpus:
            most[method.found_by] = max(method.num_read, most.get(method.found_by, 0))
    for count in most.values():
        yield Prompts(num * count, before + document, end_tokens=scored)


def _prompts_of_questions(config: EvaluationConfig, methods: Sequence[Method], num: int) -> Iterator[Prompts]:
    """Yield the prompts of questions: letters of MMLU are scored, other answers are as long as they may be."""
    query = _query_tokens(config)
    if any(method.source == GENREAD for method in methods):
        yield Prompts(num, query, new_tokens=WRITTEN_TOKENS, calls=num)
    reads = tokens_read(config.ensemble, config.lm) and (config.lm.url or config.evaluation == "mmlu")
    for method in methods:
        count, documents = (1, method.k) if method.is_concatenated or not method.k else (method.num_read, 1)
        count += _reads_alone(config, method)
        each = WRITTEN_TOKENS if method.source == GENREAD else _document_tokens(config)
        in_shot = each if method.k and config.questions.documents_in_shots else 0
        opening, prefix = _num_shots(config) * (query + ANSWER_TOKENS + in_shot), query + documents * each
        if method.follows_text and reads:
            yield Prompts(num * count, prefix, opening, end_tokens=1)  # the tokens that move weights, in a call apart
        if config.evaluation == "mmlu":
            yield Prompts(num * count, prefix, opening, LETTERS, end_tokens=1)
        else:
            yield Prompts(num * count, prefix, opening, new_tokens=config.questions.max_new_tokens, calls=num)


def _reads_alone(config: EvaluationConfig, method: Method) -> bool:
    return method.follows_text and config.ensemble.alone > 0


def _prompts_of_passages(
    config: EvaluationConfig, methods: Sequence[Method], num: int
) -> tuple[list[Prompts], list[Prompts]]:
    """Return prompts that are asked for answers, and prompts that are scored, which `rerank_lm` takes where it is set.

    `evals/internet_costs.py` counts the same: every factor is asked for but p(a|q,p) of samples, which comes with them,
    and no two samples are alike.
    """
    labels = LABELS.get(str(config.questions.dataset), 0)
    query, answer, passage = _query_tokens(config), ANSWER_TOKENS, PASSAGE_TOKENS
    alone, open_book = (_num_shots(config) * (query + answer + evidence) for evidence in (0, passage))
    asked: list[Prompts] = []
    scored: list[Prompts] = []
    for source, opening, prefix in ((NONE, alone, query), (GOLD, open_book, passage + query)):
        if any(method.source == source for method in methods):
            if labels:
                asked.append(Prompts(num, prefix, opening, labels, answer))
            else:
                asked.append(Prompts(num, prefix, opening, new_tokens=answer, samples=SAMPLES_ALONE, calls=num))
    if passages := max((method.k for method in methods), default=0):
        count, candidates = num * passages, labels or SAMPLES
        if labels:
            asked.append(Prompts(count, passage + query, open_book, labels, answer))
        else:
            asked.append(Prompts(count, passage + query, open_book, new_tokens=answer, samples=SAMPLES, calls=count))
        scored += [
            Prompts(count, passage, open_book, 1, query),
            Prompts(count, passage, open_book, candidates, answer),
            Prompts(count, passage, open_book, candidates, answer + query),
        ]
    return asked, scored


def _query_tokens(config: EvaluationConfig) -> int:
    if config.evaluation in TEXTS:
        return config.texts.query_tokens if config.texts.path else config.data.context_tokens
    return QUESTION_TOKENS.get(config.evaluation, 20)


def _text_tokens(config: EvaluationConfig) -> tuple[int, int]:
    """Return the tokens of an example's context, and of its continuation."""
    texts, length = config.texts, config.data.context_tokens
    return (texts.context_tokens, texts.scored_tokens) if texts.path else (length, length)


def _document_tokens(config: EvaluationConfig) -> int:
    return config.data.document_tokens or config.data.context_tokens


def _num_shots(config: EvaluationConfig) -> int:
    return SHOTS[config.evaluation] if config.questions.shots is None else config.questions.shots


def count_examples(config: EvaluationConfig, given: int | None) -> int:
    """Return `given`, or the examples that files or keys tell. Raises UserError where nothing tells."""
    if given is not None:
        return given
    is_text, questions, data = config.evaluation in TEXTS, config.questions, config.data
    most = config.texts.max_examples if is_text else questions.max_questions
    if most is not None and config.evaluation == "mmlu":
        most *= SUBJECTS
    counts = [] if most is None else [most]
    path = data.heldout if is_text else questions.path
    if not (is_text and config.texts.path):  # whole texts are not cut here, so their number is not known
        if path and Path(path).expanduser().is_file():
            counts.append(count_rows(path))
        elif is_text:
            prepared = prepared_folder(Path(data.prepared).expanduser()) if data.prepared else None
            if prepared is not None and prepared.is_finished:
                counts.append(int(prepared.manifest()["counts"]["heldout"]))
            else:
                counts.append(data.num_heldout)
    if not counts:
        key = "texts.max_examples" if is_text else "questions.max_questions"
        raise UserError(f"{key} is not set and no file is there to count; expected --examples N, such as 3610")
    return min(counts)


def plan_evaluation(config: EvaluationConfig, gpus: str | None, given: Assumptions = DEFAULTS) -> dict[str, Any]:
    """Plan an evaluation. Raises UserError for what cannot be planned, with the flag or key that fixes it."""
    devices = parse_devices(gpus, efficiency=given.efficiency)
    made_from = prepared_folder(Path(config.data.prepared).expanduser()).inputs if config.data.prepared else None
    if made_from and "data.context_tokens" in made_from:  # the lengths that the set was cut to
        config.data.context_tokens = made_from["data.context_tokens"]
        config.data.document_tokens = made_from["data.document_tokens"]
    num, retrievers = count_examples(config, given.num_examples), _retrievers(config)
    needs_corpus = retrievers or any(method.takes_from_corpus for method in evaluation_methods(config))
    documents = (given.num_documents or count_documents(config.run_config())) if needs_corpus else 0
    lms = list(_lm_costs(config, devices, num, given))
    embedded = [_embedding_cost(config, devices, named, num, documents, given) for named in retrievers.items()]
    hours = {"score": sum(one["hours"] for one in lms), "embed": sum(one["hours"] for one in embedded)}
    total = sum(hours.values())
    return {
        "devices": str(devices),
        "evaluation": config.evaluation,
        "examples": num,
        "documents": documents,
        "lms": lms,
        "retrievers": embedded,
        "tokens": {
            "score": sum(one["tokens_read"] + one["tokens_generated"] for one in lms),
            "embed": sum(one["tokens"] for one in embedded),
        },
        "hours": hours,
        "gpu_hours": total,
        "wall_hours": total / devices.count,
        "price": given.price,
        "dollars": None if given.price is None else total * given.price,
        "notes": list(_notes(config)),
    }


def _lm_costs(config: EvaluationConfig, devices: Devices, num: int, given: Assumptions) -> Iterator[dict[str, Any]]:
    """Yield the cost of each LM; one of several GPUs holds them all while one works, and a replica two local LMs."""
    prompts = prompts_of(config, num)
    for problem in lm_problems(config.lm) if config.evaluation != "retrieval" else ():
        raise UserError(problem)
    lms = [(config.lm, prompts)] if prompts else []
    if config.evaluation == "internet_qa" and has_rerank_lm(config):
        lms.append((config.rerank_lm, _prompts_of_passages(config, evaluation_methods(config), num)[1]))
    local = [keys for keys, _ in lms if keys.path]
    for keys, own in lms:
        yield _lm_cost(keys, own, devices, given, beside=[other for other in local if keys.path and other is not keys])


def _lm_cost(
    keys: LMConfig, prompts: Sequence[Prompts], devices: Devices, given: Assumptions, beside: Sequence[LMConfig]
) -> dict[str, Any]:
    def size_of(lm: LMConfig) -> ModelSize:
        path = str(lm.path or lm.model)
        return known(lm_size, path) or lm_size(path, given.lm_parameters)

    gpu, size = devices.accelerator, size_of(keys)
    num_bytes = sum(scoring_bytes(lm, size_of(lm), gpu.resolve_dtype) for lm in (keys, *beside))
    gpus = max(gpus_for(num_bytes, gpu.memory_gb), math.ceil(keys.gpus_per_replica or 1))
    if gpus > devices.count:
        raise UserError(
            f"--gpus is {devices}, but {size.name}{' with the other LM' if beside else ''} takes {gpus} of them "
            f"({num_bytes / 1e9:.0f} GB); expected such as --gpus {gpus}x{gpu.name}"
        )
    rate = devices.rate(keys.dtype.value, "score")
    reading_weights = size.parameters * DTYPE_BYTES[gpu.resolve_dtype(keys.dtype.value)] / gpu.bandwidth
    flop = seconds = 0.0
    for one in prompts:
        reading, writing = one.flop(size)
        flop += reading + writing
        seconds += reading / rate + max(writing / rate, one.calls * one.new_tokens * reading_weights)
    return {
        "name": size.name,
        "parameters": size.parameters,
        "gpus": gpus,
        "tokens_read": sum(one.tokens_read for one in prompts),
        "tokens_generated": sum(one.tokens_generated for one in prompts),
        "flop": flop,
        "hours": gpus * seconds / 3600,
    }


def _embedding_cost(
    config: EvaluationConfig, devices: Devices, named: tuple[str, str], num: int, documents: int, given: Assumptions
) -> dict[str, Any]:
    """Return the cost of a retriever; a run or an index holds the vectors of its documents."""
    name, path = named
    encoder = newest_encoder(Path(path).expanduser())
    size = known(encoder_size, str(encoder or path)) or encoder_size(str(encoder or path), given.retriever_parameters)
    lengths = (encoded_tokens(tokens, config.retriever) for tokens in (_document_tokens(config), _query_tokens(config)))
    texts = list(zip((0 if encoder else documents, num), lengths, strict=True))
    flop = sum(count * length * size.flop_per_token(length) for count, length in texts)
    return {
        "name": name,
        "path": path,
        "parameters": size.parameters,
        "is_indexed": bool(encoder),
        "tokens": sum(count * length for count, length in texts),
        "flop": flop,
        "hours": flop / devices.rate(config.index.dtype.value, "embed") / 3600,
    }


def _retrievers(config: EvaluationConfig) -> dict[str, str]:
    """Return the retrievers that some method asks, by name; a local search engine asks `replug` where it has a path."""
    paths = {**({REPLUG: config.retriever.path} if config.retriever.path else {}), **config.retrievers}
    if config.evaluation == "internet_qa":
        return {name: path for name, path in paths.items() if name == REPLUG}
    asked = {method.source for method in evaluation_methods(config)} - set(WITHOUT_RETRIEVER)
    return {name: path for name, path in paths.items() if name in asked}


def _notes(config: EvaluationConfig) -> Iterator[str]:
    """Yield what the reader should know before believing the figures."""
    document = f"a document for {_document_tokens(config)} (data.document_tokens)"
    if config.evaluation in TEXTS:
        key, (before, scored) = (
            "texts.context_tokens" if config.texts.path else "data.context_tokens",
            _text_tokens(config),
        )
        yield f"texts are taken for {before} + {scored} tokens ({key}), {document}"
    else:
        yield f"a question is taken for {_query_tokens(config)} tokens, {document}"
    if any(method.source == BM25 for method in evaluation_methods(config)):
        yield "BM25 works on the processor and is not counted"
    if config.lm.url or (has_rerank_lm(config) and config.rerank_lm.url):
        yield "the LM's server is counted as if it ran on these GPUs and read shared beginnings of prompts once"
