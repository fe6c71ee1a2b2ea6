"""Questions about a run's documents: they judge its retriever together with text continuations, and may train it.

RUN_DIR/questions/train.jsonl     of data.train, and made by a rule, for train.examples=questions
RUN_DIR/questions/dev.jsonl       choose weights
RUN_DIR/questions/heldout.jsonl   judge at the end, and nothing else
RUN_DIR/questions/inputs.json, manifest.json

Rows have question, answers, gold (ids of documents) and source, like every file of questions. Splits share no source.
With `data.questions=lm` the LM writes the development and held-out questions: training on questions made by a rule
helps with more of the same kind, while people's questions get worse results (docs/experiments.md).
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from replug.config.errors import UserError
from replug.config.rules import BY_LM, RULE
from replug.config.schema import Config
from replug.data.answers import has_answer
from replug.data.files import replace_file
from replug.data.folder import Folder
from replug.data.progress import Progress
from replug.data.questions import questions_of
from replug.data.records import Document
from replug.data.rows import ASKED, one_line, question_prompt, question_rows, rows_sha256
from replug.data.sampling import QuerySampler
from replug.data.store import CorpusStore, ExampleStore, PreparedSet
from replug.data.words import hash64, search_words
from replug.evals.loop import Item
from replug.evals.questions import OpenQuestion, read_questions
from replug.index_workers.bm25 import search_bm25
from replug.models.black_box_lm import AsyncLM
from replug.models.encoder import Encoder
from replug.models.generation import GenerationOptions
from replug.train.trained_weights import embedded

SPLITS = ("train", "dev", "heldout")
SHARE = 10  # one of ten sources has development questions, one held-out questions
MOST_JUDGED = {RULE: 200, BY_LM: 80}  # questions of the development and of the held-out split; the LM's cost tokens
WRITTEN_FOR_ONE = {"dev": 4, "heldout": 2}  # drafts of the LM; the filters keep one in four, and dev chooses weights
PER_DOCUMENT, MOST_PER_DOCUMENT = 2, 8  # training questions; and questions of any split where documents are few
FEW_SOURCES, SAMPLED = 10 * SHARE, 5000  # sources of a sample; below it, documents are dealt to the splits one by one
OWN_BOTH = 60  # from this number of the user's questions on, every second one is for development
ROWS_AT_A_TIME = 512
# In-batch loss of the training questions in nats, from which on the whole rate is used: at 0.15 a low rate gained, from
# 1 on a high one did (docs/experiments.md); and the batches that measure it.
WHOLE_RATE_LOSS, LOSS_BATCHES = 1.0, 4
SEARCHED, NEAREST = 20_000, 10  # documents in the search of BM25, and its results for a question

log = logging.getLogger(__name__)

Pairs = Sequence[tuple[OpenQuestion, Document]]
Write = Callable[[Pairs, Sequence[str], int], list[OpenQuestion]]


class Questions:
    """Reads the questions of a run by split; a split that the run does not need is empty."""

    def __init__(self, folder: Path) -> None:
        questions_folder(folder).require()
        paths = [folder / f"{split}.jsonl" for split in SPLITS]
        self.train, self.dev, self.heldout = (read_questions(path) if path.is_file() else [] for path in paths)


def questions_folder(path: Path) -> Folder:
    """Return the folder of a run's questions."""
    return Folder(path, "set of questions", key="run_dir", fix_hint="remove the folder to make the questions again")


def make_questions(
    config: Config,
    data: PreparedSet,
    path: Path,
    training: Sequence[OpenQuestion] = (),
    lm: str = "",
    write: Write | None = None,
) -> Questions:
    """Make the questions of a run, or open existing ones; `training` questions are given.

    `write` lets the LM of the identity `lm` word at most N questions about documents; its texts are other documents.
    Raises UserError where the documents give too few.
    """
    kind, folder = str(config.data.questions), questions_folder(path)
    inputs: dict[str, Any] = {"data.questions": kind, "documents": data.corpus_sha256, "seed": config.seed}
    if kind == BY_LM:
        inputs["lm.identity"] = lm
    elif kind != RULE:
        inputs["data.questions (sha256)"] = rows_sha256(kind)
    most = MOST_JUDGED.get(kind, MOST_JUDGED[RULE])
    wanted = {"heldout": most, "dev": most} if data.corpus.url is None else {"heldout": most}  # a store gives none
    folder.claim({**inputs, **wanted, "train": config.train.batch_size * config.train.max_steps if training else 0})
    if not folder.is_finished:
        splits = _own(kind, wanted, training) if kind not in (RULE, BY_LM) else {}
        if not splits and (own := _own_rows(config, config.data.heldout, data.heldout)):
            splits = {"heldout": own}
        missing = {split: count for split, count in wanted.items() if split not in splits}
        if missing and data.corpus.url is None:
            taken = {question.example.gold[0] for question in training}
            made = _from_documents(config, data.corpus, missing, write, taken)
            if few := next((split for split, questions in made.items() if not questions), None):
                problem = _none_made(data.corpus, few)
                if training:
                    raise UserError(problem)
                log.warning(f"{problem}. The texts alone judge this run")
            else:
                splits |= made
        elif missing:
            log.warning("data.questions: documents in a store give no questions; the texts alone judge this run")
        if training:
            splits["train"] = [*training]
        for split, questions in splits.items():
            _write_rows(path / f"{split}.jsonl", questions)
        counts = {split: len(questions) for split, questions in splits.items()}
        log.info("questions about the documents: " + ", ".join(f"{count:,} {split}" for split, count in counts.items()))
        folder.finish([f"{split}.jsonl" for split in splits], {"counts": counts})
    return Questions(path)


