"""Which retriever, over which documents, a method of an evaluation found its evidence by."""

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import GENREAD, METHOD, NONE, WITHOUT_RETRIEVER
from replug.data.store import ImportedCorpus, PreparedSet
from replug.evals.folder import EvaluationFolder
from replug.evals.search import index_of
from replug.index_workers.local_index import retriever_identity as index_identity
from replug.index_workers.version_store import VersionStore
from replug.models.preparing import data_folder


def full_name(method: str, k: int) -> str:
    """The method with its number of documents said, such as replug@10."""
    found = METHOD.fullmatch(method)
    assert found is not None, method  # the evaluation has run
    if found["k"] or found["source"] in (NONE, GENREAD):
        return method
    return f"{found['source']}@{k}{method[len(found['source']) :]}"


def retriever_identity(method: str, config: EvaluationConfig, folder: EvaluationFolder) -> str:
    """As `IndexRetriever.identity` is for the same retriever and documents.

    Raises UserError where the index or the documents of the evaluation are gone.
    """
    source = method.partition("@")[0].partition("/")[0]
    if source in (NONE, GENREAD):
        return source
    if source in WITHOUT_RETRIEVER:
        return f"{source}:{_corpus_sha256(config, folder)[:16]}"
    root = index_of(config, source, folder.found)
    store = VersionStore(root.absolute())
    if not (versions := store.published()):
        raise UserError(f"the index of {method} is gone from {root}: a policy must say which retriever it is for")
    own = config.query_encoders.get(source)
    return index_identity(store.plan(versions[-1]), root) + (f":queries by {own}" if own else "")


def _corpus_sha256(config: EvaluationConfig, folder: EvaluationFolder) -> str:
    imported, prepared = folder.data / "corpus", data_folder(config.run_config(), folder.data)
    if (imported / "corpus.json").is_file():
        return ImportedCorpus(imported).corpus_sha256
    if not (prepared / "manifest.json").is_file():
        raise UserError(f"the documents are gone from {prepared}: a policy must say which retriever it is for")
    return PreparedSet(prepared).corpus_sha256
