"""One answer from several prompts, against each prompt alone without cache or padding, on tiny random models."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from replug.config.errors import RunError
from replug.models.black_box_lm import Mixture, UnscorableText
from replug.models.ensemble import Weighting
from replug.models.generation import Generated, GenerationOptions, before_stop, elected
from replug.models.local import mixtures
from replug.models.local.decoding import ANEW, PACKED, PADDED, SHARED, find_cache_use
from replug.models.local.hf_lm import HuggingFaceLM
from replug.models.local.mixtures import TokenChooser, entropy, mix_next_token, nucleus
from tests.support.architectures import write_architecture
from tests.support.lm_answers import mixed, pieces
from tests.support.tiny_lms import (
    DEMONSTRATIONS,
    MAX_TOKENS,
    VOCABULARY,
    load,
    num_tokens,
    reference,
    write_gpt2,
    write_llama,
    write_with_tokenizer,
)

PROMPTS = [
    "the mat\nthe cat sat",
    "on\nthe cat sat",
    "a much longer prefix, a much longer one\nthe cat sat",
    "日本\nthe cat sat",
]
WEIGHTS = [0.4, 0.1, 0.3, 0.2]
FEW_SHOT = [DEMONSTRATIONS + prompt for prompt in ("x\nthe", "a mat and a cat\nthe", "日本語\nthe")]


def writer(kind: str, **given: int) -> Callable[[Path], None]:
    write = partial(write_architecture, kind=kind, **given)
    write.__name__ = kind
    return write


KINDS = [  # and what their keys and values are kept for
    (write_gpt2, PACKED),
    (write_llama, PACKED),
    (writer("opt"), PACKED),
    (writer("bloom"), SHARED),  # it counts columns
    (writer("mistral", sliding_window=40), PADDED),  # these two look back a number of columns
    (writer("gpt_neo", window_size=40), PADDED),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0].__name__.removeprefix("write_"))
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLM:
    write, use = request.param
    lm = load(write, tmp_path_factory.mktemp("lm"))
    assert lm._cache_use == use
    return lm


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLM:
    return load(write_llama, tmp_path_factory.mktemp("llama"))


def assert_equals_reference(
    lm: HuggingFaceLM, found: Generated, prompts: Sequence[str], weights: Sequence[float], count: int = 12
) -> None:
    ids, logprobs, entropies = reference(lm, prompts, weights, count)
    assert found.text == lm.tokenizer.decode(ids, skip_special_tokens=True)
    np.testing.assert_allclose(found.token_logprobs, logprobs, atol=1e-4)
    np.testing.assert_allclose(found.token_entropies, entropies, atol=1e-4)
    assert found.token_logprobs.dtype == found.token_entropies.dtype == np.float32
    lengths = [len(lm.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert (found.num_prompts, found.prompt_tokens, found.num_tokens) == (len(prompts), sum(lengths), len(ids))


def assert_same(one: Generated, other: Generated) -> None:
    assert one.text == other.text
    for part in ("token_logprobs", "token_entropies", "weights"):
        np.testing.assert_allclose(getattr(one, part), getattr(other, part), atol=1e-4)


GREEDY = GenerationOptions(12)


def test_equal_answers_add_their_votes_and_each_weighs_by_its_mean_log_prob() -> None:
    def answer(text: str, *probabilities: float) -> Generated:
        return Generated(text, np.log(probabilities).astype(np.float32), prompt_tokens=10)

    answers = [answer(" Loire", 0.9, 0.9), answer(" Rhine", 0.4), answer(" Rhine ", 0.5, 0.5), answer(" Po", 1.0)]
    found = elected(answers, [0.4, 0.35, 0.25, 0.0])
    votes = np.array([0.4 * 0.9, 0.35 * 0.4, 0.25 * 0.5, 0.0])
    assert found.text == " Loire" and found.prompt_tokens == 40
    np.testing.assert_allclose(found.weights, votes / votes.sum(), rtol=1e-6)
    assert elected(answers, [0.3, 0.4, 0.3, 0.0]).text == " Rhine"  # 0.27 against 0.16 + 0.15
    silent = [replace(one, token_logprobs=one.token_logprobs[:0]) for one in answers]  # of a server without log-probs
    assert elected(silent, [0.4, 0.35, 0.25, 0.0]).text == " Rhine"
    empty = replace(silent[0], text="")
    assert elected([empty, *answers[1:]], [0.9, 0.05, 0.05, 0.0]).text == " Rhine ", "an empty answer is not certain"


def test_a_prompt_of_no_weight_counts_for_nothing_and_half_precision_is_mixed_in_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0], [50.0, -50.0, float("-inf")]], dtype=torch.bfloat16)
    mixed, _ = mix_next_token(logits, torch.tensor([1.0, 0.0], dtype=torch.float64).log())
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, logits[0].float().log_softmax(-1))


def test_the_entropy_is_the_naive_one_and_what_has_no_probability_adds_nothing() -> None:
    probabilities = [0.5, 0.25, 0.25, 0.0]
    assert entropy(torch.tensor(probabilities).log()) == pytest.approx(1.5 * math.log(2))
    assert entropy(torch.zeros(7).log_softmax(-1)) == pytest.approx(math.log(7))
    assert math.copysign(1, entropy(torch.tensor([0.0, -math.inf]))) == 1  # and never below 0
    assert entropy(torch.tensor([1e-7, -200.0])) == 0


def test_samples_have_the_frequencies_of_the_tempered_mixture() -> None:
    logprobs = torch.tensor([0.6, 0.3, 0.1]).log()
    chooser = TokenChooser(GenerationOptions(1, temperature=0.5, seed=3))
    counts = np.bincount([chooser.choose(logprobs) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(counts, np.array([0.36, 0.09, 0.01]) / 0.46, atol=0.02)


def test_the_nucleus_holds_the_fewest_tokens_with_enough_probability() -> None:
    probabilities = torch.tensor([0.125, 0.5, 0.25, 0.125])
    assert nucleus(probabilities, 0.5).tolist() == [0, 0.5, 0, 0]
    assert nucleus(probabilities, 0.51).tolist() == [0, 0.5, 0.25, 0]
    assert nucleus(probabilities, 1e-9).tolist() == [0, 0.5, 0, 0]
    assert nucleus(probabilities, 0.8).tolist() == [0.125, 0.5, 0.25, 0]  # of equals, the first
    assert nucleus(probabilities, 1.0).tolist() == probabilities.tolist()
    chooser = TokenChooser(GenerationOptions(1, temperature=1.0, top_p=0.7))
    assert {chooser.choose(probabilities.log()) for _ in range(100)} == {1, 2}


# One answer from several prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [PROMPTS, FEW_SHOT, PROMPTS[2:3]], ids=len)
def test_answers_equal_the_reference_and_those_of_one_prompt_transformers_own(
    lm: HuggingFaceLM, prompts: list[str]
) -> None:
    weights = np.array(WEIGHTS[: len(prompts)]) / sum(WEIGHTS[: len(prompts)])
    found = mixed(lm, prompts, weights.tolist(), GREEDY)
    assert_equals_reference(lm, found, prompts, weights.tolist())
    if len(prompts) == 1:
        ids = torch.tensor([lm.tokenizer(prompts[0])["input_ids"]])
        theirs = lm.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
        assert found.text == lm.tokenizer.decode(theirs, skip_special_tokens=True)


def test_an_opening_is_read_once_for_all_calls_and_changes_no_answer(llama: HuggingFaceLM) -> None:
    options = replace(GREEDY, opening=DEMONSTRATIONS)
    llama._kept = []
    for prompt in FEW_SHOT[:2]:  # a prompt alone shares nothing with others of its call
        before = llama.counts["tokens"]
        alone = mixed(llama, [prompt], [1.0], GREEDY)
        plain = llama.counts["tokens"] - before
        opened = mixed(llama, [prompt], [1.0], options)
        assert_same(alone, opened)
        assert opened.prompt_tokens == alone.prompt_tokens == num_tokens(llama, prompt)
    assert llama.counts["tokens"] - before - plain <= plain - 64


class WithoutPositions(GPT2LMHeadModel):
    """A model that takes no positions, as some architectures: they are columns, whatever the mask says."""

    def forward(self, input_ids, **options):
        return super().forward(input_ids, **options)


def test_a_model_without_keys_or_that_counts_padding_as_positions_is_read_anew(tmp_path: Path) -> None:
    assert load(writer("mamba"), tmp_path / "mamba")._cache_use == ANEW
    lm = load(write_gpt2, tmp_path / "gpt2")
    lm.model.__class__ = WithoutPositions
    assert find_cache_use(lm.model) == ANEW
    for count in (len(PROMPTS), 1):
        weights = [weight / sum(WEIGHTS[:count]) for weight in WEIGHTS[:count]]
        assert_equals_reference(lm, mixed(lm, PROMPTS[:count], weights, GREEDY), PROMPTS[:count], weights)


# Where answers end -----------------------------------------------------------------------------------------------


def test_an_answer_ends_before_the_stop_wherever_it_lies(llama: HuggingFaceLM) -> None:
    ids, *_ = reference(llama, PROMPTS, WEIGHTS, 12)
    texts = [llama.tokenizer.decode(ids[: number + 1], skip_special_tokens=True) for number in range(len(ids))]
    whole = texts[-1]
    for start in range(len(whole) - 1):
        for length in (1, 2, 5):
            stop = whole[start : start + length]
            if "\ufffd" in whole[: start + length + 1]:
                continue
            found = mixed(llama, PROMPTS, WEIGHTS, GenerationOptions(12, stop))
            assert found.text == whole.split(stop)[0]
            steps = next(number + 1 for number, text in enumerate(texts) if stop in text)
            assert len(found.token_logprobs) == steps  # not one token more than shows the stop


def test_the_stop_that_is_complete_first_ends_an_answer_and_equal_stops_are_one_form() -> None:
    assert before_stop("one. two\nthree", ["\n", "."]) == "one"
    assert before_stop("abcd", ["bcd", "c"]) == "ab"  # as who sees a token at a time would say
    assert before_stop("abcd", ["c", "abc", "bc"]) == ""  # the longest of those that end together
    assert before_stop("abcd", []) == before_stop("abcd", None) == before_stop("abcd", ["x", "y"]) == "abcd"
    for stop, form in (([], None), (["\n"], "\n"), (["b", "a", "b"], ("a", "b")), (("a",), "a")):
        assert GenerationOptions(3, stop).stop == GenerationOptions(3, stop, num_samples=2).stop == form


def test_an_answer_ends_at_every_end_token_of_the_models_configuration(llama: HuggingFaceLM, tmp_path: Path) -> None:
    ids, logprobs, _ = reference(llama, PROMPTS, WEIGHTS, 12)
    number = next(n for n, token in enumerate(ids) if n >= 2 and token not in ids[:n] and token != 1)
    write_with_tokenizer(write_llama, tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [VOCABULARY - 1, ids[number]]}))
    found = mixed(HuggingFaceLM(str(tmp_path)), PROMPTS, WEIGHTS, GREEDY)
    assert found.text == llama.tokenizer.decode(ids[:number], skip_special_tokens=True)
    np.testing.assert_allclose(found.token_logprobs, logprobs[: number + 1], atol=1e-4)  # the end token is among them


def test_characters_of_several_tokens_are_whole(llama: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made to say a text whose characters are cut into bytes, and stop in the midst of it."""
    said = "続きは🙂で。終"
    ids = llama.tokenizer(said, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(said)
    script = iter([*ids, 1])
    monkeypatch.setattr(mixtures.TokenChooser, "choose", lambda *_: next(script))
    assert mixed(llama, ["x"], [1.0], GenerationOptions(100)).text == said
    script = iter([*ids, 1])
    assert mixed(llama, ["x"], [1.0], GenerationOptions(100, stop="。")).text == "続きは🙂で"


MIXTURES = [
    Mixture(PROMPTS, WEIGHTS),
    Mixture(["the mat and the cat"], [1.0]),
    Mixture([prompt * 3 for prompt in PROMPTS[:2]], [0.5, 0.5]),
    Mixture(PROMPTS[::-1], WEIGHTS),
    Mixture(PROMPTS, WEIGHTS, Weighting(0.05)),
    Mixture(PROMPTS, WEIGHTS, Weighting(0.0, prune=0.25)),
    Mixture([f"{prompt} is what the cat said" for prompt in PROMPTS], WEIGHTS, Weighting(0.05, prune=0.05, read=5)),
    Mixture([prompt[::-1] + " on the mat" for prompt in PROMPTS], WEIGHTS, Weighting(0.0, read=100)),
]


@pytest.mark.parametrize(
    "options",
    [GenerationOptions(12, ["the", "a", "o"]), GenerationOptions(12, temperature=1.0, seed=3)],
    ids=["stops", "drawn"],
)
def test_mixtures_side_by_side_have_the_answers_that_each_has_alone(
    llama: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch, options: GenerationOptions
) -> None:
    alone = [llama.generate([one], options)[0] for one in MIXTURES]
    for budget in (1, 60, 1000):  # one at a time, several at a time, all
        monkeypatch.setattr(llama, "tokens_per_batch", budget)
        for one, other in zip(llama.generate(MIXTURES, options), alone, strict=True):
            assert_same(one, other)
            assert (one.num_prompts, one.prompt_tokens) == (other.num_prompts, other.prompt_tokens)
    assert llama.generate([], options) == []


def test_answers_and_their_weights_are_those_of_their_scores(
    lm: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = GenerationOptions(12, temperature=1.0, seed=3)
    begin, begun = lm._begin, []
    monkeypatch.setattr(lm, "_begin", lambda *given: begun.append(begin(*given)) or begun[-1])
    found = lm.generate(MIXTURES, options)
    for mixture, answer, under_way in zip(MIXTURES, found, [*begun], strict=True):
        ids, given, read = under_way._ids, [], mixture.num_read(under_way.rows)
        for prompt in under_way.rows:
            seen = [*prompt[len(prompt) - read :], *ids]
            logits = lm.model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - read - 1 : -1]
            given.append(logits.double().log_softmax(-1)[range(len(seen)), seen].numpy())
        assert (read > 0) == (mixture.weighting.read > 0)
        moving, after = mixture.moving(np.array(given)[:, :read]), np.array(given)[:, read:]
        np.testing.assert_allclose(answer.token_logprobs, [moving.see(one) for one in after.T], atol=1e-4)
        np.testing.assert_allclose(answer.weights, moving.weights, atol=1e-4)
    kept, moved, pruned = found[3].weights, found[4].weights, found[5].weights
    np.testing.assert_allclose(kept, WEIGHTS)
    assert abs(moved - WEIGHTS).max() > 1e-3 and (pruned == 0).any()


def test_mixtures_that_memory_does_not_hold_are_halved(
    llama: HuggingFaceLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = llama.generate(MIXTURES, GREEDY)
    grow = llama._grow

    def grow_few(answers: Sequence[mixtures.MixedAnswer]) -> object:
        if sum(len(answer.rows) for answer in answers) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grow(answers)

    monkeypatch.setattr(llama, "_grow", grow_few)
    for one, other in zip(llama.generate(MIXTURES, GREEDY), expected, strict=True):
        assert_same(one, other)
    assert "halving" in caplog.text


def test_a_piece_holds_no_half_character_and_no_part_of_a_stop() -> None:
    assert pieces(["a", "a\ufffd", "a\ufffd\ufffd", "a続", "a続b"], None) == ["a", "続", "b"]
    assert pieces(["one", "one\n", "one\nQ", "one\nQ", "one\nQx"], "\nQ:") == ["one", "\nQx"]
    assert pieces(["one", "one\n", "one\nQ", "one"], ["\nQ:", "."]) == ["one"]  # cut by its last token
    assert pieces(["", "a\ufffd"], None) == ["a", "\ufffd"]  # the answer itself ends so
    assert pieces([""], None) == []
    with pytest.raises(RunError, match="cannot be streamed: 'do n' was given out"):
        pieces(["do n", "don't"], None)


def test_prompts_that_do_not_fit_with_the_new_tokens_are_unscorable(llama: HuggingFaceLM) -> None:
    prompt = ("qzjxvk" * 30)[: MAX_TOKENS - 12]  # no merges: one token a letter
    assert num_tokens(llama, prompt) == MAX_TOKENS - 12
    assert_equals_reference(llama, mixed(llama, [prompt], [1.0], GREEDY), [prompt], [1.0])
    with pytest.raises(UnscorableText, match=rf"input 1 has {MAX_TOKENS - 12} \+ 13 tokens .* holds {MAX_TOKENS}"):
        mixed(llama, ["x", prompt], [0.5, 0.5], GenerationOptions(13))
