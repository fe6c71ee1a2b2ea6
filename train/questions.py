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
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
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
from replug.data.questions import questions_of
from replug.data.records import Document
from replug.data.rows import ASKED, one_line, question_prompt, question_rows, rows_sha256
from replug.data.sampling import QuerySampler
from replug.data.store import CorpusStore, ExampleStore, PreparedSet
from replug.data.words import hash64
from replug.evals.intervals import FEWEST_CLUSTERS
from replug.evals.loop import Item
from replug.evals.questions import OpenQuestion, read_questions
from replug.index_workers.bm25 import search_bm25
from replug.models.encoder import Encoder
from replug.train.development import Chooser, DevResult, Watch
from replug.train.trained_weights import FrozenDocuments, embedded

SPLITS = ("train", "dev", "heldout")
SHARE = 10  # one of ten sources has development questions, one held-out questions
MOST_JUDGED = {RULE: 200, BY_LM: 80}  # questions of the development and of the held-out split; the LM's cost tokens
WRITTEN_FOR_ONE = {"dev": 4, "heldout": 2}  # drafts of the LM; the filters keep one in four, and dev chooses weights
PER_DOCUMENT, MOST_PER_DOCUMENT = 2, 8  # training questions; and questions of any split where documents are few
FEW_SOURCES, SAMPLED = 10 * SHARE, 5000  # sources of a sample; below it, documents are dealt to the splits one by one
OWN_BOTH = 60  # from this number of the user's questions on, every second one is for development
ROWS_AT_A_TIME = 512
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the way from the untuned weights
LARGE_SHARE = 0.35  # of a document; at 0.37 MiniLM gained nothing in German, at 0.21 it did (docs/questions.md)
NUM_LOOKS = 3  # measurements of development questions while training, each at all `SHARES`
SURE = NormalDist().inv_cdf(1 - 0.05 / 2 / NUM_LOOKS)  # standard errors below a gain where its interval begins
# Nothing is left to gain from this mean reciprocal rank of development questions on, or up to this in-batch loss of
# the training questions in nats: at 0.03 training harmed, at 0.15 a low rate gained, from 1 on a high one did
# (docs/experiments.md).
CEILING, LEAST_LOSS, WHOLE_RATE_LOSS, LOSS_BATCHES = 0.95, 0.05, 1.0, 4
# Documents in the search of BM25, and its results for a question; a corpus up to the last number is taken whole.
SEARCHED, NEAREST, SMALL = 20_000, 10, 2_000

log = logging.getLogger(__name__)

Write = Callable[[Sequence[tuple[OpenQuestion, Document]], Sequence[str], int], list[OpenQuestion]]


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
        if 0 < (num_dev := counts.get("dev", 0)) < OWN_BOTH // 2:
            other = ", or an LM that writes the documents' language" if kind == BY_LM else ""
            log.warning(
                f"{num_dev} development questions choose the weights, and chance with them; expected {OWN_BOTH} or "
                f"more of your own (data.questions=FILE){other}"
            )
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

    def share_of_documents(self) -> float:
        """Return the median ratio of a question's characters to its document's, over the first questions."""
        texts = self._corpus.texts(self.doc_rows[:ROWS_AT_A_TIME, 0])
        queries = [question.query for question in self._questions[: len(texts)]]
        return float(np.median([len(query) / max(1, len(text)) for query, text in zip(queries, texts, strict=True)]))

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
    share = min(1.0, loss / WHOLE_RATE_LOSS)
    return replace(config, train=replace(config.train, lr=share * config.train.lr))


def say_how_far(config: Config, loss: float, share: float) -> None:
    """Log the rate that follows from the untuned in-batch loss, or that there is nothing to gain.

    Questions with a large `share` of their document's characters are found by words alone, and teach little else.
    """
    if share > LARGE_SHARE:
        log.warning(
            f"training questions have {share:.0%} of their documents' characters, so words alone find them; expected "
            "longer documents (data.document_tokens)"
        )
    if loss <= LEAST_LOSS:
        log.info(
            f"nothing to gain: the untuned retriever has a loss of {loss:.3f} nats on training questions, so it "
            "needs no training and stays unchanged"
        )
    else:
        rate = rate_for(config, loss).train.lr
        log.info(f"the untuned loss on training questions is {loss:.3f} nats: the rate is {rate:.1e}")


