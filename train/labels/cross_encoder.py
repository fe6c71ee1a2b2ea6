"""A cross-encoder between LM and retriever: it learns the LM's scores of labelled candidates, and Q is of its own.

It reads context and document together, so it can follow the LM where a retriever of single vectors cannot. It has one
rule for all texts, so its scores should be smoother than the LM's, which are of one continuation each (LLM-R, Wang et
al. 2023). Its loss is KL(Q || softmax(s)) over each text's K candidates. Optimizer, rate, warmup, batches, precision
and which weights learn are the training's own.

RUN_DIR/cross_encoder/scores.npy   s [N, K] float32 of the training texts' candidates
RUN_DIR/cross_encoder/mark.json    written last: what they follow from, a checksum, and how they agree with the LM's
"""

import io
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from replug.config.errors import NotFiniteError, UserError
from replug.config.schema import Config
from replug.data.files import file_sha256, replace_file, wrong_files
from replug.data.labels import MARK as LABELS_MARK
from replug.data.labels import LabelledTexts, Labels, labelled_store
from replug.data.manifest import read_mark, write_mark
from replug.data.progress import Progress
from replug.data.sampling import QuerySampler
from replug.data.store import CorpusStore, PreparedSet, WindowStore
from replug.models.batching import padded_groups
from replug.models.build import load_encoder
from replug.models.encoder import LENGTH_STEP, TOKENS_PER_BATCH_WITH_GRADIENT, Encoder
from replug.models.encoder_backbone import most_tokens
from replug.models.hardware import to_device
from replug.train.fitting import optimizer_settings, prepare_encoder
from replug.train.labels.fitting import LabelTraining
from replug.train.labels.targets import document_scores, with_scores
from replug.train.loss import kl_lm_retriever, log_likelihood
from replug.train.module import rank_correlation, scheduled_optimizer
from replug.train.run_dir import RunDirectory
from replug.train.trainer import trainer_device, uses_bf16

log = logging.getLogger(__name__)

SCORES, MARK = "scores.npy", "mark.json"
BLOCK = 64  # texts between two lines of progress
COMPARED = 1000  # training texts, of which every two candidates are compared


@dataclass(frozen=True, slots=True)
class PairIds:
    """Token ids of a context and of a document behind it; so many are the context's."""

    ids: np.ndarray
    num_context: int