def training_questions(config: Config, data: PreparedSet) -> list[OpenQuestion]:
    """Return training questions with their documents: the run's own, then rule-made ones for the remaining steps.

    Raises UserError where there are none.
    """
    num = config.train.batch_size * config.train.max_steps
    asked = _own_rows(config, config.data.train, data.queries)
    own = _with_documents(asked, data.corpus)
    if asked:
        log.info(f"{len(own):,} of {len(asked):,} training questions have a document; the others are left out")
    elif config.data.train:
        log.info(f"{config.data.train} has no questions; a rule makes the training questions")
    made = _from_documents(config, data.corpus, {"train": num - len(own)})["train"] if len(own) < num else []
    if not own and not made:
        raise UserError(_none_made(data.corpus, "train"))
    return [*own, *made]


def _own_rows(config: Config, path: str | None, texts: ExampleStore) -> list[OpenQuestion]:
    """Return the questions among the set's texts, with all answers from `path`; the set has only the first answer."""
    asked = [of for of in texts.examples() if of.context in (ASKED, question_prompt(of.query))]
    rows = [row for _, row in question_rows(path, config.data.fields) if "question" in row] if asked and path else []
    answers = {row["question"]: tuple(row["answers"]) for row in rows if row.get("answers")}
    questions = []
    for of in asked:
        known = answers.get(of.query) or (() if of.context == ASKED else (of.continuation.strip(),))
        if known or of.gold:
            questions.append(OpenQuestion(Item(of.id, of.query, of.domain, of.gold, of.source), known))
    return questions


def _with_documents(questions: Sequence[OpenQuestion], corpus: CorpusStore) -> list[OpenQuestion]:
    """Keep questions with a document: gold, or the first of BM25's nearest that holds an answer (DPR's way)."""
    known = corpus.rows_of({document for question in questions for document in question.example.gold})
    kept = [[of for of in question.example.gold if of in known][:1] for question in questions]
    if unknown := [place for place, gold in enumerate(kept) if not gold]:
        queries = [questions[place].example.query for place in unknown]
        nearest, scores = search_bm25(lambda: texts_of(corpus, np.arange(len(corpus))), queries, NEAREST)
        for place, rows, of in zip(unknown, nearest, scores, strict=True):
            documents = corpus.documents(rows[of > 0])
            kept[place] = [one.id for one in documents if has_answer(one.text, questions[place].answers)][:1]
    pairs = zip(questions, kept, strict=True)
    return [replace(of, example=replace(of.example, gold=tuple(gold))) for of, gold in pairs if gold]


def _own(path: str, wanted: Mapping[str, int], training: Sequence[OpenQuestion]) -> dict[str, list[OpenQuestion]]:
    """Return the user's questions; from `OWN_BOTH` on, every second one is for development."""
    rows = read_questions(path, needs_answers=False)
    trained = {one_line(of.example.query).lower() for of in training}
    for row in rows:
        if not (row.answers or row.example.gold):
            raise UserError(
                f"data.questions: question {row.example.id} of {path} has neither answers nor gold documents; expected "
                "answers that some passage holds, or ids of documents as gold"
            )
        if one_line(row.example.query).lower() in trained:
            raise UserError(
                f"data.questions: question {row.example.id} of {path} is trained on too (data.train), so it would "
                "test memorization; remove it from one of the two"
            )
    if "dev" in wanted and len(rows) >= OWN_BOTH:
        return {"dev": rows[1::2], "heldout": rows[::2]}
    log.info(f"{path}: all {len(rows)} questions are held out; of {OWN_BOTH} or more, half would choose the weights")
    return {"heldout": rows}


