"""An index by an encoder with prompts and modules: each side has its own, and another reading is another index."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.config.errors import UserError
from replug.data.prepare.assembly import write_ids_of_shard
from replug.data.records import Document
from replug.data.shards import corpus_sha256, write_documents, write_token_rules
from replug.data.store import CorpusStore
from replug.index_workers.build_plan import BuildPlan
from replug.index_workers.builder import Builder
from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.index_workers.version_store import VersionStore
from replug.models.encoder import Encoder
from tests.support.encoder_folders import write_chain, write_encoder

TEXTS = [f"w{n} w{n + 7} w{n + 9}" for n in range(12)]
PROMPTS = {"query": "query : ", "passage": "passage : "}


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    write_encoder(tmp_path / "encoder", "bert")
    pooling = {"pooling_mode": ["mean", "cls"], "include_prompt": False}
    write_chain(tmp_path / "encoder", pooling, ["Dense"], PROMPTS)
    return Encoder(str(tmp_path / "encoder"))


def built(root: Path, encoder: Encoder, has_token_ids: bool) -> tuple[VersionStore, BuildPlan]:
    corpus = root / "documents"
    write_documents(corpus, [Document(f"d{row}", text, "x", "s") for row, text in enumerate(TEXTS)])
    if has_token_ids:
        write_ids_of_shard(corpus / "00000.arrow", encoder.token_rule)
        write_token_rules(corpus, encoder.token_rule.fingerprint)
    store = VersionStore(root / "index")
    plan = BuildPlan(
        version=0,
        step=0,
        weights_sha256=store.save_snapshot(0, encoder.save),
        corpus_path=str(corpus),
        corpus_sha256=corpus_sha256(corpus),
        num_documents=len(TEXTS),
        block_documents=4,
        similarity=encoder.similarity,
        max_tokens=encoder.max_tokens,
        dim=encoder.dim,
        modules=encoder.pooling,
        query_prompt=encoder.prompts.query,
        document_prompt=encoder.prompts.document,
        dtype="float32",
        tokens_per_batch=64,
    )
    store.begin(plan)
    threads, builder = torch.get_num_threads(), Builder(store.root, threads=1)
    for file in range(plan.num_files):
        builder.embed_file(plan, file)
    torch.testing.assert_close(torch.from_numpy(builder.encode(plan, TEXTS)), encoder.encode_query(TEXTS))
    torch.set_num_threads(threads)
    store.publish(plan)
    return store, plan


@pytest.mark.parametrize("has_token_ids", [False, True], ids=["texts", "prepared tokens"])
def test_documents_and_queries_have_each_their_prompt(tmp_path: Path, encoder: Encoder, has_token_ids: bool) -> None:
    store, plan = built(tmp_path, encoder, has_token_ids)
    assert (CorpusStore(tmp_path / "documents").tokens_by is not None) is has_token_ids
    held = np.concatenate(store.open_vectors(plan, range(plan.num_files)))
    np.testing.assert_allclose(held, encoder.encode_document(TEXTS), atol=1e-3)
    [found] = IndexRetriever(LocalIndex(store.root, threads=1)).retrieve(["w3 w9"], 2)
    similarities = encoder.encode_query(["w3 w9"]) @ encoder.encode_document(TEXTS).T
    np.testing.assert_allclose(
        [one.similarity for one in found], similarities[0].sort(descending=True).values[:2], atol=2e-3
    )


@pytest.mark.parametrize("change", [{"document_prompt": "x"}, {"query_prompt": ""}, {"modules": "mean"}])
def test_another_prompt_or_chain_is_another_index(tmp_path: Path, encoder: Encoder, change: dict[str, str]) -> None:
    store, plan = built(tmp_path, encoder, has_token_ids=False)
    other = replace(plan, **change)  # type: ignore[arg-type]
    assert other.retriever != plan.retriever
    [(name, value)] = change.items()
    with pytest.raises(UserError, match=f"holds an index with {name}=.*, but {name}={value} is asked for"):
        store.require_same_vectors(other)
    with pytest.raises(UserError, match=f"has {name} "):
        Builder(store.root, torch.get_num_threads()).embed_file(other, 0)
