"""What an LM reads in an evaluation, against numbers counted by hand."""

from pathlib import Path

import pytest

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.planning.readings import LM, RERANK_LM, Reading, readings_of

ROOT = Path(__file__).parents[2]
MADE = {
    "lm": ["texts.path=TEXTS", "data.source=null", "data.corpus=DOCUMENTS.jsonl", "data.document_tokens=100"],
    "mmlu": ["data.corpus=DOCUMENTS.jsonl", "questions.path=MMLU"],
    "open_qa": ["data.corpus=DOCUMENTS.jsonl", "questions.path=QUESTIONS.jsonl"],
    "popqa": ["data.corpus=DOCUMENTS.jsonl", "questions.path=popQA.tsv"],
    "internet_nq": ["data.corpus=DOCUMENTS.jsonl", "questions.path=NQ.jsonl"],
    "internet_fever": ["data.corpus=DOCUMENTS.jsonl", "questions.path=FEVER.jsonl"],
    "retrieval": ["data.corpus=DOCUMENTS.jsonl", "questions.path=QUESTIONS.jsonl"],
}


def config_of(name: str, methods: str, *overrides: str) -> EvaluationConfig:
    given = [*MADE[name], "retriever.path=facebook/contriever", "lm.path=gpt2", f"methods={methods}", *overrides]
    return load_evaluation_config(ROOT / f"configs/eval_{name}.yaml", given)


def read_of(name: str, methods: str, num: int, *overrides: str) -> tuple[int, int, int]:
    """Tokens put, tokens read where what is shared is read once, and tokens generated."""
    readings = readings_of(config_of(name, methods, *overrides), num)[LM]
    sums = [(one.put, one.read_once, one.generated) for one in readings]
    put, once, generated = (sum(column) for column in zip(*sums, strict=True))
    return put, once, generated


def test_a_document_that_two_methods_of_one_source_read_is_scored_once():
    without, pair = 128 + 128, 100 + 128 + 128
    assert read_of("lm", "[none]", 7)[1] == 7 * without
    assert read_of("lm", "[none,replug,replug@3,replug/even]", 7)[1] == 7 * (without + 10 * pair)
    assert read_of("lm", "[none,replug@3,bm25@2]", 7)[1] == 7 * (without + 5 * pair)


def test_documents_in_one_prompt_a_long_context_and_reranking_are_counted_as_they_are_read():
    assert read_of("lm", "[replug@10/concat]", 1)[1] == 10 * 100 + 256
    assert read_of("lm", "[long_context]", 1, "texts.long_context_tokens=600")[1] == 600
    assert read_of("lm", "[bm25@16/rerank]", 1)[1] == 16 * (100 + 128) + (100 + 256)


def test_scored_positions_are_those_of_the_continuation():
    readings = readings_of(config_of("lm", "[none,replug@2]", "texts.scored_tokens=32"), 5)[LM]
    assert sum(one.predicted for one in readings) == 5 * 3 * 32


def test_an_opening_is_read_once_for_each_subject_and_method_and_a_server_reads_it_in_every_prompt():
    shots = 5 * (100 + 5)
    put, once, generated = read_of("mmlu", "[none]", 10)
    assert (put, once, generated) == (10 * 4 * (shots + 100 + 1), 57 * shots + 10 * (100 + 4), 0)
    shots = 5 * (100 + 5 + 128)  # each with its document
    put, once, _ = read_of("mmlu", "[replug]", 10)
    assert (put, once) == (100 * 4 * (shots + 228 + 1), 57 * shots + 100 * (228 + 4))


def test_demonstrations_without_documents_are_shorter():
    alone = read_of("mmlu", "[replug]", 10, "questions.documents_in_shots=false")[1]
    assert read_of("mmlu", "[replug]", 10)[1] - alone == 57 * 5 * 128


def test_answers_are_generated_after_every_prompt_and_decoded_by_question():
    put, once, generated = read_of("open_qa", "[replug@3]", 10)
    opening = 16 * (20 + 5 + 128)
    assert (put, once, generated) == (30 * (opening + 148), opening + 30 * 148, 30 * 16)
    [reading] = readings_of(config_of("open_qa", "[replug@3]"), 10)[LM]
    assert reading.steps == 10 * 16


def test_a_document_that_the_lm_writes_is_generated_and_then_read():
    put, once, generated = read_of("popqa", "[genread]", 10, "questions.shots=0")
    assert (once, generated) == (10 * 15 + 10 * (15 + 150), 10 * 150 + 10 * 15)
    assert put == once


def test_of_passages_answers_are_sampled_and_every_factor_is_scored():
    """As `evals.internet_costs` has it: sampling, answers, the question, answers alone, both."""
    passage, question, answer, opening = 150, 20, 5, 15 * (20 + 5 + 150)
    once = (
        *(passage + question, passage + question + 4 * answer, passage + question),
        *(passage + 4 * answer, passage + 4 * (answer + question)),
    )
    found = read_of("internet_nq", "[poe@2]", 3)
    assert found[1] == 5 * opening + 3 * 2 * sum(once)
    assert found[2] == 3 * 2 * 4 * answer


def test_labels_are_scored_and_nothing_is_sampled():
    assert read_of("internet_fever", "[none,direct@2]", 3)[2] == 0
    assert read_of("internet_nq", "[none]", 3)[2] == 3 * 50 * 5


def test_factors_are_the_other_lms_where_one_reranks():
    readings = readings_of(config_of("internet_nq", "[poe@2]", "rerank_lm.path=gpt2"), 3)
    assert [len(readings[name]) for name in (LM, RERANK_LM)] == [1, 4]


def test_retrieval_asks_no_lm():
    assert readings_of(config_of("retrieval", "[replug]"), 10) == {}


@pytest.mark.parametrize("name", ["LETTERS", "MAX_NEW_TOKENS", "NUM_SHOTS", "SAMPLES", "SUBJECTS"])
def test_what_is_assumed_is_what_the_evaluations_have(name: str):
    from replug.answering.answerer import AnsweringOptions
    from replug.evals import lm_passes, mmlu, popqa, questions
    from replug.planning import readings

    options = AnsweringOptions()
    own, theirs = {
        "LETTERS": (readings.LETTERS, len(mmlu.LETTERS)),
        "MAX_NEW_TOKENS": (readings.WRITTEN_TOKENS, lm_passes.MAX_NEW_TOKENS),
        "NUM_SHOTS": (
            [readings.SHOTS[kind] for kind in ("mmlu", "open_qa", "popqa")],
            [mmlu.NUM_DEMONSTRATIONS, questions.NUM_DEMONSTRATIONS, popqa.NUM_SHOTS],
        ),
        "SAMPLES": (
            (readings.SAMPLES, readings.SAMPLES_ALONE),
            (options.num_samples, options.num_samples_alone),
        ),
        "SUBJECTS": (readings.OPENINGS["mmlu"], len(mmlu.CATEGORY_OF)),
    }[name]
    assert own == theirs


def test_a_prompt_that_stands_alone_is_read_as_it_is_put():
    assert Reading(3, 100, end_tokens=20).put == Reading(3, 100, end_tokens=20).read_once == 360
