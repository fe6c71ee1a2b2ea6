"""What other tools call our keys, so that a newcomer who writes their names is told ours."""

STEPS = ("train.max_steps",)
BATCH = ("train.batch_size",)
SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "lr"), ("train.lr",)),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "steps", "num_steps", "total_steps"), STEPS),
    **dict.fromkeys(("early_stopping", "early_stopping_patience"), ("train.patience",)),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size", "bs", "batch"), BATCH),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches"), ("train.micro_batches",)),
    **dict.fromkeys(("warmup", "warmup_steps"), ("train.warmup_ratio",)),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip"), ("train.gradient_clip",)),
    **dict.fromkeys(("fp16", "bf16", "amp", "mixed_precision"), ("train.precision",)),
    **dict.fromkeys(("device", "gpu"), ("train.accelerator",)),
    **dict.fromkeys(("gpus", "devices", "num_gpus", "world_size"), ("resources.train", "resources.score")),
    **dict.fromkeys(("optim",), ("train.optimizer",)),
    **dict.fromkeys(("output_dir", "output", "out_dir", "save_dir", "work_dir", "logdir"), ("run_dir", "out")),
    **dict.fromkeys(("top_k", "topk", "num_documents_retrieved", "n_docs", "num_docs"), ("retrieve.k", "k")),
    **dict.fromkeys(("temperature", "tau", "temp"), ("loss.gamma", "loss.beta", "ensemble.temperature")),
    **dict.fromkeys(("save_steps", "checkpoint_every", "save_every"), ("checkpoint.every_steps",)),
    **dict.fromkeys(("eval_steps", "refresh_every", "reindex_every", "update_interval"), ("refresh.every_steps",)),
    **dict.fromkeys(("encoder", "retriever_path", "model_name", "model_name_or_path"), ("retriever.path", "lm.path")),
    **dict.fromkeys(("llm", "lm_path", "language_model", "reader"), ("lm.path",)),
    **dict.fromkeys(("base_url", "api_base", "endpoint", "server"), ("lm.url",)),
    **dict.fromkeys(("api_key", "key", "token"), ("lm.api_key_env",)),
    **dict.fromkeys(("max_length", "max_seq_length", "max_len"), ("retriever.max_tokens",)),
    **dict.fromkeys(("chunk_size", "passage_length"), ("data.document_tokens",)),
    **dict.fromkeys(("dataset", "data_path", "train_file", "input"), ("data.source", "data.queries")),
    **dict.fromkeys(("documents", "passages", "corpus_path"), ("data.corpus",)),
    **dict.fromkeys(("test", "eval_file"), ("data.heldout",)),
    **dict.fromkeys(("validation", "valid", "val", "development"), ("data.dev", "data.num_dev")),
    **dict.fromkeys(("random_seed", "random_state"), ("seed",)),
    **dict.fromkeys(("metric", "distance"), ("retriever.similarity",)),
}
