"""The schema of `replug evaluate` and `replug ask`: their sections, beside those of a run in `config.schema`."""

from dataclasses import dataclass

from omegaconf import MISSING

from replug.config.choices import Detokenize, Similarity
from replug.config.keys import ABOVE_0, FROM_0, key, section
from replug.config.schema import (
    Config,
    DataConfig,
    EnsembleConfig,
    IndexConfig,
    LMConfig,
    RayConfig,
    RetrieverConfig,
)


@dataclass
class TextsConfig:
    path: str | None = key(None, "raw texts, measured whole (default: the held-out texts of the prepared set)")
    max_examples: int | None = key(
        200, "spans or held-out texts that are measured, drawn evenly over all by the seed; null for all", ABOVE_0
    )
    # Of `path`: what a token is scored after. Held-out texts come with their context.
    scored_tokens: int = key(128, "tokens that are scored together, a span (paper: 128)", ABOVE_0)
    context_tokens: int = key(128, "tokens of the text before a span that the LM reads (paper: 128)", ABOVE_0)
    query_tokens: int = key(128, "tokens before a span that documents are retrieved for (paper: 128)", ABOVE_0)
    tokenizer: str | None = key(None, "LM whose tokens are counted, as lm.path (default: the LM)")
    detokenize: Detokenize = key(Detokenize.none, "wikitext: read in usual writing, words counted over the original")
    entities: str | None = key(
        None, "token_gain: PopQA's table, whose subjects are looked for in the texts and compared by popularity"
    )


@dataclass
class QuestionsConfig:
    path: str | None = key(
        None,
        "mmlu: a folder with dev/ and test/; popqa, internet_qa: published files; else JSONL: question, answers, gold",
    )
    dataset: str | None = key(None, "internet_qa: nq, hotpotqa, fever, strategyqa or situatedqa, whose files path has")
    demonstrations: str | None = key(None, "JSONL of answered questions (default: those of path that are not measured)")
    query: str = key("{question}", "what is searched for; a tuned retriever wants the form of its training texts")
    shots: int | None = key(
        None, "answered questions before each question (default: mmlu 5, open_qa 16, popqa and internet_qa 15)", FROM_0
    )
    demonstration_seed: int | None = key(None, "draws which of demonstrations are shown (default: seed)", FROM_0)
    documents_in_shots: bool = key(True, "each with the first document found for it, where a method has documents")
    question_first: bool = key(False, "internet_qa: prompts have the question before its evidence")
    max_questions: int | None = key(None, "mmlu: of each subject, the first ones; others: drawn by the seed", ABOVE_0)
    max_new_tokens: int = key(16, "of an answer (papers: REPLUG 16, PopQA 15)", ABOVE_0)
    latency_questions: int = key(
        0, "the first questions, asked one at a time without the cache, to measure seconds a question", FROM_0
    )


@dataclass
class WebConfig:
    """Where evidence for a question is searched for, and what of it is kept."""

    engine: str = key("local", "local (documents of a corpus), searxng, brave or ddgs")
    url: str | None = key(None, "of a SearXNG, such as http://127.0.0.1:8888")
    api_key_env: str = key("REPLUG_SEARCH_API_KEY", "environment variable that holds the key of brave", resumable=True)
    num_results: int = key(20, "pages of an engine's answer (paper: 20)", ABOVE_0)
    max_passages: int = key(50, "passages of all pages that are kept, the nearest to the question (paper: 50)", ABOVE_0)
    sentences_per_passage: int = key(6, "of a page's text (paper: 6)", ABOVE_0)
    before: str | None = key(None, "only pages whose date is before this one, such as 2021-01-01; undated ones go")
    site: str | None = key(None, "only pages of this host and those below it, such as wikipedia.org")
    blocked_hosts: list[str] = key([], "no pages of these hosts and those below them: benchmarks with their answers")
    max_requests: int | None = key(
        None, "searches stop before more requests are sent to the engine", ABOVE_0, resumable=True
    )
    requests_per_second: float = key(1.0, "to the engine, at most", ABOVE_0, resumable=True)
    snapshot: str | None = key(None, "folder of answers and pages as they were (default: OUT/snapshot)", resumable=True)


@dataclass
class PaperConfig:
    table: str | None = key(None, "where the paper has these figures")
    values: dict[str, float] = key({}, "the paper's figures by method, beside ours; those by other names stand below")
    groups: dict[str, dict[str, float]] = key(
        {}, "the same by group, such as a category of MMLU: {STEM: {none: 0.578}}"
    )


@dataclass
class EvaluationConfig:
    """What `replug evaluate` measures, with which methods."""

    evaluation: str = key(
        MISSING, "language_modelling, token_gain, mmlu, open_qa, popqa, internet_qa or retrieval: a module of evals"
    )
    out: str = key(MISSING, "everything an evaluation writes", resumable=True)
    methods: list[str] = key(["none", "replug"], "as replug/config/methods.py reads them")
    retrievers: dict[str, str] = key({}, "name: path as retriever.path, a run or an index's folder")
    query_encoders: dict[str, str] = key({}, "name: path, where queries have their own (DPR)")
    similarities: dict[str, Similarity] = key(
        {}, "name: cosine or dot, of a retriever that has another than retriever.similarity (DPR: dot)"
    )
    k: int = key(10, "documents of a method that names no number (paper: 10)", ABOVE_0)
    exclude_own_source: bool = key(False, "never a document of the source that a text comes from")
    num_resamples: int = key(10000, "of the paired bootstrap", ABOVE_0)
    seed: int = key(0, "random documents, demonstrations, spans of texts, bootstrap", FROM_0)
    texts: TextsConfig = section(TextsConfig)
    questions: QuestionsConfig = section(QuestionsConfig)
    web: WebConfig = section(WebConfig)
    ensemble: EnsembleConfig = section(EnsembleConfig)
    paper: PaperConfig = section(PaperConfig)
    data: DataConfig = section(DataConfig)
    retriever: RetrieverConfig = section(RetrieverConfig, path="")
    lm: LMConfig = section(LMConfig)
    rerank_lm: LMConfig = section(LMConfig)  # neither path nor url: answers are reranked by the LM that sampled them
    index: IndexConfig = section(IndexConfig)
    ray: RayConfig = section(RayConfig)

    def run_config(self) -> Config:
        """The parts that a training run has too, for what makes them."""
        parts = {name: getattr(self, name) for name in ("data", "retriever", "lm", "index", "ray", "seed")}
        return Config(**parts, run_dir=self.out)


@dataclass
class AskConfig:
    """What `replug ask` needs to know beside its options; it has no file, only the LM of a run, and overrides."""

    lm: LMConfig = section(LMConfig)
    rerank_lm: LMConfig = section(LMConfig)  # neither path nor url: answers are reranked by the LM that sampled them
    retriever: RetrieverConfig = section(RetrieverConfig, path="")  # re-ranks passages, where it has a path
    ensemble: EnsembleConfig = section(EnsembleConfig)
    web: WebConfig = section(WebConfig)


AnyConfig = Config | EvaluationConfig | AskConfig
