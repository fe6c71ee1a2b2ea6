"""What an evaluation's LM has to read and write: the prompts of each kind of evaluation, in tokens. Pure.

Lengths that no key tells are assumed (`TextLengths`). Documents of different retrievers are taken to differ. What an LM
cannot hold is cut or dropped when it runs, and costs less than is counted here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import GENREAD, GOLD, LONG_CONTEXT, NONE, Method
from replug.config.rules import evaluation_methods, has_rerank_lm

LM, RERANK_LM = "lm", "rerank_lm"
LETTERS = 4  # of a question of MMLU
SHOTS = {"mmlu": 5, "open_qa": 16, "popqa": 15, "internet_qa": 15}  # where questions.shots is not set
OPENINGS = {"mmlu": 57, "popqa": 16}  # subjects and relations, which have shots of their own
SAMPLES, SAMPLES_ALONE = 4, 50  # answering/answerer.py
LABELS = {"fever": 3, "strategyqa": 2}  # answers that there are, where nothing is sampled
WRITTEN_TOKENS = 150  # of a document that the LM writes (evals/lm_passes.py)


@dataclass(frozen=True, slots=True)
class TextLengths:
    """In tokens. A question counts with its choices and labels; English prose has four characters a token."""

    question: int
    answer: int = 5
    document: int = 128
    long_context: int = 1024
    passage: int = 150  # of six sentences, that a search engine's page is cut into


QUESTION_TOKENS = {"mmlu": 100, "open_qa": 20, "popqa": 15, "internet_qa": 20}


@dataclass(frozen=True, slots=True)
class Reading:
    """`count` prompts of an `opening` that many share, and a `prefix`, after which stand `ends` of `end_tokens` each.

    Local weights read an opening `openings` times and a prefix once for all its ends; a server reads all of each. Then
    `samples` answers of `new_tokens` are generated for each prompt; prompts of one of the `calls` are decoded together.
    """

    count: int
    prefix: int
    opening: int = 0
    openings: int = 0
    ends: int = 1
    end_tokens: int = 0
    new_tokens: int = 0
    samples: int = 1
    calls: int = 0

    @property
    def put(self) -> int:
        """Tokens of all texts as they are put to an LM that reads each whole."""
        return self.count * self.ends * (self.opening + self.prefix + self.end_tokens)

    @property
    def read_once(self) -> int:
        """Tokens where what texts share is read once."""
        return self.openings * self.opening + self.count * (self.prefix + self.ends * self.end_tokens)

    @property
    def predicted(self) -> int:
        """Positions whose next token is scored."""
        return self.count * self.ends * self.end_tokens

    @property
    def generated(self) -> int:
        return self.count * self.samples * self.new_tokens

    @property
    def steps(self) -> int:
        """Passes in which tokens are generated: each reads all weights."""
        return self.calls * self.new_tokens

    @property
    def longest(self) -> int:
        return self.opening + self.prefix + self.end_tokens + self.new_tokens


def lengths_of(config: EvaluationConfig) -> TextLengths:
    usual = TextLengths(question=QUESTION_TOKENS.get(config.evaluation, 20))
    document = config.data.document_tokens or config.data.window
    long_context = config.texts.long_context_tokens or usual.long_context
    return TextLengths(usual.question, usual.answer, document, long_context, 25 * config.web.sentences_per_passage)


def readings_of(config: EvaluationConfig, num_examples: int) -> dict[str, list[Reading]]:
    """By the LM that reads; none for `retrieval`, which asks no LM. Raises UserError for an unknown evaluation."""
    methods, lengths = evaluation_methods(config), lengths_of(config)
    kinds = {"lm": _of_texts, "tokens": _of_texts, "mmlu": _of_mmlu, "open_qa": _of_answers, "popqa": _of_answers}
    if config.evaluation == "internet_qa":
        return _of_passages(config, methods, num_examples, lengths)
    if config.evaluation == "retrieval":
        return {}
    if (of := kinds.get(config.evaluation)) is None:
        known = ", ".join((*kinds, "internet_qa", "retrieval"))
        raise UserError(f"evaluation: no plan is known of {config.evaluation!r}; expected one of {known}")
    reranked = _of_reranking(config, methods, num_examples, lengths)
    return {LM: [*reranked, *of(config, methods, num_examples, lengths)]}


def query_tokens(config: EvaluationConfig) -> int:
    """Of what is searched for."""
    if config.evaluation in ("lm", "tokens"):
        return config.texts.query_tokens if config.texts.path else config.data.window
    return QUESTION_TOKENS.get(config.evaluation, 20)


def text_tokens(config: EvaluationConfig) -> tuple[int, int]:
    """Of language modelling: what stands before a span, and the span."""
    texts, window = config.texts, config.data.window
    return (texts.context_tokens, texts.scored_tokens) if texts.path else (window, window)


def _of_reranking(config: EvaluationConfig, methods: Sequence[Method], num: int, of: TextLengths) -> Iterator[Reading]:
    """The query is scored after each document."""
    for method in methods:
        if method.is_reranked:
            yield Reading(num * method.k, of.document, end_tokens=query_tokens(config))


def _of_texts(config: EvaluationConfig, methods: Sequence[Method], num: int, of: TextLengths) -> Iterator[Reading]:
    """A document that several methods of one source read is scored once."""
    before, scored = text_tokens(config)
    if any(method.source == LONG_CONTEXT for method in methods):
        yield Reading(num, max(0, of.long_context - scored), end_tokens=scored)
    for number, documents in _distinct_documents(methods):
        yield Reading(num * number, before + documents * of.document, end_tokens=scored)


def _distinct_documents(methods: Sequence[Method]) -> Iterator[tuple[int, int]]:
    """Prompts of an example, and documents in each."""
    if any(method.source == NONE for method in methods):
        yield 1, 0
    alone = [method for method in methods if method.takes_from_corpus and not method.is_concatenated]
    for source in sorted({method.found_by for method in alone}):
        yield max(method.num_read for method in alone if method.found_by == source), 1
    for method in methods:
        if method.is_concatenated:
            yield 1, method.k


def _prompts_of(method: Method) -> tuple[int, int]:
    """Prompts of a question, and documents in each."""
    if method.k == 0:
        return 1, 0
    return (1, method.k) if method.is_concatenated else (method.num_read, 1)


def _opening(config: EvaluationConfig, method: Method, of: TextLengths) -> int:
    shots = SHOTS[config.evaluation] if config.questions.shots is None else config.questions.shots
    document = _document(method, of) if method.k and config.questions.documents_in_shots else 0
    return shots * (of.question + of.answer + document)


def _document(method: Method, of: TextLengths) -> int:
    return WRITTEN_TOKENS if method.source == GENREAD else of.document


def _of_mmlu(config: EvaluationConfig, methods: Sequence[Method], num: int, of: TextLengths) -> Iterator[Reading]:
    """The letters of a prompt are scored together; demonstrations are a method's own where they have documents."""
    yield from _of_writing(methods, num, of)
    for method in methods:
        count, documents = _prompts_of(method)
        prefix, opening = of.question + documents * _document(method, of), _opening(config, method, of)
        yield Reading(num * count, prefix, opening, OPENINGS["mmlu"], LETTERS, end_tokens=1)


