"""A W&B workspace of a project's runs: what to look at first, in named sections. Needs the package wandb-workspaces.

`replug dashboard ENTITY/PROJECT` saves it as a view of the project.
"""

from typing import Any

from configs.errors import UserError

# Section -> plot -> metrics that metrics.jsonl has too.
SECTIONS: dict[str, dict[str, list[str]]] = {
    "Does it learn": {
        "loss (KL, nats)": ["train/loss", "train/kl"],
        "bits per byte of held-out text at each refresh": ["heldout/bpb"],
        "rank correlation of LM and retriever (Kendall's tau)": ["retriever/rank_correlation"],
    },
    "Temperatures": {
        "entropy of Q and P_R (nats)": ["lm/entropy", "retriever/entropy"],
        "mass of the first document": ["lm/top1_mass", "retriever/top1_mass"],
        "spread of the LM's scores (nats a token)": ["lm/spread"],
        "log-probability of a token (nats)": ["lm/mean_logprob"],
    },
    "The index": {
        "version that batches saw": ["index/version", "index/live_version"],
        "age (steps)": ["index/age_steps"],
        "drift of the vectors at each refresh": ["index/drift"],
        "recall, and documents that stay": ["index/recall", "index/overlap"],
        "seconds of a refresh": ["index/swap_build_seconds", "index/swap_wait_seconds"],
        "pause of a swap (ms)": ["index/swap_ms"],
        "refreshes skipped and failed": ["index/refreshes_skipped", "index/refreshes_failed"],
    },
    "Where the time goes": {
        "seconds of a step": [
            "time/step_seconds",
            "time/train_seconds",
            "time/retrieve_seconds",
            "time/wait_scores_seconds",
            "time/wait_index_seconds",
            "time/checkpoint_seconds",
        ],
        "share of a step spent waiting": ["time/waiting_share"],
        "busy share of LM and trainer": ["scoring/busy_share", "time/busy_share"],
        "seconds of a search, behind the step": ["time/search_seconds"],
    },
    "Throughput": {
        "tokens a second of the LM": ["scoring/tokens_per_second"],
        "documents a second of the embedders": ["index/swap_documents_per_second"],
        "pairs trained on a second": ["throughput/pairs_per_second"],
        "calls waiting for the LM": ["scoring/queue_length"],
        "share of scores from the cache": ["scoring/hit_share"],
        "retries and replicas started again": ["scoring/retries", "scoring/respawns"],
    },
}


def dashboard(entity: str, project: str) -> Any:
    """A `wandb_workspaces.workspaces.Workspace` that is not saved yet. Raises UserError without the package."""
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError("the package wandb-workspaces is not installed: pip install wandb-workspaces") from error
    sections = [
        workspaces.Section(
            name=name,
            panels=[panels.LinePlot(title=title, x="Step", y=list[Any](metrics)) for title, metrics in plots.items()],
            is_open=True,
        )
        for name, plots in SECTIONS.items()
    ]
    return workspaces.Workspace(name="replug", entity=entity, project=project, sections=sections)


def run_dashboard(project: str) -> None:
    """Save the dashboard as a view of ENTITY/PROJECT and print its address."""
    entity, slash, name = project.partition("/")
    if not (entity and slash and name):
        raise UserError(f"{project} is no project of W&B; expected ENTITY/PROJECT")
    print(f"dashboard: {dashboard(entity, name).save().url}")
