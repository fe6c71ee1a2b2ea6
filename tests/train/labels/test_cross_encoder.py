"""A cross-encoder between LM and retriever: what it reads, that it learns, and that its scores are those of Q."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.config.errors import NotFiniteError, UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.data.files import read_json
from replug.data.labels import Labels
from replug.models.build import load_encoder
from replug.models.encoder import Encoder
from replug.models.preparing import prepared_set
from replug.train.labels import cross_encoder
from replug.train.labels.cross_encoder import (
    CrossEncoder,
    Pairs,
    cross_encoder_scores,
    distilled,
    joined,
    train_cross_encoder,
)
from replug.train.labels.fitting import LabelTraining
from replug.train.loss import kl_lm_retriever, lm_scores, log_likelihood
from replug.train.run import train
from replug.train.run_dir import RunDirectory
from tests.support.labels import write_stand_in_labels
from tests.support.made_once import made_once
from tests.support.packages import ROOT

SET = ("data.num_queries=12", "data.num_dev=6", "data.num_heldout=6")
OF = ("label.dense=3", "label.random=2", "train.batch_size=4", "train.threads=1", "train.max_steps=3")


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set with development texts in set/, and its labels in labels/."""

    def make(folder: Path) -> None:
        keys = [*SET, *OF[:2], f"run_dir={folder}/run", f"data.out={folder}/set"]
        config = load_config(ROOT / "configs/debug.yaml", keys)
        write_stand_in_labels(folder / "labels", config, prepared_set(config, folder / "set"))

    return made_once(tmp_path_factory, "labelled_for_a_cross_encoder", make)


def configured(labelled: Path, *overrides: str) -> Config:
    keys = [*OF, f"train.labels={labelled}/labels", f"data.prepared={labelled}/set", "data.source=null"]
    keys += ["evaluate.heldout=false", "loss.cross_encoder=1", "run_dir=unused"]
    return load_config(ROOT / "configs/debug.yaml", [*keys, *overrides])


def learn(config: Config, run: Path) -> tuple[LabelTraining, LabelTraining]:
    """A training on the LM's scores, and the same on a cross-encoder's."""
    run.mkdir(exist_ok=True)
    labels, data = Labels(Path(config.train.labels)), prepared_set(config, run)
    training = LabelTraining.of(config, labels, data)
    return training, distilled(config, labels, data, training, RunDirectory(run))


def never(*_: object) -> None:
    raise AssertionError("ended here")


def test_a_pair_is_both_texts_with_one_beginning_and_where_both_are_long_half_of_each():
    context, document = np.array([2, 7, 8, 3]), np.array([2, 9, 9, 5, 3])
    whole = joined(context, document, 8, first=2)
    assert whole.ids.tolist() == [2, 7, 8, 3, 9, 9, 5, 3] and whole.num_context == 4
    assert joined(context, document, 7, first=2).ids.tolist() == [2, 7, 8, 3, 9, 9, 3]
    assert joined(context, document, 6, first=None).ids.tolist() == [2, 7, 3, 2, 9, 3]
    assert joined(np.array([2, 7, 7, 7, 7, 3]), np.array([2, 9, 3]), 6, first=2).ids.tolist() == [2, 7, 7, 3, 9, 3]


def test_a_score_depends_on_both_texts_and_not_on_what_is_computed_beside_it():
    model = CrossEncoder(Encoder("stand_in"), seed=0).eval()
    contexts, documents = (model.encoder.token_ids(texts) for texts in (["mida furo", "furo"], ["mida " * 9, "furo"]))
    texts = [[joined(context, document, model.max_tokens, 2) for document in documents] for context in contexts]
    with torch.no_grad():
        together, alone = model(texts), torch.cat([model([[pair]]) for text in texts for pair in text]).view(2, 2)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert len(set(together.flatten().tolist())) == 4


