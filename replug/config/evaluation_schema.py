"""Declare the configuration of `replug evaluate` and `replug ask`."""

from dataclasses import dataclass

from omegaconf import MISSING

from replug.config.choices import EnsembleWeights
from replug.config.keys import ABOVE_0, FROM_0, key, resumable, section
from replug.config.schema import (
    Config,
    DataConfig,
    EnsembleConfig,
    IndexConfig,
    LMConfig,
    RayConfig,
    ResourcesConfig,
    RetrieverConfig,
)


@dataclass
class TextsConfig:
    path: str | None = key(None, "Raw texts to evaluate in full. Default: the held-out split of the prepared set.")
    max_examples: int | None = key(200, "Number of spans or held-out examples, evenly spread. null: all.", ABOVE_0)
    # Spans of texts.path. Held-out examples have their own context.
    scored_tokens: int = key(128, "Tokens scored together as one span (training: 128; authors' code: 768).", ABOVE_0)
    context_tokens: int = key(128, "Tokens before a span that the LM reads (authors' code: 128).", ABOVE_0)
    query_tokens: int = key(128, "Tokens before a span that form the query (paper: 128).", ABOVE_0)
    document_tokens: int | None = key(None, "Tokens read of a document (authors' code: 128). Default: all.", ABOVE_0)
    join: bool = key(False, "Concatenate all texts before cutting spans (authors' code: Wikitext).")
    tokenizer: str | None = key(None, "Tokenizer that counts the tokens, as lm.path. Default: the evaluated LM's.")


@dataclass
class QuestionsConfig:
    path: str | None = key(
        None,
        "mmlu: folder; popqa, token_gain, internet_qa: published files; else rows, or a BEIR folder.",
    )
    qrels: str | None = key(None, "retrieval: graded judgements. Default: qrels/test.tsv of a BEIR folder, else gold.")
    dataset: str | None = key(None, "internet_qa: set of questions.path: nq, hotpotqa, fever, strategyqa, situatedqa.")
    demonstrations: str | None = key(None, "JSONL of demonstrations. Default: questions that are not evaluated.")
    query: str = key("{question}", "Template of the search query, as training queries look; mmlu: {choices} too.")
    shots: int | None = key(None, "Demonstrations. Default: 5 (mmlu), 16 (open_qa), 15 (popqa, internet_qa).", FROM_0)
    max_questions: int | None = key(None, "Number of questions to evaluate (mmlu: per subject). Default: all.", ABOVE_0)
    max_new_tokens: int = key(16, "Largest number of generated tokens per answer (PopQA's own code: 15).", ABOVE_0)


@dataclass
class WebConfig:
    """Search engine for evidence, and limits on results and passages."""

    engine: str = key("local", "Search engine: local (corpus), searxng or brave.")
    url: str | None = key(None, "URL of a SearXNG server, such as http://127.0.0.1:8888.")
    num_results: int = key(20, "Number of search results to fetch per question (paper: 20).", ABOVE_0)
    max_requests: int | None = resumable(None, "Requests before searching stops. Default: unlimited.", ABOVE_0)
    snapshot: str | None = resumable(None, "Folder of results and pages for exact reruns. Default: OUT/snapshot.")


@dataclass
class EvaluationConfig:
    """Configuration of `replug evaluate`."""

    evaluation: str = key(MISSING, "language_modelling, token_gain, mmlu, open_qa, popqa, internet_qa or retrieval.")
    out: str = resumable(MISSING, "Folder for everything that the evaluation writes.")
    methods: list[str] = key(
        ["none", "replug"],
        "Methods to compare: none, random, bm25, replug, NAME@K/concat and others (docs/evaluation.md).",
    )
    retrievers: dict[str, str] = key({}, "Further retrievers by name: an encoder, a run or an index folder.")
    k: int = key(10, "Number of documents for methods without @K (paper: 10).", ABOVE_0)
    seed: int = key(0, "Random seed of random documents, demonstrations, spans and bootstrap.", FROM_0)
    texts: TextsConfig = section(TextsConfig)
    questions: QuestionsConfig = section(QuestionsConfig)
    web: WebConfig = section(WebConfig)
    ensemble: EnsembleConfig = section(EnsembleConfig)
    data: DataConfig = section(DataConfig)
    retriever: RetrieverConfig = section(RetrieverConfig, path="")
    lm: LMConfig = section(LMConfig)
    rerank_lm: LMConfig = section(LMConfig)  # neither path nor url: answers are reranked by the LM that sampled them
    index: IndexConfig = section(IndexConfig)
    resources: ResourcesConfig = section(ResourcesConfig)
    ray: RayConfig = section(RayConfig)

    def run_config(self) -> Config:
        """Return the sections that a training run shares, as its configuration."""
        parts = {name: getattr(self, name) for name in ("data", "retriever", "lm", "index", "resources", "ray", "seed")}
        return Config(**parts, run_dir=self.out)


@dataclass
class AnsweringConfig(EnsembleConfig):
    """The ensemble that answers; the methods of an evaluation name their weights (NAME/posterior)."""

    weights: EnsembleWeights = key(
        EnsembleWeights.posterior,
        "posterior: weights follow the text. similarity: constant weights (paper). vote: each document's answer votes.",
    )


@dataclass
class AskConfig:
    """Configuration of `replug ask`: overrides, and the LM of a run."""

    lm: LMConfig = section(LMConfig)
    ensemble: AnsweringConfig = section(AnsweringConfig)
    web: WebConfig = section(WebConfig)


AnyConfig = Config | EvaluationConfig | AskConfig
