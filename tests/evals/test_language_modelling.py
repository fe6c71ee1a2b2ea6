"""The measurement against a naive one, with the stand-in LM over a small corpus on disk."""

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
from replug.models.build import lm_tokenizer
from replug.models.ensemble import Weighting, mix, prior_log_weights
from replug.models.local.stand_in_lm import StandInLM
from replug.models.preparing import corpus_to_index
from replug.models.prompt import PromptTemplate
from tests.support.command_line import ROOT
from tests.support.known_lm import ImmediateLM, KnownLM, opened
from tests.support.preparing import write_jsonl
from tests.support.tiny_lms import MAX_TOKENS, write_llama, write_tokenizer

SEPARATOR = "\n"
JOINED = PromptTemplate()
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
    return {
        name: RetrievedDocuments(r, rng.normal(size=r.shape)) for name, r in zip(("replug", "lsr"), rows, strict=True)
    }


def measure_bits(
    lm: StandInLM, corpus: CorpusStore, examples: list[Example], found: dict[str, RetrievedDocuments]
) -> dict[str, list[float]]:
    """Bits of every example by method; `none` first."""
    k = max(of.doc_rows.shape[1] for of in found.values())
    methods = parse_methods(["none", *found], k, dict.fromkeys(found, "path"))
    book = EvidenceBook(methods, corpus, found, [True] * len(examples))
    rows = list(outcome_rows(opened(LanguageModelling(examples), lm, book, template=JOINED), book))
    assert [row["id"] for row in rows] == [example.id for example in examples]
    return {name: [row["methods"][name]["numbers"]["bits"] for row in rows] for name in ("none", *found)}


def naive_bits(example: Example, documents: list[str], similarities: Sequence[float]) -> float:
    """-log2 of the product over tokens of the weighted mean of their probabilities."""
    lm = StandInLM()
    weights = [math.exp(s) for s in similarities]
    prefixes = [text + SEPARATOR + example.context for text in documents]
    given = [lm.score([prefix], [example.continuation])[0].token_logprobs for prefix in prefixes]
    bits = 0.0
    for token in range(len(given[0])):
        mixed = sum(w * math.exp(row[token]) for w, row in zip(weights, given, strict=True)) / sum(weights)
        bits -= math.log2(mixed)
    return bits


def test_bits_equal_a_naive_computation(corpus: CorpusStore) -> None:
    count = 2 * EXAMPLES_IN_FLIGHT + 3  # more than are under way at once
    examples, found = make_examples(count), make_found(count)
    bits = measure_bits(ImmediateLM(), corpus, examples, found)
    assert list(bits) == ["none", "replug", "lsr"]
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
        task = opened(LanguageModelling(examples, keeps_documents=True), lm, book, template=JOINED)
        return list(outcome_rows(task, book))

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
    task = opened(LanguageModelling(examples, keeps_documents=True), lm, book, template=JOINED)
    for row, outcome in enumerate(outcome_rows(task, book)):
        prior, before = prior_log_weights(found["replug"].similarities[row]), examples[row].context.rsplit(" ", 1)
        prefixes = [f"{text}{SEPARATOR}{before[0]}" for text in book.of(row)["replug"].texts]
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


def of(ensemble: float, q_weighted: float, best_document: float, half_weighted: float = 0.68) -> dict:
    numbers = {"bpb": ensemble, "bpb_q_weighted": q_weighted, "bpb_best_document": best_document}
    numbers["bpb_half_weighted"] = half_weighted
    return {name: {"value": value} for name, value in numbers.items()}


def test_lines_say_the_headroom_of_ensembles() -> None:
    results = {
        "none": of(1.0, 1.0, 1.0),
        "random": of(0.9, 0.88, 0.88),
        "replug": of(0.70, 0.64, 0.66),
        "replug@3/even": of(0.7, 0.69999, 0.6),
        "replug/posterior": of(0.67, 0.62, 0.61),
        "lsr@1": of(0.6, 0.6, 0.6),
    }
    lines = headroom_lines(results)
    assert [line.split(":")[0] for line in lines] == [
        f"Headroom of {name}" for name in ("random", "replug", "replug@3/even")
    ]
    assert headroom_lines({}) == []