def _of_answers(config: EvaluationConfig, methods: Sequence[Method], num: int, of: TextLengths) -> Iterator[Reading]:
    """Answers are taken to be as long as they may be."""
    yield from _of_writing(methods, num, of)
    for method in methods:
        count, documents = _prompts_of(method)
        prefix, opening = of.question + documents * _document(method, of), _opening(config, method, of)
        openings, new = OPENINGS.get(config.evaluation, 1), config.questions.max_new_tokens
        yield Reading(num * count, prefix, opening, openings, new_tokens=new, calls=num)


def _of_writing(methods: Sequence[Method], num: int, of: TextLengths) -> Iterator[Reading]:
    if any(method.source == GENREAD for method in methods):
        yield Reading(num, of.question, new_tokens=WRITTEN_TOKENS, calls=num)


def _of_passages(
    config: EvaluationConfig, methods: Sequence[Method], num: int, of: TextLengths
) -> dict[str, list[Reading]]:
    """As `evals.internet_costs` counts them: every factor is asked for, and no two samples are alike."""
    labels, shot = LABELS.get(str(config.questions.dataset), 0), of.question + of.answer
    shots = SHOTS["internet_qa"] if config.questions.shots is None else config.questions.shots
    alone, open_book = shots * shot, shots * (shot + of.passage)
    asked: list[Reading] = []
    scored: list[Reading] = []
    for source, opening, passage in ((NONE, alone, 0), (GOLD, open_book, of.passage)):
        if any(method.source == source for method in methods):
            prefix = passage + of.question
            (scored if labels else asked).append(_tried(num, prefix, opening, labels, SAMPLES_ALONE, of, num))
    if passages := max((method.k for method in methods), default=0):
        count, asking = num * passages, of.passage + of.question
        if not labels:
            asked.append(_tried(count, asking, open_book, 0, SAMPLES, of, num))
        candidates = labels or SAMPLES
        every = passages if any(method.source == "rag_full" for method in methods) else 1
        ends = (
            (asking, candidates * every, of.answer),
            (of.passage, 1, of.question),
            (of.passage, candidates, of.answer),
            (of.passage, candidates, of.answer + of.question),
        )
        scored += [Reading(count, prefix, open_book, 1, number, end) for prefix, number, end in ends]
    return {LM: asked, RERANK_LM: scored} if has_rerank_lm(config) else {LM: [*asked, *scored]}


def _tried(count: int, prefix: int, opening: int, labels: int, samples: int, of: TextLengths, calls: int) -> Reading:
    """Labels are scored; else answers are sampled, of the length of an answer."""
    if labels:
        return Reading(count, prefix, opening, 1, labels, of.answer)
    return Reading(count, prefix, opening, 1, new_tokens=of.answer, samples=samples, calls=calls)
