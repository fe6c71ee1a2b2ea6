"""Estimate an evaluation: tokens that LMs read and generate, GPU hours of LMs and embedding, dollars.

Rates are as in a training plan. Generating a token takes at least the time to read the LM's weights. Lengths that no
key sets are assumed, and documents of different retrievers are assumed to differ.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replug.cluster.layout import USABLE
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import GENREAD, GOLD, NONE, REPLUG, WITHOUT_RETRIEVER, Method
from replug.config.rules import evaluation_methods, has_rerank_lm, lm_problems, tokens_read
from replug.data.rows import count_rows
from replug.data.shards import prepared_folder
from replug.index_workers.build_plan import newest_encoder
from replug.planning.accelerators import Devices, parse_devices, resolve_dtype
from replug.planning.memory import DTYPE_BYTES, scoring_bytes
from replug.planning.model_sizes import ModelSize, encoder_size, lm_size
from replug.planning.stages import count_texts, encoded_tokens, template_tokens

TEXTS = ("language_modelling", "token_gain")
LETTERS, SUBJECTS = 4, 57  # of MMLU
SAMPLES, SAMPLES_ALONE = 4, 50  # answers of a question from passages (answering/answerer.py)
LABELS = {"fever": 3, "strategyqa": 2}  # possible answers; nothing is sampled
WRITTEN_TOKENS = 150  # of a document that the LM writes (evals/search.py)
QUESTION_TOKENS = {"mmlu": 100, "popqa": 15}  # with choices; of other questions 20
ANSWER_TOKENS, PASSAGE_TOKENS = 5, 150


@dataclass(frozen=True, slots=True)
class Prompts:
    """`count` prompts of a `prefix`, which is read once and then scores `ends` continuations of `end_tokens`.

    Or `samples` answers of `new_tokens` are generated; prompts of one of the `calls` are decoded together.
    """

    count: int
    prefix: int
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

    def seconds(self, size: ModelSize, rate: float, reading_weights: float) -> float:
        """Return the seconds of an LM; a generated token takes at least the time to read its weights."""
        token = size.flop_per_token(self.prefix + self.end_tokens + self.new_tokens)
        predicted = self.count * self.ends * self.end_tokens * size.flop_per_prediction
        writing = self.tokens_generated * (token + size.flop_per_prediction) / rate
        return (self.tokens_read * token + predicted) / rate + max(
            writing, self.calls * self.new_tokens * reading_weights
        )


def prompts_of(config: EvaluationConfig, num: int) -> list[Prompts]:
    """Return the prompts that `lm` reads for `num` examples."""
    methods, kind = evaluation_methods(config), config.evaluation
    if kind == "retrieval":
        return []
    if kind == "internet_qa":
        answers, factors = _prompts_of_passages(config, methods, num)
        return answers if has_rerank_lm(config) else [*answers, *factors]
    of_methods = _prompts_of_texts if kind in TEXTS else _prompts_of_questions
    added = template_tokens(config.lm)
    return [replace(one, prefix=one.prefix + added) for one in of_methods(config, methods, num)]


def _prompts_of_texts(config: EvaluationConfig, methods: Sequence[Method], num: int) -> Iterator[Prompts]:
    """Yield the prompts of language modelling: a document that several methods of one source read is scored once."""
    (before, scored), document = _text_tokens(config), _read_tokens(config)
    num_documents: dict[str, int] = {}  # by the source that retrieves them
    for method in methods:
        if method.source == NONE:
            yield Prompts(num, before, end_tokens=scored)
        elif method.is_concatenated:
            yield Prompts(num, before + method.k * document, end_tokens=scored)
        else:
            num_documents[method.source] = max(method.k, num_documents.get(method.source, 0))
    for count in num_documents.values():
        yield Prompts(num * count, before + document, end_tokens=scored)


def _prompts_of_questions(config: EvaluationConfig, methods: Sequence[Method], num: int) -> Iterator[Prompts]:
    """Yield the prompts of questions: letters of MMLU are scored, other answers have their longest length."""
    query = _query_tokens(config)
    if any(method.source == GENREAD for method in methods):
        yield Prompts(num, query, new_tokens=WRITTEN_TOKENS, calls=num)
    letters: dict[tuple[str, int, int], Prompts] = {}
    reads = tokens_read(config.ensemble, config.lm) and config.lm.url
    for method in methods:
        count, documents = (1, method.k) if method.is_concatenated or not method.k else (method.k, 1)
        prefix = query + documents * (WRITTEN_TOKENS if method.source == GENREAD else _document_tokens(config))
        if method.follows_text and reads:
            yield Prompts(num * count, prefix, end_tokens=1)  # the tokens that move weights, in a separate call
        if config.evaluation == "mmlu":  # replug and replug/vote read the same letters
            letters[method.source, method.k, documents] = Prompts(num * count, prefix, LETTERS, end_tokens=1)
        else:
            yield Prompts(num * count, prefix, new_tokens=config.questions.max_new_tokens, calls=num)
    yield from letters.values()


def _prompts_of_passages(
    config: EvaluationConfig, methods: Sequence[Method], num: int
) -> tuple[list[Prompts], list[Prompts]]:
    """Return the prompts of answers and of the other factors, which `rerank_lm` scores where it is set.

    A sample brings its own p(a|q,p), and no two samples are alike.
    """
    labels, query = LABELS.get(str(config.questions.dataset), 0), _query_tokens(config)

    def answered(count: int, prefix: int, samples: int) -> Prompts:
        if labels:
            return Prompts(count, prefix, labels, ANSWER_TOKENS)
        return Prompts(count, prefix, new_tokens=ANSWER_TOKENS, samples=samples, calls=count)

    sources = {method.source for method in methods}
    prefixes = {NONE: query, GOLD: PASSAGE_TOKENS + query}
    answers = [answered(num, prefix, SAMPLES_ALONE) for source, prefix in prefixes.items() if source in sources]
    count, candidates = num * max((method.k for method in methods), default=0), labels or SAMPLES
    if not count:
        return answers, []
    factors = [(1, query), (candidates, ANSWER_TOKENS), (candidates, ANSWER_TOKENS + query)]
    answers.append(answered(count, PASSAGE_TOKENS + query, SAMPLES))
    return answers, [Prompts(count, PASSAGE_TOKENS, ends, tokens) for ends, tokens in factors]


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


def _read_tokens(config: EvaluationConfig) -> int:
    """Return the number of tokens that the LM reads of a document."""
    return min(_document_tokens(config), config.texts.document_tokens or _document_tokens(config))


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


def plan_evaluation(
    config: EvaluationConfig,
    gpus: str | None,
    num_documents: int | None = None,
    num_examples: int | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """Plan an evaluation. Raises UserError naming the flag or key that is missing or wrong."""
    devices = parse_devices(gpus)
    made_from = prepared_folder(Path(config.data.prepared).expanduser()).inputs if config.data.prepared else None
    if made_from and "data.context_tokens" in made_from:  # the lengths that the set was cut to
        config.data.context_tokens = made_from["data.context_tokens"]
        config.data.document_tokens = made_from["data.document_tokens"]
    num, retrievers = count_examples(config, num_examples), _retrievers(config)
    needs_corpus = retrievers or any(method.takes_from_corpus for method in evaluation_methods(config))
    documents = num_documents or (count_texts(config.run_config())[0].documents if needs_corpus else 0)
    lms = list(_lm_costs(config, devices, num))
    embedded = [_embedding_cost(config, devices, named, num, documents) for named in retrievers.items()]
    total = sum(one["hours"] or 0.0 for one in (*lms, *embedded))
    return {
        "devices": str(devices),
        "evaluation": config.evaluation,
        "examples": num,
        "documents": documents,
        "lms": lms,
        "retrievers": embedded,
        "gpu_hours": total,
        "wall_hours": total / devices.count,
        "price": price,
        "dollars": None if price is None or devices.model is None else total * price,
    }


def _lm_costs(config: EvaluationConfig, devices: Devices, num: int) -> Iterator[dict[str, Any]]:
    """Yield the cost of each LM. Local LMs share the GPUs that hold them all; a server's cost is not known."""
    prompts = prompts_of(config, num)
    for problem in lm_problems(config.lm) if config.evaluation != "retrieval" else ():
        raise UserError(problem)
    lms = [(config.lm, prompts)] if prompts else []
    if config.evaluation == "internet_qa" and has_rerank_lm(config):
        lms.append((config.rerank_lm, _prompts_of_passages(config, evaluation_methods(config), num)[1]))
    sizes = [lm_size(keys.path) if keys.path else None for keys, _ in lms]
    local = [(keys, size) for (keys, _), size in zip(lms, sizes, strict=True) if size]
    gpus = _gpus_for(sum(scoring_bytes(keys, size, devices.has_bfloat16) for keys, size in local), devices)
    for (keys, own), size in zip(lms, sizes, strict=True):
        hours = None
        if size:
            rate, reading_weights = devices.rate(keys.dtype.value, "score"), 0.0
            if devices.model:
                num_bytes = size.parameters * DTYPE_BYTES[resolve_dtype(keys.dtype.value, devices.has_bfloat16)]
                reading_weights = num_bytes / (1e9 * devices.model.bandwidth)
            hours = gpus * sum(one.seconds(size, rate, reading_weights) for one in own) / 3600
        yield {
            "name": str(keys.path or keys.model),
            "parameters": size and size.parameters,
            "gpus": gpus if size else 0,
            "tokens_read": sum(one.tokens_read for one in own),
            "tokens_generated": sum(one.tokens_generated for one in own),
            "hours": hours,
        }


