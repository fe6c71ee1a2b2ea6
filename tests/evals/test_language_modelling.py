"""The measurement of language modelling against a naive one, and of the gains of single tokens."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from replug.config.errors import RunError, UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.config.methods import parse_methods
from replug.data.records import Document, Example
from replug.data.shards import write_documents
from replug.data.store import CorpusStore
from replug.evals.evidence import NOTHING, EvidenceBook, RetrievedDocuments, random_documents
from replug.evals.language_modelling import LanguageModelling, headroom_lines, oracle_bits
from replug.evals.loop import EXAMPLES_IN_FLIGHT, outcome_rows
from replug.evals.token_gain import EntityNames, gain_bits, mean_gains, popularities, rarities, words_of_tokens
from replug.models.build import lm_tokenizer
from replug.models.ensemble import Weighting, mix, prior_log_weights
from replug.models.local.stand_in_lm import StandInLM
from replug.models.preparing import corpus_to_index
from tests.support.command_line import ROOT
from tests.support.known_lm import ImmediateLM, KnownLM, opened
from tests.support.preparing import write_jsonl
from tests.support.tiny_lms import MAX_TOKENS, write_llama, write_tokenizer

DOCUMENTS = ["red sky", "blue sea and red sky", "a green tree", "日本 の 空", "the sea the sea", "red red red"]


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusStore:
    path = tmp_path / "documents"
    write_documents(path, [Document(f"d{i}", text, "x", f"s{i}") for i, text in enumerate(DOCUMENTS)])
    return CorpusStore(path)


def make_examples(count: int) -> list[Example]:
    endings = [" red sky", " the blue sea", " 日本 の 海 🙂", " green", " sea sea red"]
    return [Example(f"w{i}", f"text {i} on the sea", endings[i % len(endings)], "x") for i in range(count)]


def make_found(count: int) -> dict[str, RetrievedDocuments]:
    rng = np.random.default_rng(0)
    rows = [np.stack([rng.permutation(len(DOCUMENTS))[:3] for _ in range(count)]) for _ in range(2)]
    names = ("replug", "lsr")
    return {name: RetrievedDocuments(r, rng.normal(size=r.shape)) for name, r in zip(names, rows, strict=True)}


def naive_bits(example: Example, documents: list[str], similarities: Sequence[float]) -> float:
    """-log2 of the product over tokens of the weighted mean of their probabilities."""
    lm = StandInLM()
    weights = [math.exp(s) for s in similarities]
    prefixes = [f"{text}\n{example.context}" for text in documents]
    given = [lm.score([prefix], [example.continuation])[0].token_logprobs for prefix in prefixes]
    mixed = [sum(w * math.exp(p) for w, p in zip(weights, of, strict=True)) for of in zip(*given, strict=True)]
    return -sum(math.log2(one / sum(weights)) for one in mixed)


def test_bits_equal_a_naive_computation(corpus: CorpusStore) -> None:
    count = 2 * EXAMPLES_IN_FLIGHT + 3  # more than are under way at once
    examples, found = make_examples(count), make_found(count)
    methods = parse_methods(["none", *found], 3, dict.fromkeys(found, "path"))
    book = EvidenceBook(methods, corpus, found, [True] * count)
    rows = list(outcome_rows(opened(LanguageModelling(examples), ImmediateLM(), book), book))
    assert [row["id"] for row in rows] == [example.id for example in examples]
    bits = {name: [row["methods"][name]["numbers"]["bits"] for row in rows] for name in ("none", *found)}
    for row, example in enumerate(examples):
        plain = StandInLM().score([example.context], [example.continuation])[0]
        assert bits["none"][row] == pytest.approx(-plain.sum_logprob / math.log(2))
        for name, of in found.items():
            chosen = [DOCUMENTS[doc] for doc in of.doc_rows[row]]
            assert bits[name][row] == pytest.approx(naive_bits(example, chosen, of.similarities[row]))


def test_random_documents_are_distinct_and_the_same_for_the_same_seed() -> None:
    rows = random_documents(num_documents=9, num_examples=200, k=4, seed=1).doc_rows
    assert rows.shape == (200, 4) and all(len(set(row)) == 4 for row in rows.tolist())
    np.testing.assert_array_equal(rows, random_documents(9, 200, 4, seed=1).doc_rows)
    assert (rows != random_documents(9, 200, 4, seed=2).doc_rows).any()


def test_weights_that_follow_the_text_are_measured_from_the_same_scores(corpus: CorpusStore) -> None:
    examples = make_examples(4)
    found = {"replug": make_found(4)["replug"], "bm25": make_found(4)["lsr"]}
    names = ["none", "replug", "bm25", "replug/posterior", "bm25@2/posterior"]
    posterior = Weighting(share=0.1, prune=0.3)

    def rows(asked: list[str], lm: ImmediateLM) -> list[dict]:
        methods = parse_methods(asked, 3, {"replug": "path"})
        book = EvidenceBook(methods, corpus, found, [True] * 3 + [False], posterior=posterior)
        return list(outcome_rows(opened(LanguageModelling(examples, keeps_documents=True), lm, book), book))

    fixed, lm = ImmediateLM(), ImmediateLM()
    before, after = rows(names[:3], fixed), rows(names, lm)
    assert fixed.calls == lm.calls, "the LM is asked nothing more"
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        assert all(repr(old["methods"][name]) == repr(new["methods"][name]) for name in names[:3])
        of, is_retrieved = new["methods"]["replug/posterior"], row < 3
        given, similarities = of["detail"]["document_logprobs"], found["replug"].similarities[row]
        prior = prior_log_weights(similarities) if is_retrieved else np.zeros(1)
        assert len(given) == len(of["detail"]["final_weights"]) == (3 if is_retrieved else 1)
        assert of["numbers"]["bits"] == pytest.approx(-mix(given, prior, Weighting(0.1, 0.3)).sum() / math.log(2))
        assert sum(of["detail"]["final_weights"]) == pytest.approx(1, abs=1e-5)
        assert 0 < of["numbers"]["passes"] <= of["numbers"]["all_passes"] == given.size
        for oracle in ("bits_best_document", "bits_q_weighted", "bits_half_weighted"):
            assert of["numbers"][oracle] == new["methods"]["replug"]["numbers"][oracle], "of the documents alone"
    assert "passes" not in after[0]["methods"]["replug"]["numbers"]


def test_a_log_prob_that_is_not_finite_is_refused_with_its_text() -> None:
    task = opened(LanguageModelling(make_examples(1)), KnownLM(lambda *_: [-1.0, math.nan]))
    with pytest.raises(RunError, match="w0: the LM gave a token a log-probability that is not finite"):
        task.submit(0, {"none": NOTHING})()


def test_the_last_tokens_of_the_context_move_weights_that_follow_the_text(corpus: CorpusStore) -> None:
    examples, found, lm = make_examples(2), make_found(2), ImmediateLM()
    methods = parse_methods(["replug", "replug/posterior"], 3, {"replug": "path"})
    book = EvidenceBook(methods, corpus, found, [True] * 2, posterior=Weighting(share=0.1, read=1))
    task = opened(LanguageModelling(examples, keeps_documents=True), lm, book)
    for row, outcome in enumerate(outcome_rows(task, book)):
        prior, before = prior_log_weights(found["replug"].similarities[row]), examples[row].context.rsplit(" ", 1)
        prefixes = [f"{text}\n{before[0]}" for text in book.of(row)["replug"].texts]
        read = np.stack([score.token_logprobs for score in lm.score(prefixes, [f" {before[1]}"] * len(prefixes))])
        for name, moves in (("replug", ()), ("replug/posterior", (Weighting(0.1), read))):
            given = outcome["methods"][name]["detail"]["document_logprobs"]
            bits = outcome["methods"][name]["numbers"]["bits"]
            assert bits == pytest.approx(-mix(given, prior, *moves).sum() / math.log(2))


def test_documents_are_cut_by_the_lms_tokens_and_what_cannot_fit_is_refused_before_a_search(tmp_path: Path) -> None:
    lm, texts = tmp_path / "lm", tmp_path / "texts.jsonl"
    write_llama(lm)
    write_tokenizer(lm)
    document = "the cat sat on the mat and the cat slept, " * 8
    write_jsonl(texts, [{"text": "the cat sat on a much longer prefix, " * 60}])
    write_jsonl(tmp_path / "corpus.jsonl", [{"id": "d", "text": document}])

    def dataset_of(*keys: str) -> tuple[EvaluationConfig, LanguageModelling]:
        given = ["data.source=null", f"data.corpus={tmp_path}/corpus.jsonl", f"texts.path={texts}", f"lm.path={lm}"]
        given += [f"out={tmp_path}/out", "methods=[none,bm25@1]", "texts.scored_tokens=64", "texts.context_tokens=32"]
        config = load_evaluation_config(ROOT / "configs/eval_lm.yaml", [*given, *keys])
        corpus = corpus_to_index(config.run_config(), tmp_path / "data", tmp_path / "data")
        return config, LanguageModelling.of(config, corpus, None)

    config, dataset = dataset_of("texts.document_tokens=16")
    tokenizer = lm_tokenizer(config.lm)
    assert dataset.cut(document) == tokenizer.decode(tokenizer.encode(document)[:16])
    with pytest.raises(UserError, match=rf"holds {MAX_TOKENS} tokens, but a text has 9\d and a document \d+; .*=3\d"):
        dataset_of()
    dataset_of("lm.too_long=truncate")
    with pytest.raises(UserError, match=r"and a document 0; expected fewer texts.scored_tokens"):
        dataset_of("methods=[none]", "texts.scored_tokens=128", "lm.too_long=truncate")
    with pytest.raises(UserError, match=r"a document 16; expected fewer texts.scored_tokens and texts.context_tokens"):
        dataset_of("texts.document_tokens=16", "texts.scored_tokens=96", "lm.too_long=truncate")


# Headroom ------------------------------------------------------------------------------------------------------------


LOGPROBS = np.log(np.array([[0.5, 0.25], [0.25, 0.125]]))  # the first document's text has 3 bits, the second's 5


def test_q_weighs_by_the_mean_logprob_over_beta() -> None:
    means = LOGPROBS.mean(axis=1)
    weight = 1 / (1 + math.exp((means[1] - means[0]) / 0.5))
    expected = -math.log2(weight * 0.5 + (1 - weight) * 0.25) - math.log2(weight * 0.25 + (1 - weight) * 0.125)
    assert oracle_bits(LOGPROBS, beta=0.5)["bits_q_weighted"] == pytest.approx(expected)
    assert oracle_bits(LOGPROBS, beta=1e-3)["bits_q_weighted"] == pytest.approx(3)


def test_half_of_a_text_weighs_the_documents_for_the_other_half() -> None:
    agree = np.log([[0.5, 0.5], [0.25, 0.25]])  # the first document is better in both halves, so both gain
    differ = np.log([[0.5, 0.25], [0.25, 0.5]])
    even = -2 * math.log2(0.375)
    assert oracle_bits(agree)["bits_half_weighted"] < even < oracle_bits(differ)["bits_half_weighted"]
    assert oracle_bits(agree[:, :1])["bits_half_weighted"] == pytest.approx(even / 2)


def test_lines_say_the_headroom_of_ensembles() -> None:
    ensembles = ["random", "replug", "replug@3/even"]
    numbers = {"bpb": 0.7, "bpb_q_weighted": 0.64, "bpb_best_document": 0.66, "bpb_half_weighted": 0.68}
    of = {name: {"value": value} for name, value in numbers.items()}
    alone = {key: {"value": 0.7} for key in of}  # a method with one document gains nothing
    lines = headroom_lines({**dict.fromkeys([*ensembles, "replug/posterior"], of), "lsr@1": alone})
    assert [line.split(":")[0] for line in lines] == [f"Headroom of {name}" for name in ensembles]
    assert headroom_lines({}) == []


# Gains of tokens by hand, by the rarity of their words and by the popularity of names ---------------------------------


def test_a_gain_is_the_change_in_bits_and_rarity_that_of_the_word_a_token_is_a_part_of() -> None:
    tokens = (" The", " Tap", "pah", "annock", ",", " river")
    without, with_documents = np.log([[0.5, 0.01, 0.5, 0.5, 0.25, 0.4], [0.5, 0.16, 0.5, 1.0, 0.125, 0.1]])
    assert gain_bits(without, with_documents) == pytest.approx([0, 4, 0, 1, -1, -2])
    of_words = ["1000-9999", "1-9", "1-9", "1-9", "no word", "10-99"]
    assert rarities(words_of_tokens(tokens), {"the": 1200, "river": 37, "tappahannock": 3}) == of_words
    assert rarities(words_of_tokens(tokens), {})[0] == "0"


def rarity_gains(by_text, **resampling):
    """The mean gains of texts of (bits, times that the corpus has the word, None for no word)."""
    names = [[rarities([None if n is None else "x"], {"x": n or 0})[0] for _, n in text] for text in by_text]
    return mean_gains("gain", [[bits for bits, _ in text] for text in by_text], names, **resampling)


def test_bins_go_by_powers_of_ten_and_the_mean_is_of_their_tokens() -> None:
    counts = [0, 1, 9, 10, 99, 100, 12_345, None, 0]
    bins = rarity_gains([[(float(i), count) for i, count in enumerate(counts)]])
    means = {name: mean for name, mean in bins.items() if not name.endswith(" - rest")}
    found = {name.removeprefix("gain/"): (mean["n"], mean["value"]) for name, mean in means.items()}
    expected = {"0": (2, 4.0), "1-9": (2, 1.5), "10-99": (2, 3.5), "100-999": (1, 5.0), "10000-99999": (1, 6.0)}
    assert found == expected | {"no word": (1, 7.0)}
    assert all(mean["interval"] == [mean["value"]] * 2 for mean in means.values()), "there is one text"


def test_intervals_are_over_texts_that_have_such_tokens() -> None:
    texts = [[(1.0, 5), (1.0, 5), (2.0, 0)], [(4.0, 5)], [(7.0, None)]]
    means = rarity_gains(texts, num_resamples=500)
    assert means["gain/1-9"] == {"value": 2.0, "n": 3, "clusters": 2, "interval": [1.0, 4.0]}
    assert means["gain/0"]["interval"] == [2.0, 2.0] and means["gain/no word"]["interval"] == [7.0, 7.0]


def test_a_bin_is_compared_with_all_other_tokens_over_the_same_resamples() -> None:
    rng = np.random.default_rng(0)
    drawn = zip(rng.normal(0, 5, 40), rng.normal(0, 0.1, 40), strict=True)
    texts = [[(level + 2 + noise, 5), (level + noise, 50), (level - noise, 5000)] for level, noise in drawn]
    entries = rarity_gains(texts, num_resamples=300)
    low, high = entries["gain/1-9"]["interval"]
    assert high - low > 2, "texts differ far more than bins do"
    rest = entries["gain/1-9 - rest"]
    assert rest["value"] == pytest.approx(2, abs=0.1) and rest["interval"][0] > 1.9 and rest["p_holm"] < 0.05
    assert all(entries[f"gain/{name} - rest"]["interval"][1] < 0 for name in ("10-99", "1000-9999"))


POPULARITY = {"Li Bai": 50.0, "Bai": 5000.0, "Paris": 90000.0, "Live": 7.0, "Li Bai House": 3.0}


def test_the_longest_name_that_begins_at_a_word_is_the_mention_and_case_counts():
    names = EntityNames(POPULARITY)
    found = names.mentions("Bai met Li Bai, not Li Bai House; they live in Paris-Live.")
    assert [name for name, _, _ in found] == ["Bai", "Li Bai", "Li Bai House", "Paris", "Live"]
    text = "so Li Bai left"
    [mention] = names.mentions(text)
    assert text[mention[1] : mention[2]] == "Li Bai"
    assert names.mentions("Baiting Lives") == []
    assert [name for name, _, _ in names.mentions("a poem of Li Bai")] == ["Li Bai"]  # longer names begin so too


def test_tokens_of_a_name_gain_in_the_bin_of_its_popularity():
    texts = [
        [("The", 0.0), (" Li", 2.0), (" B", 3.0), ("ai", 1.0), (" of", 0.5), (" Paris", -1.0)],
        [(" Paris", 0.0), (" and", 0.25), (" Bai", 4.0), (".", 0.25)],
    ]
    tokens = [[token for token, _ in of] for of in texts]
    names = EntityNames(POPULARITY)
    labels = [popularities(own, names.mentions("".join(own)), POPULARITY) for own in tokens]
    bins = mean_gains("gain", [[bits for _, bits in of] for of in texts], labels, num_resamples=100)
    assert [(name, of["n"], of["value"]) for name, of in bins.items() if not name.endswith(" - rest")] == [
        ("gain/popularity 10^1-10^2", 3, pytest.approx(2.0)),
        ("gain/popularity 10^3-10^4", 1, pytest.approx(4.0)),
        ("gain/popularity 10^4-10^5", 2, pytest.approx(-0.5)),
        ("gain/no entity", 4, pytest.approx(0.25)),
    ]
