"""What an evaluation costs: tokens that LMs read, GPU hours of LMs and of embedding, dollars.

Rates are those of a training plan: a share of the peak, and for answers, which are generated token by token, no less
than the time to read the LM's weights for each token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import BM25, REPLUG, WITHOUT_RETRIEVER
from replug.config.rules import evaluation_methods, has_rerank_lm, lm_problems
from replug.config.schema import LMConfig
from replug.index_workers.version_folders import newest_encoder
from replug.models.pass_size import LMShape, tokens_per_pass
from replug.planning.accelerators import DeviceModel, Devices, check_efficiency, parse_devices
from replug.planning.examples import count_examples, with_lengths_of_set
from replug.planning.memory import DTYPE_BYTES, gpus_for, score_bytes
from replug.planning.model_sizes import ModelSize, encoder_size, lm_size
from replug.planning.readings import LM, RERANK_LM, Reading, lengths_of, query_tokens, readings_of, text_tokens
from replug.planning.workload import count_documents

SizeOf = Callable[[str, float | None], ModelSize]


@dataclass(frozen=True, slots=True)
class EvaluationAssumptions:
    """What the command line adds to the configuration; None is what is usual."""

    lm_parameters: float | None = None
    retriever_parameters: float | None = None
    num_documents: int | None = None
    num_examples: int | None = None
    efficiency: float | None = None
    price: float | None = None  # dollars for an hour of one device


@dataclass(frozen=True, slots=True)
class LMCost:
    """Of one LM: tokens put to it and read by it, tokens generated, FLOP, and hours of all its GPUs.

    An LM of several GPUs holds them all while one works.
    """

    name: str
    parameters: int
    gpus: int
    tokens_put: int
    tokens_read: int
    tokens_generated: int
    flop: float
    hours: float


@dataclass(frozen=True, slots=True)
class EmbeddingCost:
    """Of one retriever: tokens of documents and queries, and hours. `is_indexed`: its documents' vectors are there."""

    name: str
    path: str
    parameters: int
    is_indexed: bool
    tokens: int
    flop: float
    hours: float


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Of one configuration; `price` is None where nobody told one."""

    config: EvaluationConfig
    devices: Devices
    num_examples: int
    num_documents: int
    lms: tuple[LMCost, ...]
    retrievers: tuple[EmbeddingCost, ...]
    price: float | None
    notes: tuple[str, ...] = ()

    @property
    def hours(self) -> dict[str, float]:
        """Device hours by role."""
        return {"score": sum(one.hours for one in self.lms), "embed": sum(one.hours for one in self.retrievers)}


def plan_evaluation(
    config: EvaluationConfig,
    gpus: str | None,
    given: EvaluationAssumptions = EvaluationAssumptions(),
) -> EvaluationPlan:
    """Raises UserError for what cannot be planned, with the flag or key that fixes it."""
    if gpus is None:
        raise UserError("--gpus is missing; expected such as --gpus 1xA100")
    check_efficiency(given.efficiency)
    config = with_lengths_of_set(config)
    devices, num = parse_devices(gpus), count_examples(config, given.num_examples)
    needs_corpus = _retrievers(config) or any(method.takes_from_corpus for method in evaluation_methods(config))
    documents = (given.num_documents or count_documents(config.run_config())) if needs_corpus else 0
    lms = tuple(_lm_costs(config, devices, num, given))
    retrievers = tuple(_embedding_costs(config, devices.accelerator, num, documents, given))
    notes = tuple(_notes(config, lms, retrievers))
    return EvaluationPlan(config, devices, num, documents, lms, retrievers, given.price, notes)


def _rate(accelerator: DeviceModel, dtype: str, given: EvaluationAssumptions) -> float:
    return (given.efficiency or accelerator.efficiency) * accelerator.peak(accelerator.resolve_dtype(dtype))


def _lm_costs(config: EvaluationConfig, devices: Devices, num: int, given: EvaluationAssumptions) -> Iterator[LMCost]:
    readings = readings_of(config, num)
    for problem in lm_problems(config.lm) if readings else ():
        raise UserError(problem)
    if LM in readings:
        size = _known_or_given(lm_size, str(config.lm.path or config.lm.model), given.lm_parameters)
        yield _lm_cost(size, readings[LM], config.lm, devices, given)
    if RERANK_LM in readings:
        keys = config.rerank_lm
        size = _known_or_given(lm_size, str(keys.path or keys.model), given.lm_parameters)
        yield _lm_cost(size, readings[RERANK_LM], keys, devices, given)


def _known_or_given(size_of: SizeOf, path: str, parameters: float | None) -> ModelSize:
    """A known size comes first: the parameters are those of the models that are not known."""
    try:
        return size_of(path, None)
    except UserError:
        if parameters is None:
            raise
        return size_of(path, parameters)


def _lm_cost(
    size: ModelSize, readings: Sequence[Reading], keys: LMConfig, devices: Devices, given: EvaluationAssumptions
) -> LMCost:
    rate, is_server = _rate(devices.accelerator, keys.dtype.value, given), bool(keys.url)
    gpus = _gpus_of(size, keys, devices)
    weights = size.parameters * DTYPE_BYTES[devices.accelerator.resolve_dtype(keys.dtype.value)]
    flop, seconds = 0.0, 0.0
    for one in readings:
        reading, writing = _flop(size, one, is_server)
        flop += reading + writing
        seconds += reading / rate + max(writing / rate, one.steps * weights / devices.accelerator.bandwidth)
    put = sum(one.put for one in readings)
    read = put if is_server else sum(one.read_once for one in readings)
    generated = sum(one.generated for one in readings)
    return LMCost(size.name, size.parameters, gpus, put, read, generated, flop, gpus * seconds / 3600)


def _flop(size: ModelSize, one: Reading, is_server: bool) -> tuple[float, float]:
    """Of what is read, and of what is generated."""
    token = size.flop_per_token(one.longest)
    read = (one.put if is_server else one.read_once) * token + one.predicted * size.flop_per_prediction
    return read, one.generated * (token + size.flop_per_prediction)


def _gpus_of(size: ModelSize, keys: LMConfig, devices: Devices) -> int:
    """That hold one LM together."""
    accelerator = devices.accelerator
    dtype = accelerator.resolve_dtype(keys.dtype.value)
    tokens = tokens_per_pass(LMShape(size.layers, size.hidden), True, keys.tokens_per_batch)
    num_bytes = score_bytes(size, tokens, dtype)
    needed = max(gpus_for(num_bytes, accelerator.memory_gb), math.ceil(keys.gpus_per_replica or 1))
    if needed > devices.count:
        raise UserError(
            f"--gpus is {devices}, but {size.name} takes {needed} of them ({num_bytes / 1e9:.0f} GB); expected such as "
            f"--gpus {needed}x{accelerator.name}"
        )
    return needed


def _embedding_costs(
    config: EvaluationConfig, accelerator: DeviceModel, num: int, documents: int, given: EvaluationAssumptions
) -> Iterator[EmbeddingCost]:
    rate, lengths = _rate(accelerator, config.index.dtype.value, given), lengths_of(config)
    for name, path in _retrievers(config).items():
        encoder = newest_encoder(Path(path).expanduser())  # of a run or an index, which hold their documents' vectors
        size = _known_or_given(encoder_size, str(encoder or path), given.retriever_parameters)
        sides = [(0 if encoder else documents, lengths.document), (num, query_tokens(config))]
        tokens = sum(count * length for count, length in sides)
        flop = sum(count * length * size.flop_per_token(length) for count, length in sides)
        yield EmbeddingCost(name, path, size.parameters, bool(encoder), tokens, flop, flop / rate / 3600)


def _retrievers(config: EvaluationConfig) -> dict[str, str]:
    """Those that some method asks, by name; a local search engine asks `replug` where it has a path."""
    paths = {**({REPLUG: config.retriever.path} if config.retriever.path else {}), **config.retrievers}
    if config.evaluation == "internet_qa":
        return {name: path for name, path in paths.items() if name == REPLUG}
    asked = {method.source for method in evaluation_methods(config)} - set(WITHOUT_RETRIEVER)
    return {name: path for name, path in paths.items() if name in asked}


def _notes(config: EvaluationConfig, lms: Sequence[LMCost], retrievers: Sequence[EmbeddingCost]) -> Iterator[str]:
    """What the reader should know before believing the figures."""
    yield _lengths_note(config)
    for one in retrievers:
        if not one.is_indexed and not _is_known(one.path):
            yield f"{one.path} is not there: its documents are counted as embedded; a run or an index would bring them"
    if any(method.source == BM25 for method in evaluation_methods(config)):
        yield "BM25 works on the processor and is not counted"
    for lm in lms:
        if lm.gpus > 1:
            yield f"{lm.name} is spread over {lm.gpus} GPUs, one at work at a time; the hours are of all of them"
    if config.lm.url or (has_rerank_lm(config) and config.rerank_lm.url):
        yield "the LM's server is counted as if it ran on these GPUs and read each prompt whole"


def _is_known(path: str) -> bool:
    try:
        encoder_size(path)
    except UserError:
        return False
    return True


def _lengths_note(config: EvaluationConfig) -> str:
    of = lengths_of(config)
    if config.evaluation not in ("lm", "tokens"):
        return f"a question is taken for {of.question} tokens, a document for {of.document} (data.document_tokens)"
    key, (before, scored) = "texts.context_tokens" if config.texts.path else "data.window", text_tokens(config)
    told = f"texts are taken for {before} + {scored} tokens ({key})"
    return f"{told}, a document for {of.document} (data.document_tokens)"


def evaluation_json(plan: EvaluationPlan) -> dict[str, Any]:
    """What a plan says; these names stay."""
    hours, count = plan.hours, plan.devices.count
    total = sum(hours.values())
    return {
        "devices": str(plan.devices),
        "evaluation": plan.config.evaluation,
        "examples": plan.num_examples,
        "documents": plan.num_documents,
        "lms": [asdict(one) for one in plan.lms],
        "retrievers": [asdict(one) for one in plan.retrievers],
        "tokens": {
            "score": sum(one.tokens_read + one.tokens_generated for one in plan.lms),
            "embed": sum(one.tokens for one in plan.retrievers),
        },
        "hours": hours,
        "gpu_hours": total,
        "wall_hours": total / count,
        "price": plan.price,
        "dollars": None if plan.price is None else total * plan.price,
        "notes": list(plan.notes),
    }