def _from_documents(
    config: Config,
    corpus: CorpusStore,
    wanted: Mapping[str, int],
    write: Write | None = None,
    taken: Collection[str] = (),
) -> dict[str, list[OpenQuestion]]:
    """Make questions of random documents until every split has enough, or documents run out.

    Documents in `taken`, and their sources, are skipped.
    """
    most = {split: count * (WRITTEN_FOR_ONE[split] if write else 1) for split, count in wanted.items()}
    made: dict[str, list[tuple[OpenQuestion, Document]]] = {split: [] for split in wanted}
    order = corpus.sample(np.random.default_rng([config.seed, 4]))
    by_source = len(set(corpus.sources(order[:SAMPLED]))) >= FEW_SOURCES
    rows = [*corpus.rows_of(taken).values()]
    excluded = {*taken, *(corpus.sources(rows) if by_source and rows else ())}
    enough = {split: math.ceil(SHARE * count / len(corpus)) for split, count in most.items()}
    per_document = {split: min(MOST_PER_DOCUMENT, count) for split, count in enough.items()}
    for start in range(0, len(order), ROWS_AT_A_TIME):
        if all(len(made[split]) >= count for split, count in most.items()):
            break
        for document in corpus.documents(order[start : start + ROWS_AT_A_TIME]):
            name = document.source if by_source else document.id
            split = {0: "heldout", 1: "dev"}.get(hash64(f"questions/{config.seed}/{name}") % SHARE, "train")
            if len(made.get(split, ())) < most.get(split, 0) and name not in excluded:
                num = max(per_document[split], PER_DOCUMENT if split == "train" else 1)
                for number, (question, answer) in enumerate(questions_of(document, num, config.seed)):
                    item = Item(f"{document.id}-q{number}", question, "all", (document.id,), document.source)
                    made[split].append((OpenQuestion(item, (answer,)), document))
    if write is None:
        return {split: [question for question, _ in of[: most[split]]] for split, of in made.items()}
    others = corpus.texts(order[:SEARCHED])
    return {split: write(of[: most[split]], others, wanted[split]) for split, of in made.items()}


def _none_made(corpus: CorpusStore, split: str) -> str:
    return (
        f"data.questions: no question could be made of {len(corpus):,} documents for the {split} split; expected "
        "sentences with names, numbers or dates, or data.questions=FILE with your own questions"
    )


def _write_rows(path: Path, questions: Sequence[OpenQuestion]) -> None:
    def row(of: OpenQuestion) -> str:
        fields: dict[str, Any] = {"id": of.example.id, "question": of.example.query, "answers": of.answers}
        fields |= {"gold": of.example.gold, "source": of.example.source}
        return json.dumps(fields, ensure_ascii=False) + "\n"

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(map(row, questions)).encode())


# Training and development ---------------------------------------------------------------------------------------------


class TrainingQuestions:
    """The training questions by row, each with the row of its document."""

    def __init__(self, questions: Sequence[OpenQuestion], corpus: CorpusStore) -> None:
        self._questions, self._corpus = [question.example for question in questions], corpus
        rows = corpus.rows_of(document for question in self._questions for document in question.gold[:1])
        self.doc_rows = np.array([[rows[question.gold[0]]] for question in self._questions], np.int64)

    def __len__(self) -> int:
        return len(self._questions)

    def examples(self, rows: Sequence[int] | np.ndarray) -> list[Item]:
        """Return questions in the requested order."""
        return [self._questions[row] for row in rows]

    def in_batch_loss(self, encoder: Encoder, config: Config) -> float:
        """Return the mean InfoNCE of questions among the documents of their batch, nats, over some batches."""
        encoder.eval()
        sampler, losses = QuerySampler(len(self), config.train.batch_size, config.seed), []
        for rows in map(sampler.rows, range(LOSS_BATCHES)):
            documents, place = np.unique(self.doc_rows[rows, 0], return_inverse=True)
            queries = encoder.encode_query([example.query for example in self.examples(rows)])
            similarities = queries @ embedded(encoder, self._corpus, documents).T
            losses.append(cross_entropy(similarities / config.loss.gamma, torch.from_numpy(place)))
        return float(torch.stack(losses).mean())


def rate_for(config: Config, loss: float) -> Config:
    """Return the configuration with a peak rate in proportion to the untuned in-batch loss, at most `train.lr`.

    An encoder that already tells the documents apart is near its best weights, and the rate of a new encoder would
    lead it away from them.
    """
    rate = min(1.0, loss / WHOLE_RATE_LOSS) * config.train.lr
    log.info(f"the untuned loss on training questions is {loss:.3f} nats: the rate is {rate:.1e}")
    return replace(config, train=replace(config.train, lr=rate))


def texts_of(corpus: CorpusStore, rows: np.ndarray) -> Iterator[str]:
    """Yield the texts of rows, with one block at a time in memory."""
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        yield from corpus.texts(rows[start : start + ROWS_AT_A_TIME])


# Questions that the LM words -----------------------------------------------------------------------------------------

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


def write_questions(
    lm: AsyncLM,
    seed: int,
    has_logprobs: bool,
    check: Callable[[], None],
    pairs: Pairs,
    others: Sequence[str],
    most: int,
) -> list[OpenQuestion]:
    """Let the LM word questions about documents, and return at most `most` that pass the filters.

    A rule takes the answer out of a sentence (`data.questions`), and the LM words the question (after Alberti et al.
    2019, and InPars, Bonifacio et al. 2022). A question is kept if it ends with a question mark and does not hold its
    answer, BM25 finds its document among the first few, and its document makes the answer likelier.

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
