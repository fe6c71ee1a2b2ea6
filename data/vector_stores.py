"""Search documents in vector stores: Qdrant, PostgreSQL with pgvector, LanceDB. `data.corpus` is their URL.

    qdrant:///FOLDER?collection=NAME      qdrant://HOST:6333?collection=NAME      (API key: $QDRANT_API_KEY)
    postgresql://USER@HOST/DATABASE?table=NAME                                    (password: $PGPASSWORD)
    lance:///FOLDER?table=NAME

`text`, `vector`, `source` and, outside Qdrant, `id` in the query name the fields of a document; the defaults are text,
vector, the id as source, and id. Dots reach into nested fields. `only=FIELD=VALUE` excludes all other documents, such
as other tenants' or other LangChain collections in PostgreSQL. With a key, Qdrant servers are accessed by https, except
on this machine or with `tls=false`. Other parameters of PostgreSQL go to libpq. Nothing is ever written into a store.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np

from replug.config.errors import UserError
from replug.config.rules import is_loopback
from replug.data.sources.records import nested

ROWS_PER_READ = 1000
POSTGRESQL = ("postgresql", "postgres")  # schemes; libpq takes both
COLLECTIONS = "collection_id"  # LangChain's column for several collections in one table
FIELDS = {"id": "id", "text": "text", "vector": "vector", "source": ""}


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as its store holds it, with its vector [D] float32."""

    id: str
    text: str
    source: str
    vector: np.ndarray


class CandidateSource(Protocol):
    """Holds documents with vectors [dim], and finds the nearest to a query.

    `similarity` is cosine or dot; None if the store supports both.
    """

    dim: int
    similarity: str | None

    def __len__(self) -> int: ...

    def search(self, vectors: np.ndarray, k: int, similarity: str) -> list[list[StoredDocument]]:
        """Return the k nearest documents to each query vector [B, D], the nearest first; fewer if it finds fewer."""

    def get(self, ids: Sequence[str]) -> list[StoredDocument]:
        """Return the documents with these ids, in any order; more than ids if documents share an id."""

    def iterate(self) -> Iterator[StoredDocument]:
        """Yield all documents, a few in memory at a time."""

    def close(self) -> None: ...


class StoreAddress:
    """The parts of a store's URL: location, collection or table, names of fields, other parameters.

    `only` is a field and its required value; "" as the field means all documents.
    """

    def __init__(self, url: str) -> None:
        """Parse a URL. Raises UserError for missing or unknown parameters, and for a password."""
        self.url, self.parts = url, urlsplit(url)
        parts = self.parts
        if parts.password or "password" in parts.query:
            secret = "PGPASSWORD" if parts.scheme in POSTGRESQL else "QDRANT_API_KEY"
            raise UserError(f"data.corpus: the URL of the store holds a password; expected it in ${secret}")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        key = "collection" if parts.scheme == "qdrant" else "table"
        name = given.pop(key, "")
        if not name:
            raise UserError(f"data.corpus: {url} names no {key}; expected {url.partition('?')[0]}?{key}=NAME")
        fields = {field: given.pop(field, default) for field, default in FIELDS.items()}
        only = given.pop("only", None)
        field, has_value, value = (only or "").partition("=")
        if only is not None and not (field and has_value):
            raise UserError(f"data.corpus: {url} has only={only}; expected only=FIELD=VALUE, such as only=tenant=acme")
        tls = given.pop("tls", None) if parts.scheme == "qdrant" else None
        if tls not in (None, "true", "false"):
            raise UserError(f"data.corpus: {url} has tls={tls}; expected true or false")
        if given and parts.scheme not in POSTGRESQL:
            expected = ", ".join((key, *FIELDS, "only", *(["tls"] if key == "collection" else [])))
            raise UserError(f"data.corpus: {url} has the unknown parameter {min(given)!r}; expected {expected}")
        if not parts.hostname and parts.scheme not in POSTGRESQL and not Path(parts.path).is_dir():  # else created
            raise UserError(f"data.corpus: {url}: the folder {parts.path} does not exist")
        self.name, self.fields, self.others = name, fields, given
        self.only = (field, value)
        self.uses_tls = None if tls is None else tls == "true"

    def document(self, id: Any, fields: dict[str, Any], vector: Any) -> StoredDocument:
        """Return a document of the store. Raises UserError if it has no text or vector."""
        text, source = (nested(fields, self.fields[name]) for name in ("text", "source"))
        source = source if self.fields["source"] else id
        is_text = isinstance(text, str) and text.strip()
        missing = {"text": not is_text, "vector": vector is None, "source": isinstance(source, dict | list | None)}
        for name in (name for name, is_missing in missing.items() if is_missing):
            found = ", ".join(name for name in fields if name not in (self.fields["vector"], "_distance")) or "none"
            raise self.problem(f"document {id} has no {name} (found: {found}); name its field by &{name}=FIELD")
        return StoredDocument(str(id), text, str(id if source == "" else source), np.asarray(vector, np.float32))

    def problem(self, reason: object) -> UserError:
        """Return the error with its reason in one line that names the key and the store."""
        return UserError(f"data.corpus: {self.url}: {(str(reason).strip() or type(reason).__name__).splitlines()[0]}")

    def require_columns(self, found: Collection[str]) -> None:
        """Raise UserError if the table has no column for one of the fields."""
        for field, column in (*self.fields.items(), ("only", self.only[0])):
            if column and column not in found:
                raise self.problem(f"no column {column!r} (found: {', '.join(found)}); name it by &{field}=COLUMN")

    @contextmanager
    def asking(self, *errors: type[Exception]) -> Iterator[None]:
        """Convert errors of a store's library to UserError."""
        try:
            yield
        except UserError:
            raise
        except errors as error:
            raise self.problem(error) from error