class DevQuestions:
    """Development questions among a few thousand documents: their own, and BM25's results for them."""

    def __init__(self, questions: Sequence[OpenQuestion], corpus: CorpusStore, seed: int) -> None:
        self._corpus, self._queries = corpus, [question.example.query for question in questions]
        gold = corpus.rows_of({document for question in questions for document in question.example.gold})
        own = np.array([*gold.values()], np.int64)
        among = np.union1d(corpus.sample(np.random.default_rng([seed, 5]))[:SEARCHED], own)
        nearest, _ = search_bm25(lambda: texts_of(corpus, among), self._queries, min(NEAREST, len(among)))
        self.rows = among if len(among) <= SMALL else np.union1d(among[np.unique(nearest)], own)
        texts = corpus.texts(self.rows)
        self._is_right = np.zeros((len(questions), len(self.rows)), bool)
        for place, question in enumerate(questions):
            if question.example.gold:
                self._is_right[place] = np.isin(self.rows, [gold.get(doc, -1) for doc in question.example.gold])
            else:
                self._is_right[place] = [has_answer(text, question.answers) for text in texts]

    def __len__(self) -> int:
        return len(self._queries)

    def reciprocal_ranks(self, encoder: Encoder, frozen: FrozenDocuments | None = None) -> np.ndarray:
        """Return 1 / the rank of the first right document [N], 0 for a question without one."""
        encoder.eval()
        documents = frozen(self.rows).cpu() if frozen else embedded(encoder, self._corpus, self.rows)
        similarities = (encoder.encode_query(self._queries) @ documents.T).numpy()
        best = np.where(self._is_right, similarities, -np.inf).max(1, keepdims=True)
        ranks = 1 + ((similarities >= best) & ~self._is_right).sum(1)  # others of the same similarity come before
        return np.where(self._is_right.any(1), 1 / ranks, 0.0)


def texts_of(corpus: CorpusStore, rows: np.ndarray) -> Iterator[str]:
    """Yield the texts of rows, with one block at a time in memory."""
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        yield from corpus.texts(rows[start : start + ROWS_AT_A_TIME])


class Untuned:
    """The weights before training, for interpolation with the tuned weights."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._weights = {name: weight.detach().clone() for name, weight in self._trained()}

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, weight) for name, weight in self._encoder.named_parameters() if weight.requires_grad]

    @contextmanager
    def interpolated(self, share: float) -> Iterator[None]:
        """Give the encoder (1 - share) * untuned + share * tuned weights in the block (Wortsman et al. 2022)."""
        tuned = {name: weight.detach().clone() for name, weight in self._trained()}
        try:
            with torch.no_grad():
                for name, weight in self._trained():
                    weight.copy_(torch.lerp(self._weights[name].to(weight.device), tuned[name], share))
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._trained():
                    weight.copy_(tuned[name])


class QuestionChooser(Chooser):
    """Chooses by development questions among the weights of each measurement and interpolations with untuned weights.

    The untuned weights stay unless others have a shown gain in mean reciprocal rank. The highest lower end of the
    gain's 95% interval wins, after Bonferroni's correction for the measurements.
    """

    def __init__(
        self,
        config: Config,
        dev: DevQuestions,
        encoder: Encoder,
        frozen: FrozenDocuments | None,
        watch: Watch,
        loss: float = math.inf,
    ) -> None:
        """Take the untuned encoder, and its in-batch `loss` on training questions."""
        max_steps = config.train.max_steps
        super().__init__(watch, max(1, math.ceil(max_steps / NUM_LOOKS)), max_steps)
        self._dev, self._encoder, self._frozen, self._loss = dev, encoder, frozen, loss
        self.rows, self._untuned = dev.rows, Untuned(encoder)
        self._before = np.zeros(len(dev))  # reciprocal ranks by the untuned weights

    def start(self) -> None:
        """Measure the untuned weights, and end the training before its first step if there is nothing to gain."""
        with self._untuned.interpolated(0.0):
            self._before = self._dev.reciprocal_ranks(self._encoder, self._frozen)
            untuned = self._result(0, 1.0, self._before)
            if self._watch.first is None:
                self._watch.record(untuned, self._encoder.save, untuned.mrr)
        if untuned.mrr is not None and untuned.mrr >= CEILING:
            log.info(
                f"nothing to gain: the untuned retriever has a mean reciprocal rank of {untuned.mrr:.3f} on "
                f"{len(self._dev)} development questions, so it needs no training and stays unchanged"
            )
            self._watch.nothing_to_gain = True
        self._watch.nothing_to_gain |= self._loss <= LEAST_LOSS

    def finish(self, step: int) -> None:
        """Measure the weights after `step` steps, unless they were measured."""
        if self._watch.has(step):
            return
        results = []
        for share in SHARES:
            with self._untuned.interpolated(share):
                now = self._dev.reciprocal_ranks(self._encoder, self._frozen)
            results.append(self._result(step, share, now))
        best = max(results, key=lambda result: result.least_gain or 0.0)
        with self._untuned.interpolated(best.share or 0.0):
            self._watch.record(best, self._encoder.save, max(result.mrr or 0.0 for result in results))

    def _result(self, step: int, share: float, now: np.ndarray) -> DevResult:
        gains = now - self._before
        least = 0.0  # too few questions show no gain
        if len(gains) >= FEWEST_CLUSTERS:
            least = float(gains.mean() - SURE * gains.std() / math.sqrt(len(gains) - 1))
        right = float((now == 1).mean())
        return DevResult(step, mrr=float(now.mean()), success_at_1=right, share=share, least_gain=least)
