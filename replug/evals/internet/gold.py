"""The evidence that a data set names for its questions: texts of its own, or documents of the corpus."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from replug.config.errors import UserError
from replug.data.hashing import hash64
from replug.data.store import CorpusStore
from replug.evals.internet.questions import GOLD_EVIDENCE, InternetQuestion

Texts = Callable[[Iterable[str]], Mapping[str, str]]  # of documents by their ids, those that there are


def texts_by_id(corpus: CorpusStore) -> Texts:
    """Reads documents of a corpus."""

    def texts(ids: Iterable[str]) -> dict[str, str]:
        rows = corpus.rows_of(ids)
        return dict(zip(rows, corpus.texts(list(rows.values())), strict=True))

    return texts


def tells_evidence(question: InternetQuestion) -> bool:
    """Whether it is known what answers the question, or that nothing does: of a set of classification, that counts."""
    return bool(question.evidence or question.evidence_ids or question.labels)


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
        text = known[question.example.id] or _anothers(question, donors)
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


def _anothers(question: InternetQuestion, donors: Sequence[str]) -> str | None:
    if not question.labels or not donors:
        return None
    return donors[hash64(question.example.id) % len(donors)]
