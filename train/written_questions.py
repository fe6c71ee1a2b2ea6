"""Questions that the run's own LM writes about documents, each filtered by rules, by BM25 and by the LM's likelihood.

A rule takes the answer out of a sentence (`data.questions`), and the LM words the question (after Alberti et al. 2019,
and InPars, Bonifacio et al. 2022). A question is kept if it ends with a question mark and does not hold its answer,
BM25 finds its document among the first few, and its document makes the answer likelier.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from replug.data.answers import has_answer
from replug.data.progress import Progress
from replug.data.records import Document
from replug.data.rows import one_line, question_prompt
from replug.data.words import search_words
from replug.evals.questions import OpenQuestion
from replug.index_workers.bm25 import search_bm25
from replug.models.black_box_lm import AsyncLM
from replug.models.generation import GenerationOptions

log = logging.getLogger(__name__)

# Passage, answer and question, as demonstrations for the LM; from no data set.
SHOTS = (
    (
        "Eiffel Tower. The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris. It was designed "
        "by the company of engineer Gustave Eiffel and built from 1887 to 1889 for the 1889 World's Fair.",
        "Gustave Eiffel",
        "whose company designed the Eiffel Tower in Paris?",
    ),
    (
        "The Old Man and the Sea. The Old Man and the Sea is a short novel written by Ernest Hemingway in Cuba in 1951 "
        "and published in 1952. It won the Pulitzer Prize for Fiction in 1953.",
        "1952",
        "when was the novel The Old Man and the Sea published?",
    ),
    (
        "Volleyball. Volleyball is a team sport in which two teams of six players are separated by a net. It was "
        "invented in 1895 by William G. Morgan in Holyoke, Massachusetts.",
        "six",
        "how many players does a volleyball team have on the court?",
    ),
)
PASSAGE_CHARACTERS = 420
OPTIONS = GenerationOptions(24, stop="\n", temperature=0.6)
PROMPTS_PER_CALL = 16
WORDS = range(3, 26)  # number of search words in a question
FOUND_AMONG = 20  # documents that BM25 ranks first
LEAST_GAIN = 0.5  # nats a token that the document adds to the answer

Pairs = Sequence[tuple[OpenQuestion, Document]]


def write_questions(
    lm: AsyncLM,
    pairs: Pairs,
    others: Sequence[str],
    most: int,
    seed: int,
    has_logprobs: bool,
    check: Callable[[], None],
) -> list[OpenQuestion]:
    """Let the LM word questions about documents, and return at most `most` that pass the filters.

    BM25 looks for a question's document among `others` too. `check` is called between calls of the LM; it may raise to
    end the work. An LM that `has_logprobs` also measures whether a document makes its answer likelier.
    """
    kept: list[tuple[OpenQuestion, Document]] = []
    known: set[str] = set()
    for (question, document), text in zip(pairs, _worded(lm, pairs, seed, check), strict=True):
        worded = one_line(text.partition("?")[0]) + "?" * ("?" in text)
        is_good = worded.endswith("?") and len(search_words(worded)) in WORDS and worded.lower() not in known
        if is_good and not has_answer(worded, question.answers):
            known.add(worded.lower())
            kept.append((replace(question, example=replace(question.example, query=worded)), document))
    by_rules = len(kept)
    kept = _found_by_bm25(kept, others)
    by_bm25 = len(kept)
    kept = _helped_by_document(lm, kept[: 2 * most], check) if has_logprobs else kept
    log.info(
        f"the LM wrote {len(pairs)} questions: {by_rules} are kept by rules, {by_bm25} of these found by BM25, "
        f"{len(kept)} of these with a document that makes the answer likelier"
    )
    return [question for question, _ in kept[:most]]


def _worded(lm: AsyncLM, pairs: Pairs, seed: int, check: Callable[[], None]) -> Iterator[str]:
    """Yield the LM's text for each answer and passage."""
    opening = "".join(f"Passage: {of}\nAnswer: {answer}\nQuestion: {question}\n\n" for of, answer, question in SHOTS)
    options = replace(OPTIONS, seed=seed, opening=opening)
    prompts = [f"{opening}Passage: {_passage(*pair)}\nAnswer: {pair[0].answers[0]}\nQuestion:" for pair in pairs]
    progress = Progress("questions that the LM writes", len(prompts))
    for start in range(0, len(prompts), PROMPTS_PER_CALL):
        check()
        some = prompts[start : start + PROMPTS_PER_CALL]
        for [drawn] in lm.submit_samples(some, options).result():
            yield drawn.text
        progress.advance(len(some))


def _passage(question: OpenQuestion, document: Document) -> str:
    """Return an excerpt of the document, with the answer in it."""
    text = one_line(document.text)
    place = text.find(one_line(question.answers[0]))
    start = 0 if place < PASSAGE_CHARACTERS // 2 else place - PASSAGE_CHARACTERS // 2
    return text[start : start + PASSAGE_CHARACTERS]


def _found_by_bm25(pairs: Pairs, others: Sequence[str]) -> list[tuple[OpenQuestion, Document]]:
    if not pairs:
        return []
    texts = list(dict.fromkeys([*(document.text for _, document in pairs), *others]))
    place = {text: number for number, text in enumerate(texts)}
    own = np.array([place[document.text] for _, document in pairs])
    rows, scores = search_bm25(lambda: iter(texts), [question.example.query for question, _ in pairs], FOUND_AMONG)
    hits = (rows == own[:, None]) & (scores > 0)
    return [pair for pair, hit in zip(pairs, hits.any(1), strict=True) if hit]


def _helped_by_document(lm: AsyncLM, pairs: Pairs, check: Callable[[], None]) -> list[tuple[OpenQuestion, Document]]:
    """Keep questions with a document that makes the answer likelier, by `LEAST_GAIN` nats a token."""
    alone = [question_prompt(question.example.query) for question, _ in pairs]
    given = [f"{_passage(*pair)}\n{prompt}" for pair, prompt in zip(pairs, alone, strict=True)]
    answers = [f" {question.answers[0]}" for question, _ in pairs]
    check()
    scores = lm.score([*given, *alone], [*answers, *answers])
    means = np.array([score.token_logprobs.mean() for score in scores]).reshape(2, -1)
    return [pair for pair, gain in zip(pairs, means[0] - means[1], strict=True) if gain >= LEAST_GAIN]