class CrossEncoder(nn.Module):
    """A score of each pair: a linear head on the mean of the last hidden states of an encoder's backbone.

    The head is drawn by the seed. `cast` is to bfloat16 products in the backbone; the head is float32.
    """

    def __init__(self, encoder: Encoder, seed: int, cast: bool = False) -> None:
        super().__init__()
        encoder.own_queries = None  # of a pair
        self.encoder, self.max_tokens, self._cast = encoder, pair_limit(encoder), cast
        self._has_segments = (getattr(encoder.backbone.config, "type_vocab_size", None) or 0) > 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(encoder.backbone.config.hidden_size, 1)

    def forward(self, texts: Sequence[Sequence[PairIds]]) -> Tensor:
        """Scores [B, K] of B texts with K candidates each, in float32."""
        inputs = self._inputs([pair for text in texts for pair in text])
        mask = inputs["attention_mask"]
        with torch.autocast(mask.device.type, torch.bfloat16, enabled=self._cast):
            hidden = self.encoder.backbone(**inputs).last_hidden_state
        summed = (hidden.float() * mask[:, :, None]).sum(1)
        scores: Tensor = self.head(summed / mask.sum(1, keepdim=True))
        return scores.view(len(texts), -1)

    def _inputs(self, pairs: Sequence[PairIds]) -> dict[str, Tensor]:
        """[B, T] on its device: right-padded ids, mask, and which are the document's, where the backbone asks."""
        lengths = np.array([[len(pair.ids)] for pair in pairs])
        contexts = np.array([[pair.num_context] for pair in pairs])
        places = np.arange(min(-(-lengths.max() // LENGTH_STEP) * LENGTH_STEP, self.max_tokens))
        mask = places < lengths
        ids = np.full(mask.shape, self.encoder.tokenizer.pad_token_id or 0, np.int64)
        ids[mask] = np.concatenate([pair.ids for pair in pairs])
        arrays = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
        if self._has_segments:
            arrays["token_type_ids"] = (mask & (places >= contexts)).astype(np.int64)
        device = self.head.weight.device
        return {name: to_device(torch.from_numpy(array), device) for name, array in arrays.items()}


class Pairs:
    """N labelled texts, each with its K candidates, tokenized as the retriever reads a query and a document."""

    def __init__(self, encoder: Encoder, texts: LabelledTexts, store: WindowStore, corpus: CorpusStore) -> None:
        rows, places = np.unique(texts.doc_rows, return_inverse=True)
        self._places = places.reshape(texts.doc_rows.shape)
        self._documents = encoder.document_ids(corpus, rows)
        self._contexts = encoder.token_ids([window.context for window in store.windows()], encoder.prompts.query)
        self._limit, self._first = pair_limit(encoder), _first_token(encoder)

    def __len__(self) -> int:
        return len(self._contexts)

    def of(self, row: int) -> list[PairIds]:
        """Those of a text."""
        context = self._contexts[row]
        return [joined(context, self._documents[place], self._limit, self._first) for place in self._places[row]]


def pair_limit(encoder: Encoder) -> int:
    """Tokens of a pair: two texts at the encoder's own limit, where its backbone holds as many."""
    return min(2 * encoder.max_tokens, most_tokens(encoder.backbone))


def joined(context: np.ndarray, document: np.ndarray, limit: int, first: int | None) -> PairIds:
    """`[CLS] context [SEP] document [SEP]` of two texts' ids; `first` is what stands at the beginning alone.

    A tokenizer's own pairs may have nothing between the texts, and documents' ids are prepared already. Where both are
    too long, each has half of the limit; the last token of a text that is cut stays.
    """
    document = document[1:] if document[0] == first else document
    document = _cut(document, max(limit - len(context), limit // 2))
    context = _cut(context, limit - len(document))
    return PairIds(np.concatenate([context, document]), len(context))


def distilled(
    config: Config, labels: Labels, data: PreparedSet, training: LabelTraining, run: RunDirectory
) -> LabelTraining:
    """The training with a cross-encoder's scores for the LM's.

    What a text weighs and development texts stay the LM's. Scores that the run has written are read.
    """
    follows_from = _follows_from(config, labels, training.loss.beta)
    found = _read(run.cross_encoder, follows_from)
    if found is None:
        found = _learn(config, labels, data, training)
        _write(run.cross_encoder, found, follows_from)
    agreement = ", ".join(f"{tau:.3f} over {split}" for split, tau in found.agreement.items())
    log.info(f"the cross-encoder orders candidates as the LM does by a rank correlation (Kendall) of {agreement}")
    texts = with_scores(training.texts, found.scores, training.loss.lm_score, training.loss.beta)
    return replace(training, texts=texts, batches=replace(training.batches, texts=texts))


@dataclass(frozen=True, slots=True)
class CrossEncoderScores:
    """What a cross-encoder says: scores [N, K], and Kendall's tau with the LM's, of training and development texts."""

    scores: np.ndarray
    agreement: dict[str, float]


def _learn(config: Config, labels: Labels, data: PreparedSet, training: LabelTraining) -> CrossEncoderScores:
    encoder = load_encoder(config.retriever)
    pairs = Pairs(encoder, training.texts, data.queries, data.corpus)
    model = CrossEncoder(encoder, config.seed, uses_bf16(config.train.precision))
    z = torch.from_numpy(document_scores(training.texts, training.loss.lm_score))
    train_cross_encoder(config, model, pairs, log_likelihood(z, training.loss.beta).float())
    scores = cross_encoder_scores(model, pairs)
    _require_finite(float(scores.sum()), "sum of scores")  # the last step's loss is of the weights before it
    agreement = {"training texts": float(rank_correlation(z[:COMPARED], torch.from_numpy(scores[:COMPARED])))}
    if labels.has_dev:
        texts = labels.texts("dev")
        seen = cross_encoder_scores(model, Pairs(encoder, texts, labelled_store(data, "dev"), data.corpus))
        own = torch.from_numpy(document_scores(texts, training.loss.lm_score))
        agreement["development texts"] = float(rank_correlation(own, torch.from_numpy(seen)))
    return CrossEncoderScores(scores, agreement)


def train_cross_encoder(config: Config, model: CrossEncoder, pairs: Pairs, log_q: Tensor) -> None:
    """`loss.cross_encoder` passes towards log Q [N, K]. Raises NotFiniteError where it diverges."""
    prepare_encoder(config, model.encoder)
    model.to(trainer_device(config))
    sampler = QuerySampler(len(pairs), config.train.batch_size, config.seed)
    steps = math.ceil(config.loss.cross_encoder * len(pairs) / config.train.batch_size)
    optimizer, schedule = scheduled_optimizer(model.parameters(), optimizer_settings(config, steps))
    budget = config.train.chunk_tokens or TOKENS_PER_BATCH_WITH_GRADIENT
    progress = Progress("training the cross-encoder", steps)
    with torch.random.fork_rng(devices=[]):
        for step in range(steps):
            torch.manual_seed(hash((config.seed, step)) % 2**63)  # the encoder's own dropout, where it is asked for
            model.encoder.train_mode()
            optimizer.zero_grad()
            loss = _backward(model, pairs, sampler.rows(step), log_q, budget)
            if config.train.gradient_clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clip)
            optimizer.step()
            schedule.step()
            _require_finite(loss, f"loss at step {step}")
            progress.advance(note=f"KL {loss:.4f}")


def cross_encoder_scores(model: CrossEncoder, pairs: Pairs) -> np.ndarray:
    """[N, K] float32, without gradient and dropout."""
    model.eval()
    progress, found = Progress("scores of the cross-encoder", len(pairs)), []
    for start in range(0, len(pairs), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(pairs)))
        with torch.no_grad():
            groups = list(_in_groups(model, pairs, rows, TOKENS_PER_BATCH_WITH_GRADIENT))
        places = np.argsort([place for group, _ in groups for place in group])
        found.append(torch.cat([scores for _, scores in groups]).cpu().numpy()[places])
        progress.advance(len(rows))
    return np.concatenate(found)


def _backward(model: CrossEncoder, pairs: Pairs, rows: np.ndarray, log_q: Tensor, budget: int) -> float:
    """Add the gradient of the batch's mean KL, some texts at a time, and return it in nats."""
    total = 0.0
    for group, scores in _in_groups(model, pairs, rows, budget):
        wanted = to_device(log_q[rows[group]], scores.device)
        loss = kl_lm_retriever(wanted, log_likelihood(scores, 1.0)).sum() / len(rows)
        loss.backward()
        total += loss.item()
    return total


def _in_groups(model: CrossEncoder, pairs: Pairs, rows: np.ndarray, budget: int) -> Iterator[tuple[list[int], Tensor]]:
    """Which of the texts are computed together, each with all its candidates, and their scores [G, K]."""
    texts = [pairs.of(row) for row in rows]
    for group in padded_groups([[len(of.ids) for of in text] for text in texts], budget):
        yield group, model([texts[place] for place in group])


def _require_finite(number: float, what: str) -> None:
    if not math.isfinite(number):
        raise NotFiniteError(
            f"loss.cross_encoder: the cross-encoder's {what} is {number}; expected a finite number: give a smaller "
            "train.lr, or train.gradient_clip=1"
        )


def _follows_from(config: Config, labels: Labels, beta: float) -> dict[str, object]:
    """What else the scores follow from is a key of the run, which goes on with the same ones alone."""
    return {
        "labels_sha256": file_sha256(labels.folder / LABELS_MARK),
        "passes": config.loss.cross_encoder,
        "lm_score": config.loss.lm_score.value,
        "beta": beta,
        "seed": config.seed,
    }


def _write(folder: Path, found: CrossEncoderScores, follows_from: dict[str, object]) -> None:
    folder.mkdir(exist_ok=True)
    content = io.BytesIO()
    np.save(content, found.scores)
    replace_file(folder / SCORES, content.getvalue())
    mark = {"follows_from": follows_from, "sha256": file_sha256(folder / SCORES), "agreement": found.agreement}
    write_mark(folder / MARK, mark)


def _read(folder: Path, follows_from: dict[str, object]) -> CrossEncoderScores | None:
    """None where none were written to the end. Raises UserError for damaged ones, and for those of other settings."""
    if not (folder / MARK).is_file():
        return None
    mend = f"remove {folder}, and the same command trains the cross-encoder again"
    mark = read_mark(folder / MARK, mend)
    for problem in wrong_files(folder, {SCORES: mark["sha256"]}):
        raise UserError(f"{problem}; {mend}")
    changed = [name for name, value in follows_from.items() if mark["follows_from"].get(name) != value]
    if changed:
        raise UserError(f"loss.cross_encoder: {folder} holds scores of another {changed[0]}; {mend}")
    return CrossEncoderScores(np.load(folder / SCORES), mark["agreement"])


def _first_token(encoder: Encoder) -> int | None:
    """What the tokenizer puts before a text, such as [CLS]; a pair has it once."""
    tokenizer = encoder.tokenizer
    first: int | None = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    return first


def _cut(ids: np.ndarray, most: int) -> np.ndarray:
    """With the last token, which ends a text."""
    return ids if len(ids) <= most else np.concatenate([ids[: most - 1], ids[-1:]])
