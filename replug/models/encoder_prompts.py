"""The prompts of an encoder: what stands before a query, and before a document, so that it reads each as such.

Encoders such as E5, BGE or EmbeddingGemma were trained with them, and are silently worse without. Their names are those
of sentence-transformers, in `config_sentence_transformers.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from replug.config.errors import UserError

QUERY_NAMES = ("query",)
DOCUMENT_NAMES = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class Prompts:
    """`query` and `document` are what retrieval puts before its texts; `named` are all of the folder's, by name.

    `default` names the one that `Encoder.encode` takes where none is named.
    """

    query: str = ""
    document: str = ""
    named: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def by_name(self, name: str | None) -> str:
        """As `SentenceTransformer.encode(prompt_name=...)` takes it: the default's where no name is given."""
        known = self.all_named()
        asked = self.default if name is None else name
        if asked is None:
            return ""
        if asked not in known:
            raise UserError(f"prompt_name is {asked!r}; expected one of {', '.join(sorted(known))}")
        return known[asked]

    def all_named(self) -> dict[str, str]:
        """By name, those of queries and documents as they are in effect."""
        return {**self.named, "query": self.query, "document": self.document}

    def with_own(self, query: str | None, document: str | None) -> "Prompts":
        """With what the user says instead; None is the folder's."""
        return replace(
            self,
            query=self.query if query is None else query,
            document=self.document if document is None else document,
        )


def prompts_of(named: Mapping[str, str], default: str | None) -> Prompts:
    """Of a folder's prompts, those of queries and of documents.

    Documents have the first of `document`, `passage` and `corpus` that is not empty. A side whose names the folder does
    not have takes the default's, unless that is the other side's.
    """
    query = _of_side(named, default, QUERY_NAMES, DOCUMENT_NAMES)
    return Prompts(query, _of_side(named, default, DOCUMENT_NAMES, QUERY_NAMES), named, default)


def _of_side(named: Mapping[str, str], default: str | None, own: Sequence[str], others: Sequence[str]) -> str:
    given = [named[name] for name in own if name in named]
    if given or default is None or default in others:
        return next((prompt for prompt in given if prompt), "")
    return named[default]
