"""What each evaluation measures: its texts or questions, read and drawn, and the task that is made of them."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replug.configs.errors import UserError
from replug.configs.rules import QUESTION, RECALL_DEPTH
from replug.configs.schema import Evaluation, EvaluationConfig
from replug.data.records import Window
from replug.data.sources.records import FieldMap, SourceText
from replug.data.sources.rejected import Rejected
from replug.data.sources.shards import plan_source_shards, read_source_shard
from replug.data.store import Corpus, PreparedSet
from replug.data.tokenizing import load_plain, token_offsets
from replug.evals.evidence import EvidenceBook
from replug.evals.examples import Example
from replug.evals.loop import Task
from replug.evals.mmlu import NUM_DEMONSTRATIONS as NUM_MMLU_SHOTS
from replug.evals.mmlu import read_mmlu
from replug.evals.open_qa import NUM_DEMONSTRATIONS as NUM_QA_SHOTS
from replug.evals.open_qa import OpenQuestion, draw_demonstrations, hold_out_demonstrations, read_questions
from replug.evals.retrieval import gold_rows
from replug.evals.tasks.lm import LanguageModelling
from replug.evals.tasks.mmlu import Mmlu
from replug.evals.tasks.open_qa import OpenQa
from replug.evals.tasks.retrieval import Retrieval
from replug.evals.windows import windows_of
from replug.models.build import lm_tokenizer_json
from replug.models.caching_lm import CachingLM
from replug.models.preparing import prepared_set
from replug.models.prompt import PromptTemplate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptedLM:
    """The LM that is asked, and how texts are put to it."""

    lm: CachingLM
    template: PromptTemplate


@dataclass(frozen=True)
class EvalDataset:
    """What is measured: a text to retrieve for by example (empty where nothing can be retrieved), and then the task."""

    queries: Sequence[str]
    make_task: Callable[[PromptedLM | None, EvidenceBook], Task]


def text_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Windows of whole texts, or the held-out texts of the prepared set."""
    windows = list(_windows(config, corpus))[: config.texts.max_windows]
    if alone := sum(not window.context.strip() for window in windows):
        log.info(f"{alone} of {len(windows)} windows begin a text: nothing is retrieved for them")
    tokens_of = token_texts(config) if config.evaluation is Evaluation.tokens else None

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> LanguageModelling:
        assert asked is not None
        return LanguageModelling(asked.lm, asked.template, windows, tokens_of)

    return EvalDataset([window.context for window in windows], make_task)


def token_texts(config: EvaluationConfig) -> Callable[[str], list[str]]:
    """Cuts a text into the texts of the LM's tokens, which join to it."""
    tokenizer = load_plain(lm_tokenizer_json(config.lm))

    def cut(text: str) -> list[str]:
        [offsets] = token_offsets(tokenizer, [text])
        borders = [0, *(offsets[token][1] for token in range(len(offsets)))]
        return [text[start:end] for start, end in itertools.pairwise(borders)]

    return cut


def _windows(config: EvaluationConfig, corpus: Corpus | None) -> Iterable[Window]:
    if config.texts.path:
        tokenizer = load_plain(lm_tokenizer_json(config.lm))
        return windows_of(_texts(config), tokenizer, config.texts.window)
    data = (
        corpus
        if isinstance(corpus, PreparedSet)
        else prepared_set(config.run_config(), Path(config.out).expanduser() / "data")
    )
    return data.heldout.windows()


def _texts(config: EvaluationConfig) -> Iterator[SourceText]:
    data = config.data
    fields = FieldMap(data.text_field, data.id_field, data.domain_field, data.new_text_at, data.max_text_characters)
    for source_shard in plan_source_shards(str(config.texts.path), in_one_piece=data.new_text_at is not None):
        for _, item in read_source_shard(source_shard, fields):
            if isinstance(item, Rejected):
                raise UserError(f"texts.path: {item}; every text must be readable to be measured whole")
            yield item


def mmlu_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """The first questions of every dataset."""
    shots = NUM_MMLU_SHOTS if config.questions.shots is None else config.questions.shots
    mmlu = read_mmlu(Path(str(config.questions.path)).expanduser(), shots)
    by_subject = {name: [q for q in mmlu.questions if q.example.group == name] for name in mmlu.demonstrations}
    questions = [question for some in by_subject.values() for question in some[: config.questions.max_questions]]

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> Mmlu:
        assert asked is not None
        return Mmlu(asked.lm, asked.template, questions, mmlu)

    return EvalDataset(_queries(config, [question.example for question in questions]), make_task)


def open_qa_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Drawn questions; those that demonstrations are made of are searched for behind them."""
    keys = config.questions
    shots = NUM_QA_SHOTS if keys.shots is None else keys.shots
    pool = read_questions(Path(str(keys.path)).expanduser())
    if keys.demonstrations:
        questions = _draw(pool, keys.max_questions, config.seed)
        demonstrations = draw_demonstrations(
            read_questions(Path(keys.demonstrations).expanduser()), questions, shots, config.seed
        )
    else:
        demonstrations, rest = hold_out_demonstrations(pool, shots, config.seed)
        questions = _draw(rest, keys.max_questions, config.seed)

    def make_task(asked: PromptedLM | None, book: EvidenceBook) -> OpenQa:
        assert asked is not None
        places = range(len(questions), len(questions) + len(demonstrations))
        documents = {
            method.name: [book.nearest(method, place) for place in places] if keys.documents_in_shots else None
            for method in book.methods
        }
        return OpenQa(asked.lm, asked.template, questions, demonstrations, documents, keys.max_new_tokens)

    asked_for = [question.example for question in [*questions, *demonstrations]]
    return EvalDataset(_queries(config, asked_for), make_task)


def retrieval_dataset(config: EvaluationConfig, corpus: Corpus | None) -> EvalDataset:
    """Drawn questions among those that name gold documents."""
    assert corpus is not None
    if len(corpus.corpus) < RECALL_DEPTH:
        raise UserError(f"data: {len(corpus.corpus)} documents; evaluation=retrieval expects {RECALL_DEPTH} or more")
    pool = [q for q in read_questions(Path(str(config.questions.path)).expanduser()) if q.example.gold]
    if not pool:
        raise UserError(f"questions.path: no question of {config.questions.path} names gold documents")
    examples = [question.example for question in _draw(pool, config.questions.max_questions, config.seed)]
    rows_of = corpus.corpus.rows_of(doc for example in examples for doc in example.gold)
    gold = gold_rows([example.gold for example in examples], rows_of)
    return EvalDataset(_queries(config, examples), lambda asked, book: Retrieval(examples, gold))


def _queries(config: EvaluationConfig, examples: Iterable[Example]) -> list[str]:
    """What is searched for: the questions in the form of `questions.query`."""
    return [config.questions.query.replace(QUESTION, example.query) for example in examples]


def _draw(questions: list[OpenQuestion], num: int | None, seed: int) -> list[OpenQuestion]:
    """So many questions, drawn by the seed, in the file's order; all where there are no more."""
    if num is None or num >= len(questions):
        return questions
    rows = np.random.default_rng([seed, 3]).choice(len(questions), size=num, replace=False)
    return [questions[row] for row in sorted(rows)]


DATASETS: dict[Evaluation, Callable[[EvaluationConfig, Corpus | None], EvalDataset]] = {
    Evaluation.lm: text_dataset,
    Evaluation.tokens: text_dataset,
    Evaluation.mmlu: mmlu_dataset,
    Evaluation.open_qa: open_qa_dataset,
    Evaluation.retrieval: retrieval_dataset,
}
