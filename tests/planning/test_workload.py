"""The published figures of GROUND: hours of an A100 and an H100 at 35% of their peaks."""

import json
from pathlib import Path

import pytest

from replug.config.load import load_config
from replug.config.refresh_policy import RefreshPolicy
from replug.config.schema import Config
from replug.models.encoder import Encoder
from replug.planning.accelerators import parse_devices
from replug.planning.model_sizes import encoder_size, lm_size
from replug.planning.pace import job_of
from replug.planning.workload import Shape, index_size, shape_of, total_flop, work_of


def hours(flop: float, name: str) -> float:
    return flop / parse_devices(f"1x{name}", efficiency=0.35).rate("bfloat16", "score") / 3600


@pytest.mark.parametrize(
    ("lm", "a100", "h100"), [("gpt2", 6.6, 2.07), ("gpt2-xl", 98, 31), ("facebook/opt-6.7b", 413, 130)]
)
def test_scoring_takes_the_published_hours(paper: Config, lm: str, a100: float, h100: float) -> None:
    paper.lm.path = lm
    job = job_of(paper)
    flop = total_flop(job.shape, job.work)["score"]
    assert hours(flop, "A100") == pytest.approx(a100, rel=0.02)
    assert hours(flop, "H100") == pytest.approx(h100, rel=0.02)


def test_embedding_takes_the_published_hours_for_each_of_nine_builds(paper: Config) -> None:
    job = job_of(paper)
    build = job.shape.num_documents * job.work.document
    assert job.shape.num_builds == 9
    assert hours(build, "A100") == pytest.approx(2.05 * 130 / 128, rel=0.01)
    assert hours(build, "H100") == pytest.approx(0.65 * 130 / 128, rel=0.01)
    assert hours(total_flop(job.shape, job.work)["embed"], "A100") == pytest.approx(18.4 * 130 / 128, rel=0.01)


def test_training_and_search_take_the_published_hours(paper: Config) -> None:
    job = job_of(paper)
    assert hours(job.shape.steps * job.work.train_step, "A100") == pytest.approx(6, abs=0.5)
    assert hours(job.shape.steps * job.work.train_step, "H100") == pytest.approx(2, abs=0.25)
    assert hours(job.shape.steps * job.work.search_batch, "A100") == pytest.approx(0.2, abs=0.03)


def test_flop_of_a_pair_computed_by_hand() -> None:
    lm, encoder = lm_size("gpt2"), encoder_size("facebook/contriever")
    work = work_of(small_shape(), encoder, lm)
    layers = 12 * 12 * 768**2
    tokens = 4 + 3 + 2
    assert work.pair == tokens * (2 * layers + 12 * 4 * tokens * 768) + 2 * 2 * 768 * 50257
    assert work.document == 6 * (2 * layers + 12 * 4 * 6 * 768)
    assert work.train_step == 3 * 2 * (work.encode_batch / 2 + 5 * work.document)


def test_a_template_and_a_chat_are_counted_in_every_pair(paper: Config) -> None:
    plain = job_of(paper).shape.pair
    paper.lm.prompt, paper.lm.chat = "This may help: {document}\n\n{context}", True
    assert job_of(paper).shape.pair - plain == 5 + 30


@pytest.mark.parametrize(("words", "limit"), [(100, None), (13, None), (200, 64)])
def test_texts_have_the_tokens_that_the_encoder_computes(paper: Config, words: int, limit: int | None) -> None:
    """On the CPU by its own batches; a GPU pads to no multiple."""
    encoder = Encoder("stand_in", max_tokens=limit)
    paper.data.context_tokens = paper.data.document_tokens = words
    paper.retriever.max_tokens = limit
    inputs, _ = encoder._pad(encoder.token_ids([" ".join(["mida"] * words)]), "document")
    on_cpu, on_gpu = (shape_of(paper, device=device) for device in ("cpu", "cuda"))
    assert on_cpu.encoded_document == on_cpu.encoded_query == inputs.shape[1]
    assert on_gpu.encoded_document == len(encoder.token_ids([" ".join(["mida"] * words)])[0])
    assert on_gpu.pair == 3 * words


def test_a_prompt_of_the_retriever_is_counted(paper: Config) -> None:
    paper.retriever.query_prompt = "Represent this sentence for searching: "
    assert shape_of(paper).encoded_query == 130 + 10


def small_shape() -> Shape:
    """Documents of 4 tokens, contexts of 3, continuations of 2; 2 queries with 5 documents each."""
    return Shape(
        batch_size=2,
        k=5,
        depth=1,
        micro_batches=1,
        chunk_tokens=None,
        context=3,
        continuation=2,
        document=4,
        encoded_query=5,
        encoded_document=6,
        num_documents=100,
        num_queries=20,
        refresh=RefreshPolicy(every_steps=4, lag_steps=2, max_age_steps=12, max_steps=10),
        checkpoint_every=5,
    )


@pytest.mark.parametrize(
    ("kind", "per_vector"),
    [
        ("flat_fp16", 1536),
        ("ivf_sq8", 776),
        ("OPQ64_256,IVF65536,PQ64", 72),
        ("IVF4096_HNSW32,Flat", 3080),  # the graph is of the lists
    ],
)
def test_a_vector_takes_the_bytes_of_its_kind(paper: Config, kind: str, per_vector: int) -> None:
    paper.index.kind = kind
    assert index_size(paper, 768, 36_000_000).bytes_per_vector == per_vector


def test_documents_are_counted_in_a_file_or_a_prepared_set(tmp_path: Path, paper: Config) -> None:
    corpus, prepared = tmp_path / "docs.jsonl", tmp_path / "set"
    corpus.write_text('{"id": 1}\n\n{"id": 2}\n')
    prepared.mkdir()
    (prepared / "manifest.json").write_text(json.dumps({"counts": {"documents": 7}}))
    own = load_config(
        Path("configs/own_data_online.yaml"),
        [f"data.corpus={corpus}", "retriever.path=x", "lm.path=y", f"run_dir={tmp_path}"],
    )
    assert shape_of(own).num_documents == 2
    paper.data.source, paper.data.prepared = None, str(prepared)
    assert shape_of(paper).num_documents == 7
    assert shape_of(paper, num_documents=5).num_documents == 5
