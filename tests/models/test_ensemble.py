"""Weights of documents that follow the text: what must hold of them for any log-probs."""

import json
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.data.folder import checksum_problems
from replug.models.encoder import Encoder
from replug.models.encoder_retriever import EncoderRetriever
from replug.models.ensemble import REPLUG_WEIGHTS, MovingWeights, Weighting, mix, mix_and_weigh, prior_log_weights
from replug.models.ensemble_temperature import FILE, EnsembleTemperature, temperature_in
from replug.models.local.stand_in_lm import StandInLM
from replug.models.replug_lm import ReplugLM

ROUNDS = range(5)


def drawn(seed: int, tokens: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Draw log-probs [K, T] given 2 to 9 documents, which say much or little, and similarities [K]."""
    rng = np.random.default_rng(seed)
    k = rng.integers(2, 10)
    return np.log(rng.beta(0.3, 1.0, size=(k, tokens)) + 1e-30), rng.normal(scale=3.0, size=k)


def naive_weights(logprobs: np.ndarray, similarities: np.ndarray, share: float) -> np.ndarray:
    """Apply Bayes' rule and the share to probabilities, a token at a time."""
    prior = np.exp(similarities) / np.exp(similarities).sum()
    columns = [prior]
    for given in np.exp(logprobs).T:
        seen = columns[-1] * given
        columns.append((1 - share) * seen / seen.sum() + share * prior)
    return np.stack(columns[:-1], axis=1)


def mixed(given: np.ndarray, similarities: np.ndarray, share: float = 0.05) -> np.ndarray:
    return mix(given, prior_log_weights(similarities), Weighting(share))


def weighed(given: np.ndarray, similarities: np.ndarray, share: float = 0.05) -> np.ndarray:
    """Return the weights [K, T] that predict each token."""
    return mix_and_weigh(given, prior_log_weights(similarities), Weighting(share))[1][:, :-1]


@pytest.mark.parametrize("seed", ROUNDS)
def test_weights_follow_bayes_rule_with_a_share_of_the_prior(seed: int) -> None:
    given, similarities = drawn(seed)
    weights = naive_weights(given, similarities, 0.05)
    np.testing.assert_allclose(weighed(given, similarities), weights, rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(mixed(given, similarities), np.log((weights * np.exp(given)).sum(axis=0)), rtol=1e-9)


@pytest.mark.parametrize("seed", ROUNDS)
def test_a_share_of_1_is_the_papers_ensemble(seed: int) -> None:
    given, similarities = drawn(seed)
    prior = prior_log_weights(similarities, 0.5)
    fixed, weights = mix_and_weigh(given, prior)
    moving = MovingWeights(prior, REPLUG_WEIGHTS)
    np.testing.assert_allclose([moving.see(token) for token in given.T], fixed, rtol=1e-12)
    np.testing.assert_allclose(weights, np.repeat(np.exp(prior)[:, None], given.shape[1] + 1, axis=1))


@pytest.mark.parametrize("tokens", [1, 30, 10_000])
def test_a_share_of_0_mixes_whole_texts(tokens: int) -> None:
    given, similarities = drawn(tokens, tokens)
    whole = np.logaddexp.reduce(prior_log_weights(similarities) + given.sum(axis=1))
    assert mixed(given, similarities, share=0).sum() == pytest.approx(whole, rel=0, abs=1e-9)


def test_weights_of_0_and_1e_300_are_exact_and_come_back() -> None:
    given = np.log(np.array([[0.5] * 1000 + [1e-3] * 9000, [1e-3] * 1000 + [0.5] * 9000]))
    never_back = weighed(given, np.zeros(2), share=0)
    assert 0 < never_back[1, 110] < 1e-290
    assert weighed(given, np.zeros(2), share=1e-300)[1, 1000] == pytest.approx(5e-301)
    assert weighed(given, np.zeros(2), share=1e-300)[1, -1] == pytest.approx(1)
    impossible = np.array([[np.log(0.5), np.log(0.5)], [-np.inf, np.log(0.5)]])
    np.testing.assert_allclose(weighed(impossible, np.zeros(2), share=0.1)[:, 1], [0.95, 0.05])
    assert weighed(impossible, np.zeros(2), share=0)[1, 1] == 0
    similarities = np.array([0.0, -690.0])  # a prior of about 1e-300
    assert weighed(given[::-1], similarities, share=0)[1, 200] == pytest.approx(1)


def test_pruned_documents_are_left_out_for_good_and_the_heaviest_stays() -> None:
    given = np.log([[0.9, 0.9, 1e-9], [0.1, 0.1, 0.9], [0.001, 0.9, 0.9]])
    moving = MovingWeights(np.log(np.full(3, 1 / 3)), Weighting(prune=0.02))
    moving.see(given[:, 0])
    assert moving.weights[2] == 0
    assert moving.weights.sum() == pytest.approx(1)
    moving.see(given[:, 1])
    expected = MovingWeights(np.log([0.5, 0.5]))
    expected.log_weights = moving.log_weights[:2]
    assert moving.see(given[:, 2]) == pytest.approx(expected.see(given[:2, 2]))
    np.testing.assert_allclose(moving.weights[:2], expected.weights)
    alone = MovingWeights(np.log([0.5, 0.5]), Weighting(prune=0.99))
    alone.see(np.log([0.4, 0.3]))
    np.testing.assert_array_equal(alone.weights, [1, 0])


@pytest.mark.parametrize("seed", ROUNDS)
def test_tokens_that_are_read_move_weights_as_those_of_the_text(seed: int) -> None:
    given, similarities = drawn(seed)
    prior = prior_log_weights(similarities)
    for share in (0.0, 0.05):
        whole, weights = mix_and_weigh(given, prior, Weighting(share))
        rest, begun = mix_and_weigh(given[:, 8:], prior, Weighting(share), read_logprobs=given[:, :8])
        np.testing.assert_allclose(rest, whole[8:], rtol=1e-12)
        np.testing.assert_allclose(begun, weights[:, 8:], rtol=1e-9, atol=1e-300)
    wholes, ends = (np.logaddexp.reduce(prior + part.sum(axis=1)) for part in (given, given[:, :8]))
    rest = mix(given[:, 8:], prior, Weighting(0.0), given[:, :8])
    assert rest.sum() == pytest.approx(wholes - ends, abs=1e-9)
    np.testing.assert_array_equal(mix(given, prior, read_logprobs=given), mix(given, prior))


def test_no_document_is_pruned_before_the_text() -> None:
    moving = MovingWeights(np.log([0.5, 0.5]), Weighting(0.0, 0.1), np.log([[0.9, 0.9], [0.1, 0.1]]))
    np.testing.assert_allclose(moving.weights, [81 / 82, 1 / 82])
    moving.see(np.log([0.5, 0.5]))
    np.testing.assert_array_equal(moving.weights, [1, 0])


@pytest.mark.parametrize("weighting", [REPLUG_WEIGHTS, Weighting()], ids=str)
def test_what_cannot_be_mixed_is_refused(weighting: Weighting) -> None:
    for impossible in (-np.inf, np.nan):
        with pytest.raises(ValueError, match="a token has the log-probs"):
            mix(np.full((2, 3), impossible), np.log([0.5, 0.5]), weighting)


def test_what_is_no_weighting_and_no_prior_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="expected finite numbers"):
        prior_log_weights(np.array([0.0, np.inf]))
    for temperature in (0, -1, np.nan, np.inf):
        with pytest.raises(ValueError, match="temperature is"):
            prior_log_weights(np.zeros(2), temperature)
    shares = [{"share": share} for share in (-0.1, 1.1, np.nan)]
    for wrong in (*shares, {"prune": -0.1}, {"prune": 1.0}, {"prune": np.nan}, {"read": -1}, {"read": 0.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Weighting(**wrong)


# A temperature lies beside an encoder's weights, is checked like them, and is used by what reads them.

FITTED = EnsembleTemperature(0.02, "lm", 10, 200)
TEXTS = ["red sky", "the blue sea", "a green tree"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    encoder = Encoder("stand_in")
    assert encoder.temperature is None
    encoder.temperature = FITTED
    encoder.save(tmp_path / "tuned")
    return tmp_path / "tuned"


def test_it_is_saved_with_an_encoder_and_goes_on_with_it(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder(str(folder))
    assert encoder.temperature == temperature_in(str(folder)) == FITTED
    encoder.save(tmp_path / "copy")
    assert temperature_in(str(tmp_path / "copy")) == FITTED
    assert FILE in json.loads((folder / "checksums.json").read_text())["files"] and not checksum_problems(folder)


def test_one_that_is_gone_or_changed_is_refused(folder: Path) -> None:
    content = (folder / FILE).read_text()
    (folder / FILE).write_text(content.replace("0.02", "0.2"))
    with pytest.raises(UserError, match=r"ensemble\.json"):
        Encoder(str(folder))
    with pytest.raises(UserError, match=r"damaged.*fit it again"):
        temperature_in(str(folder))
    (folder / FILE).unlink()
    with pytest.raises(UserError, match=r"ensemble\.json"):
        Encoder(str(folder))


def test_replug_mixes_at_the_retrievers_own_or_at_a_given_one(folder: Path) -> None:
    retriever, lm = EncoderRetriever(Encoder(str(folder)), TEXTS), StandInLM()
    [found] = retriever.retrieve(["the red sea"], 3)
    given = np.stack([lm.score([f"{one.text}\nthe red sea"], [" blue"])[0].token_logprobs for one in found])
    for asked, used in ((None, 0.02), (1.0, 1.0)):
        replug = ReplugLM(lm, retriever, 3, temperature=asked)
        expected = mix(given, prior_log_weights([one.similarity for one in found], used))
        assert replug.temperature == used
        assert replug.score(["the red sea"], [" blue"])[0].token_logprobs == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="temperature is 0"):
        ReplugLM(lm, retriever, 3, temperature=0).score("a", " b")