def test_it_learns_a_rule_of_text_and_document(labelled):
    config = configured(labelled, "loss.cross_encoder=30", "train.lr=1.0e-3", "train.precision=float32")
    texts, data = Labels(labelled / "labels").texts("queries"), prepared_set(config, labelled)
    model = CrossEncoder(load_encoder(config.retriever), config.seed)
    pairs = Pairs(model.encoder, texts, data.queries, data.corpus)
    shared = [[len(set(p.ids[: p.num_context]) & set(p.ids[p.num_context :])) for p in pairs.of(i)] for i in range(12)]
    log_q = log_likelihood(torch.tensor(shared).float(), 1.0)

    def kl() -> float:
        log_p = log_likelihood(torch.from_numpy(cross_encoder_scores(model, pairs)), 1.0)
        return float(kl_lm_retriever(log_q, log_p).mean())

    before = kl()
    train_cross_encoder(config, model, pairs, log_q)
    assert before > 0.05 and kl() < 0.25 * before


def test_what_it_says_is_q_and_development_texts_and_weights_stay_the_lms(labelled, tmp_path, monkeypatch, caplog):
    config = configured(labelled, "loss.weigh_queries=true", "loss.beta_entropy=0.5")
    before, after = learn(config, tmp_path / "run")
    scores = np.load(tmp_path / "run/cross_encoder/scores.npy")
    batch = after.batches.take(1)
    z = lm_scores(torch.tensor(batch.sum_logprobs).float(), torch.tensor(batch.num_tokens).float(), "mean_logprob")
    log_p = log_likelihood(torch.from_numpy(scores[batch.retrieved.query_rows]), 1.0)
    torch.testing.assert_close(log_likelihood(z, after.loss.beta), log_p, atol=1e-4, rtol=0)
    assert not np.allclose(after.texts.sum_logprobs, before.texts.sum_logprobs)
    assert (after.batches.weights == before.batches.weights).all()
    assert after.dev is before.dev and after.loss == before.loss
    monkeypatch.setattr(cross_encoder, "train_cross_encoder", never)
    with caplog.at_level("INFO"):
        _, again = learn(config, tmp_path / "run")
    assert (again.texts.sum_logprobs == after.texts.sum_logprobs).all()
    assert "over training texts" in caplog.text and "over development texts" in caplog.text


@pytest.mark.parametrize("keys", [(), ("lora.rank=2", "lora.dropout=0.5"), ("retriever.dropout=true",)])
def test_the_same_seed_says_the_same_also_after_an_end_in_between(labelled, tmp_path, monkeypatch, keys):
    config = configured(labelled, *keys)
    learn(config, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="ended here"):
        patch.setattr(cross_encoder, "cross_encoder_scores", never)
        learn(config, tmp_path / "run")
    torch.manual_seed(1)
    learn(config, tmp_path / "run")
    written, other = (np.load(tmp_path / run / "cross_encoder/scores.npy") for run in ("run", "whole"))
    assert (written == other).all() and written.std() > 0
    learn(replace(config, seed=1), tmp_path / "other")
    assert not np.allclose(np.load(tmp_path / "other/cross_encoder/scores.npy"), written)


def test_damaged_scores_and_those_of_other_settings_are_refused(labelled, tmp_path):
    config = configured(labelled)
    learn(config, tmp_path)
    with pytest.raises(UserError, match="holds scores of another beta; remove"):
        learn(replace(config, loss=replace(config.loss, beta=0.7)), tmp_path)
    path = tmp_path / "cross_encoder/scores.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(UserError, match=r"scores\.npy is damaged.*trains the cross-encoder again"):
        learn(config, tmp_path)


def test_one_that_diverges_says_so(labelled, tmp_path):
    with pytest.raises(NotFiniteError, match=r"loss\.cross_encoder: the cross-encoder's"):
        learn(configured(labelled, "train.lr=1.0e36", "train.warmup_ratio=0"), tmp_path)
    assert not (tmp_path / "cross_encoder").exists()


def test_a_run_trains_on_it_where_it_is_asked_for_and_else_has_none(labelled, tmp_path):
    for passes in (0, 1):
        run = tmp_path / str(passes)
        train(configured(labelled, f"run_dir={run}", f"loss.cross_encoder={passes}"))
        assert (run / "results.json").is_file() and (run / "cross_encoder/mark.json").is_file() == bool(passes)
        assert ("cross_encoder" in read_json(run / "run_times.json", "")) == bool(passes)
