"""All that is known before the LM is opened: questions, shots, their gold evidence, and what was searched for them.

Variants of one question (`InternetQuestion.origin`) are on one side of every border: shown, measured, and of what is
measured the part that weights are fitted on. Gold evidence is texts of the set itself, or documents of the corpus.
A search engine finds passages for every question: one on the web, or the documents of a corpus found as for any method.
What engines answered and pages are kept in a snapshot, so an interrupted search asks nobody twice.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replug.answering.prompts import AnswerPrompts, PromptForm, Shot, fit_shots
from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig, QuestionsConfig
from replug.config.methods import BM25, GOLD, NONE, REPLUG, Method
from replug.data.hashing import hash64
from replug.data.progress import Progress
from replug.data.store import CorpusStore
from replug.evals.evidence import EvidenceBook
from replug.evals.internet_costs import NumTokens
from replug.evals.internet_sets import GOLD_EVIDENCE, InternetQuestion, QuestionSet
from replug.evals.kinds import PromptedLM
from replug.evals.questions import demonstration_seed, draw_demonstrations, draw_questions, not_among
from replug.models.lm_source import LMSource
from replug.web.records import EngineResult, FoundEvidence, Passage

if TYPE_CHECKING:
    from replug.web.evidence import EvidenceFinder


Texts = Callable[[Iterable[str]], Mapping[str, str]]  # of documents by their ids, those that there are


def texts_by_id(corpus: CorpusStore) -> Texts:
    """Reads documents of a corpus."""

    def texts(ids: Iterable[str]) -> dict[str, str]:
        rows = corpus.rows_of(ids)
        return dict(zip(rows, corpus.texts(list(rows.values())), strict=True))

    return texts


def gold_evidence(questions: Sequence[InternetQuestion], texts: Texts | None, needed_for: str) -> dict[str, str]:
    """The evidence of every question, by its id.

    A question of classification that nothing answers (FEVER's NOT ENOUGH INFO) has the evidence of another one, which
    its id chooses: Thorne et al. 2018 sample it likewise. Raises UserError for a question without evidence, with
    what it is `needed_for`.
    """
    known = {question.example.id: _own(question, texts) for question in questions}
    donors = sorted({text for text in known.values() if text})
    found: dict[str, str] = {}
    for question in questions:
        text = known[question.example.id]
        if not text and question.labels and donors:
            text = donors[hash64(question.example.id) % len(donors)]
        if text is None:
            raise UserError(
                f"question {question.example.id} has no gold evidence, which {needed_for} needs; expected the field "
                f"{GOLD_EVIDENCE}, a text, or ids of documents of data.corpus (docs/evaluation.md says which)"
            )
        found[question.example.id] = text
    return found


def _own(question: InternetQuestion, texts: Texts | None) -> str | None:
    if question.evidence:
        return " ".join(question.evidence)
    if not question.evidence_ids:
        return None
    if texts is None:
        raise UserError(
            f"question {question.example.id} names documents as its gold evidence, but there is no corpus to read them "
            f"in; expected data.corpus, or the field {GOLD_EVIDENCE}"
        )
    of = texts(question.evidence_ids)
    if missing := [name for name in question.evidence_ids if name not in of]:
        raise UserError(
            f"question {question.example.id} names the document {missing[0]} as its gold evidence, which data.corpus "
            f"does not hold; expected a corpus with it, or the field {GOLD_EVIDENCE}"
        )
    return " ".join(of[name] for name in question.evidence_ids)


NUM_SHOTS = 15
VALIDATION_PARTS = 10  # one of so many parts by the hash


def is_validation(question: InternetQuestion) -> bool:
    """Whether weights may be fitted on it: a tenth of all, which follows from the question alone."""
    return hash64(question.origin) % VALIDATION_PARTS == 0


def plan_questions(
    keys: QuestionsConfig, of: QuestionSet, seed: int, with_evidence: bool = True
) -> tuple[list[InternetQuestion], list[InternetQuestion]]:
    """Return the questions that are measured, in the file's order, and those that are shown before each.

    Both are drawn by the seed; `with_evidence`, shots have some. Raises UserError where there are too few.
    """
    num_shots = NUM_SHOTS if keys.shots is None else keys.shots
    questions = of.read(Path(str(keys.path)).expanduser())
    if keys.demonstrations is not None:
        measured = draw_questions(questions, keys.max_questions, seed)
        pool = of.read_shots(Path(keys.demonstrations).expanduser())
        free = _telling(pool, with_evidence, num_shots, keys.demonstrations, measured)
        return measured, draw_demonstrations(free, measured, num_shots, demonstration_seed(keys, seed))
    free = _telling(questions, with_evidence, num_shots, str(keys.path))
    shots = draw_demonstrations(free, (), num_shots, seed)
    rest = not_among(_without(questions, shots), shots)
    if not rest:
        raise UserError(f"{num_shots} shots leave none of {len(questions)} questions to measure; ask for fewer")
    return draw_questions(rest, keys.max_questions, seed), shots


def _telling(
    pool: Sequence[InternetQuestion],
    with_evidence: bool,
    num: int,
    path: str,
    measured: Sequence[InternetQuestion] = (),
) -> list[InternetQuestion]:
    """Those that may be shots: none that is measured, none without evidence, no two variants of one question."""
    # Of a set of classification it counts that nothing answers a question.
    free = [
        one for one in _without(pool, measured) if not with_evidence or one.evidence or one.evidence_ids or one.labels
    ]
    of_each = list({question.origin: question for question in reversed(free)}.values())[::-1]
    if len(of_each) < num:
        raise UserError(
            f"{num} shots are asked for, but {len(of_each)} of {len(pool)} questions in {path} "
            f"{'have gold evidence and ' if with_evidence else ''}are not measured; expected more of them "
            "(questions.demonstrations), or fewer shots (questions.shots)"
        )
    return of_each


def _without(questions: Sequence[InternetQuestion], others: Sequence[InternetQuestion]) -> list[InternetQuestion]:
    origins = {other.origin for other in others}
    return [question for question in questions if question.origin not in origins]


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """`gold` is by question id: of those asked with it, and none else. `found` is empty where no method reranks."""

    methods: tuple[Method, ...]
    questions: tuple[InternetQuestion, ...]
    shots: tuple[Shot, ...]
    metric: str
    form: PromptForm
    gold: Mapping[str, str]
    found: Mapping[str, FoundEvidence]

    @property
    def labels(self) -> tuple[str, ...]:
        """All answers that there are; none where answers are free."""
        return self.questions[0].labels

    @property
    def num_passages(self) -> int:
        """As many as any method reads; 0 where none reranks."""
        return max(method.k for method in self.methods)

    def passages(self, question: InternetQuestion) -> Sequence[Passage]:
        return self.found[question.example.id].passages[: self.num_passages]

    def evidence(self, question: InternetQuestion) -> Iterator[str]:
        """Every text that a question is asked with."""
        if question.example.id in self.gold:
            yield self.gold[question.example.id]
        if self.num_passages:
            yield from (passage.text for passage in self.passages(question))


def plan(config: EvaluationConfig, methods: Sequence[Method], of: QuestionSet, texts: Texts | None) -> Prepared:
    """What a configuration measures, before anything is searched for. Raises UserError for gold evidence that lacks."""
    reads = any(method.source != NONE for method in methods)
    measured, shots = plan_questions(config.questions, of, config.seed, with_evidence=reads)
    shown = gold_evidence(shots, texts, "a shot (questions.shots)") if reads else {}
    asked_with_gold = measured if any(method.source == GOLD for method in methods) else []
    return Prepared(
        tuple(methods),
        tuple(measured),
        tuple(Shot(shot.example.query, shot.answers[0], shown.get(shot.example.id)) for shot in shots),
        of.metric,
        PromptForm(question_first=config.questions.question_first),
        gold_evidence(asked_with_gold, texts, "the method gold"),
        {},
    )


def fitting_prompts(prepared: Prepared, lm: PromptedLM, max_new_tokens: int) -> AnswerPrompts:
    """With as many shots as fit beside the longest question and evidence of the set.

    An LM whose tokenizer or limit is not known has all shots: what is too long is refused when it is asked.
    """
    prompts, count, limit = AnswerPrompts(prepared.form, prepared.shots), token_counter(lm.source), lm.lm.max_tokens
    if count is None or limit is None:
        return prompts
    # Every question closed book, and with every text that it is asked with.
    asked = ((one.example.query, text) for one in prepared.questions for text in (None, *prepared.evidence(one)))
    fitting = fit_shots(prompts, asked, count, limit, max_new_tokens)
    if len(fitting.shots) < len(prompts.shots):
        log.warning(
            f"{len(fitting.shots)} of {len(prompts.shots)} shots fit beside the longest evidence: the LM holds {limit} "
            "tokens"
        )
    return fitting


def token_counter(source: LMSource | None) -> NumTokens | None:
    """Counts the tokens of a text; None where the LM's tokenizer is not known."""
    tokenizer = source.tokenizer() if source else None
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


LOCAL, SEARCH = "local", "search"  # the engine; the name of what is found for it


def searches(config: EvaluationConfig) -> list[Method]:
    """What the local engine finds: by `retriever.path` where there is one, else by BM25. None of other engines."""
    if config.web.engine != LOCAL or not any(name not in ("none", "gold") for name in config.methods):
        return []
    return [Method(SEARCH, REPLUG if config.retriever.path else BM25, config.web.num_results, False)]


class CorpusEngine:
    """A `SearchEngine` of what was found in a corpus before: results by query."""

    def __init__(self, source: str, results: Mapping[str, Sequence[EngineResult]]) -> None:
        self.identity, self._results = f"local {source}", results

    def search(self, query: str, num_results: int) -> list[EngineResult]:
        return list(self._results[query][:num_results])


def corpus_engine(method: Method, book: EvidenceBook, queries: Sequence[str]) -> CorpusEngine:
    """Return the documents that a book has for every query."""
    results = {}
    for row, query in enumerate(queries):
        evidence = book.of(row)[method.name]
        found = zip(book.ids(evidence.doc_rows), evidence.texts, book.similarities(method, row), strict=False)
        results[query] = [
            EngineResult(f"document:{name}", "", rank, text, name, float(similarity))
            for rank, (name, text, similarity) in enumerate(found, start=1)
            if method.source != BM25 or similarity > 0  # a document that BM25 finds no word in is none
        ]
    return CorpusEngine(method.source, results)


def find_for_all(finder: "EvidenceFinder", queries: Mapping[str, str]) -> dict[str, FoundEvidence]:
    """By question id, given what is searched for by id. Raises what the finder does."""
    progress, found = Progress("search", len(queries)), {}
    for identifier, query in queries.items():
        found[identifier] = finder.find(query)
        progress.advance()
    without = sum(not one.passages for one in found.values())
    if without:
        counts = sum((Counter(one.failures) for one in found.values()), Counter())
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        log.warning(
            f"{without} of {len(found)} questions have no passage, so methods that rerank answer them with nothing"
            f"{f'; what went wrong: {reasons}' if reasons else ''}"
        )
    return found