def _gpus_for(num_bytes: float, devices: Devices) -> int:
    """Return the GPUs that hold the local LMs together. Raises UserError if there are fewer."""
    if devices.model is None:
        return 1
    needed = max(1, math.ceil(num_bytes / (USABLE * devices.model.memory_gb * 1e9)))
    if needed > devices.count:
        raise UserError(
            f"--gpus is {devices}, but the LM takes {needed} of them ({num_bytes / 1e9:.0f} GB); expected such as "
            f"--gpus {needed}x{devices.model.name}"
        )
    return needed


def _embedding_cost(
    config: EvaluationConfig, devices: Devices, named: tuple[str, str], num: int, documents: int
) -> dict[str, Any]:
    """Return the cost of a retriever; a run or an index holds the vectors of its documents."""
    name, path = named
    encoder = newest_encoder(Path(path).expanduser())
    size = encoder_size(str(encoder or path))
    lengths = (encoded_tokens(tokens, config.retriever) for tokens in (_document_tokens(config), _query_tokens(config)))
    texts = list(zip((0 if encoder else documents, num), lengths, strict=True))
    flop = sum(count * length * size.flop_per_token(length) for count, length in texts)
    return {
        "name": name,
        "path": path,
        "parameters": size.parameters,
        "is_indexed": bool(encoder),
        "tokens": sum(count * length for count, length in texts),
        "hours": flop / devices.rate(config.index.dtype.value, "embed") / 3600,
    }


def _retrievers(config: EvaluationConfig) -> dict[str, str]:
    """Return the retrievers that some method uses, by name; a local search engine uses `replug` where it has a path."""
    paths = {**({REPLUG: config.retriever.path} if config.retriever.path else {}), **config.retrievers}
    if config.evaluation == "internet_qa":
        return {name: path for name, path in paths.items() if name == REPLUG}
    used = {method.source for method in evaluation_methods(config)} - set(WITHOUT_RETRIEVER)
    return {name: path for name, path in paths.items() if name in used}