def open_source(url: str) -> CandidateSource:
    """Open a store by its URL. Raises UserError if it is missing, empty, or cannot be searched."""
    address = StoreAddress(url)
    source: CandidateSource = KINDS[address.parts.scheme](address)
    if not len(source):
        raise address.problem("it holds no documents")
    return source


def _library(name: str, extra: str) -> Any:
    """Import the library of a store. Raises UserError with the line that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"data.corpus: {error.name} is not installed; run: pip install 'replug[{extra}]'") from error


class Qdrant:
    """A collection of Qdrant: in a folder of this machine, open in one process at a time, or on a server."""

    def __init__(self, address: StoreAddress) -> None:
        library = _library("qdrant_client", "qdrant")
        failures = _library("qdrant_client.http.exceptions", "qdrant")
        self._errors = (ValueError, RuntimeError, OSError, failures.ApiException)  # local ones are ValueErrors
        self._address, self._models, parts = address, library.models, address.parts
        with address.asking(*self._errors):
            if parts.hostname:
                key = os.environ.get("QDRANT_API_KEY") or None
                uses_tls = key is not None and not is_loopback(parts.hostname)
                uses_tls = uses_tls if address.uses_tls is None else address.uses_tls
                host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
                url = f"http{'s' if uses_tls else ''}://{host}:{parts.port or 6333}"
                self._client = library.QdrantClient(url=url, api_key=key)
            else:
                self._client = library.QdrantClient(path=address.parts.path)
        with ExitStack() as refused:  # or the folder could not be opened again
            refused.callback(self.close)
            self._require_vectors()
            refused.pop_all()

    def _require_vectors(self) -> None:
        address = self._address
        with address.asking(*self._errors):
            found = self._client.get_collection(address.name).config.params.vectors
        self._using = ""  # Qdrant's name of an unnamed vector
        if isinstance(found, dict):
            self._using = address.fields["vector"]
            if self._using == FIELDS["vector"] and len(found) == 1:
                self._using = next(iter(found))
            if self._using not in found:
                raise address.problem(f"its vectors are {', '.join(found) or 'sparse'}; choose one by &vector=NAME")
            found = found[self._using]
        self.dim = found.size
        distances = {"Cosine": "cosine", "Dot": "dot"}
        if found.distance.value not in distances:
            raise address.problem(f"vectors are compared by {found.distance.value}; expected Cosine or Dot")
        self.similarity: str | None = distances[found.distance.value]
        self._only = self._filter(*address.only) if address.only[0] else None

    def _filter(self, field: str, value: str) -> Any:
        """Return a filter on the value of a field, as a text, a number or a boolean."""
        values: list[str | int | bool] = [value, int(value)] if value.isdigit() else [value]
        values += [value == "true"] if value in ("true", "false") else []
        matches = [self._models.MatchValue(value=one) for one in values]
        return self._models.Filter(should=[self._models.FieldCondition(key=field, match=match) for match in matches])

    def __len__(self) -> int:
        return self._client.count(self._address.name, count_filter=self._only).count

    def search(self, vectors: np.ndarray, k: int, similarity: str) -> list[list[StoredDocument]]:
        how = {"using": self._using or None, "limit": k, "filter": self._only}
        requests = [
            self._models.QueryRequest(query=vector.tolist(), with_payload=True, with_vector=True, **how)
            for vector in vectors
        ]
        answers = self._client.query_batch_points(self._address.name, requests)
        return [self._documents(answer.points) for answer in answers]

    def get(self, ids: Sequence[str]) -> list[StoredDocument]:
        points = [int(id) if id.isdigit() else id for id in ids]  # the others are UUIDs
        found = self._client.retrieve(self._address.name, points, with_payload=True, with_vectors=True)
        return self._documents(found)

    def iterate(self) -> Iterator[StoredDocument]:
        offset, is_first = None, True
        while is_first or offset is not None:
            is_first = False
            found, offset = self._client.scroll(
                self._address.name,
                scroll_filter=self._only,
                limit=ROWS_PER_READ,
                offset=offset,
                with_payload=True,
                with_vectors=True,
            )
            yield from self._documents(found)

    def close(self) -> None:
        self._client.close()

    def _documents(self, points: Iterable[Any]) -> list[StoredDocument]:
        documents = []
        for point in points:  # vectors by name where there are several, sparse ones too
            vector = point.vector.get(self._using) if isinstance(point.vector, dict) else point.vector
            documents.append(self._address.document(point.id, point.payload or {}, vector))
        return documents


class PgVector:
    """A table of PostgreSQL with a column of pgvector's types vector or halfvec.

    An index of the table is used if it was built for the operator of the similarity.
    """

    similarity: str | None = None

    def __init__(self, address: StoreAddress) -> None:
        self._library = _library("psycopg", "pgvector")
        self._sql, self._address = self._library.sql, address
        libpq = address.parts._replace(query=urlencode(address.others)).geturl()
        with address.asking(self._library.Error):
            self._connection = self._library.connect(libpq, autocommit=True)
        names = {**address.fields, "only": address.only[0]}
        only = address.only[1].replace("%", "%%")  # the driver reads % as the begin of a placeholder
        table = self._sql.Identifier(*(part.strip('"') for part in address.name.split(".")))
        with address.asking(self._library.Error):
            found = self._connection.execute(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass "
                "AND attnum > 0 AND NOT attisdropped",
                [table.as_string(self._connection)],
            )
            types = dict(found.fetchall())
        columns = {name: self._sql.Identifier(name) for name in types}
        for name in filter(None, names.values()):
            outermost, *path = name.split(".")
            if name not in types and types.get(outermost) in ("json", "jsonb"):
                columns[name] = self._sql.SQL("({} #>> {})").format(columns[outermost], path)
        address.require_columns(columns)
        self._types = {field: types.get(name, "text") for field, name in names.items() if name}
        self._columns = {field: columns[name] for field, name in names.items() if name}
        self._columns.setdefault("source", self._columns["id"])
        rows = "{table} WHERE {vector} IS NOT NULL" + " AND {only}::text = {value}" * bool(names["only"])
        self._rows = self._sql.SQL(rows).format(table=table, value=only, **self._columns)
        if COLLECTIONS in types and not names["only"]:
            several = self._ask(f"SELECT DISTINCT {COLLECTIONS}::text FROM {{rows}} ORDER BY 1 LIMIT 10")
            if len(several) > 1:
                expected = f"choose one by &only={COLLECTIONS}=ID ({', '.join(str(one) for (one,) in several)})"
                raise address.problem(f"its table holds several collections; {expected}")
        self.dim = self._width()

    def _width(self) -> int:
        """Return the width of the vectors. Raises UserError if a column of any width has several."""
        if width := re.search(r"\((\d+)\)", self._types["vector"]):
            return int(width[1])
        least, most = self._ask("SELECT min(vector_dims({vector})), max(vector_dims({vector})) FROM {rows}")[0]
        if least != most:
            raise self._address.problem(f"its vectors have {least} to {most} numbers; choose by &only=COLUMN=VALUE")
        return least or 0

    def __len__(self) -> int:
        return self._ask("SELECT count(*) FROM {rows}")[0][0]

    def search(self, vectors: np.ndarray, k: int, similarity: str) -> list[list[StoredDocument]]:
        # HNSW finds at most ef_search documents, 40 by default, of which `only` may drop some. The vector in this
        # statement loads pgvector, whose settings are unknown before.
        self._ask(
            "SELECT '[0]'::vector, set_config('hnsw.ef_search', greatest(coalesce(nullif(current_setting("
            "'hnsw.ef_search', true), ''), '40')::int, least(%s, 1000))::text, false), "
            "CASE WHEN current_setting('hnsw.iterative_scan', true) IS NOT NULL "
            "THEN set_config('hnsw.iterative_scan', 'strict_order', false) END",
            [k],
        )
        operator = {"cosine": "<=>", "dot": "<#>"}[similarity]
        order = f"ORDER BY {{vector}} {operator} %s::{self._types['vector']} LIMIT %s"
        return [self._documents(order, [f"[{','.join(map(repr, vector.tolist()))}]", k]) for vector in vectors]

    def get(self, ids: Sequence[str]) -> list[StoredDocument]:
        return self._documents(f"AND {{id}} = ANY(%s::text[]::{self._types['id']}[])", [list(ids)])

    def iterate(self) -> Iterator[StoredDocument]:
        last: list[Any] = []
        while True:
            after = f"AND {{id}} > %s::{self._types['id']}" if last else ""
            found = self._documents(f"{after} ORDER BY {{id}} LIMIT {ROWS_PER_READ}", last)
            yield from found
            if len(found) < ROWS_PER_READ:
                return
            last = [found[-1].id]

    def close(self) -> None:
        self._connection.close()

    def _documents(self, rest: str, given: list[Any]) -> list[StoredDocument]:
        select = "SELECT {id}::text, {text}, {source}::text, {vector}::vector::real[] FROM {rows} "
        names = self._address.fields
        return [
            self._address.document(id, {names["text"]: text, names["source"]: source}, vector)
            for id, text, source, vector in self._ask(select + rest, given)
        ]

    def _ask(self, query: str, given: Sequence[Any] = ()) -> list[tuple]:
        statement = self._sql.SQL(query).format(rows=self._rows, **self._columns)
        return self._connection.execute(statement, given, binary=True).fetchall()


class Lance:
    """A table of LanceDB in a folder."""

    similarity: str | None = None

    def __init__(self, address: StoreAddress) -> None:
        library = _library("lancedb", "lancedb")
        self._address, self._errors = address, (ValueError, RuntimeError, OSError)
        with address.asking(*self._errors):
            self._table = library.connect(address.parts.path).open_table(address.name)
        schema, fields, only = self._table.schema, address.fields, address.only[0]
        names = [*fields.values(), only]
        outermost = {name: name if name in schema.names else name.partition(".")[0] for name in names}
        address.require_columns([name for name, column in outermost.items() if column in schema.names])
        self.dim = getattr(schema.field(fields["vector"]).type, "list_size", 0)
        self._columns = list(dict.fromkeys(filter(None, outermost.values())))
        self._only = f"cast({only} as string) = {_quoted(address.only[1])}" if only else None

    def __len__(self) -> int:
        return self._table.count_rows(self._only)

    def search(self, vectors: np.ndarray, k: int, similarity: str) -> list[list[StoredDocument]]:
        found, column = [], self._address.fields["vector"]
        for vector in vectors:
            query = self._table.search(vector, vector_column_name=column, query_type="vector")
            query = query.where(self._only, prefilter=True).distance_type(similarity)
            rows = query.select([*self._columns, "_distance"]).limit(k).to_list()
            found.append(self._documents(rows))
        return found

    def get(self, ids: Sequence[str]) -> list[StoredDocument]:
        column = self._address.fields["id"]
        query = self._table.search().where(f"cast({column} as string) IN ({','.join(map(_quoted, ids))})")
        found = query.select(self._columns).limit(len(ids) + 1).to_list()  # one more shows repeated ids
        return self._documents(found)

    def iterate(self) -> Iterator[StoredDocument]:
        for batch in self._table.search().where(self._only).select(self._columns).limit(None).to_batches(ROWS_PER_READ):
            yield from self._documents(batch.to_pylist())

    def close(self) -> None:
        """Do nothing: the table has no connection."""

    def _documents(self, rows: Iterable[dict[str, Any]]) -> list[StoredDocument]:
        fields = self._address.fields
        return [self._address.document(row[fields["id"]], row, row[fields["vector"]]) for row in rows]


def _quoted(text: str) -> str:
    return f"'{text.replace(chr(39), 2 * chr(39))}'"


KINDS: dict[str, Callable[[StoreAddress], CandidateSource]] = {
    "qdrant": Qdrant,
    "postgresql": PgVector,
    "postgres": PgVector,
    "lance": Lance,
}
