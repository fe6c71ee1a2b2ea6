"""The command line. Thin: it parses, loads the configuration, and calls; heavy imports come after.

A mistake of the user's is one line on standard error and exit status 2; a run that cannot go on, 1; one that was
interrupted by SIGTERM or SIGUSR1 and goes on by the same command, 75.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from replug.cluster.environment import configure_ray_environment
from replug.cluster.interruption import EXIT_STATUS
from replug.commands.console import log_to_stderr
from replug.configs.errors import Interrupted, RunError, UserError
from replug.configs.load import load_config, load_evaluation_config, load_score_config, names_evaluation
from replug.configs.paths import check_evaluation_paths, check_paths
from replug.configs.schema import Config

app = typer.Typer(
    help="Tune a dense retriever to a frozen language model (REPLUG LSR).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(help="A YAML file; configs/ holds examples.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Any key, as section.key=VALUE; `replug keys` lists them.", metavar="KEY=VALUE"),
]


def main() -> None:
    """Entry point of the `replug` command."""
    log_to_stderr()
    try:
        app()
    except (UserError, RunError) as error:
        print(f"replug: {error}", file=sys.stderr)
        sys.exit(_exit_status(error))


def _exit_status(error: UserError | RunError) -> int:
    if isinstance(error, Interrupted):
        return EXIT_STATUS
    return 2 if isinstance(error, UserError) else 1


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Tune a retriever; prepares and indexes what is missing, and resumes an unfinished run_dir.

    Ends with bits per byte on held-out text, in RUN_DIR/results.json and RUN_DIR/report.html.
    """
    loaded = load_for_run(config, overrides)
    from replug.train.run import train as run_train

    run_train(loaded)


@app.command()
def prepare(config: ConfigFile, overrides: Overrides = None) -> None:
    """Cut raw texts into a corpus store, training texts and held-out texts, and prove them disjoint.

    Goes on where it was interrupted, and makes damaged files of a finished set again.

    replug prepare configs/own_data.yaml data.source=PATH_OR_HUB_NAME data.out=OUT data.tokenizer=retriever
    """
    loaded = load_config(config, overrides or [], needs_lm=False, needs_retriever=False)
    check_paths(loaded)
    from replug.commands.commands import run_prepare

    run_prepare(loaded)


@app.command()
def index(config: ConfigFile, overrides: Overrides = None) -> None:
    """Embed the corpus with the retriever and publish an index under index.out; goes on where it was interrupted.

    replug index configs/own_data.yaml retriever.path=DIR data.corpus=docs.jsonl index.kind=ivf_sq8 index.out=DIR
    """
    loaded = load_for_run(config, overrides, corpus_only=True)
    from replug.commands.commands import run_index

    run_index(loaded)


@app.command()
def verify(directory: Annotated[Path, typer.Argument(help="An index, a prepared set, or a run directory.")]) -> None:
    """Check every checksum, count and dimension of an index or a prepared set; exits with 0, or names what is wrong."""
    from replug.commands.commands import run_verify

    run_verify(directory)


@app.command()
def evaluate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run an evaluation (configs/eval_*.yaml, configs/paper_tables/*.yaml); goes on where it was interrupted.

    With a training configuration: the table of `replug train`, for its retriever and the tuned one of RUN_DIR.

    replug evaluate configs/eval_lm.yaml retriever.path=DIR lm.path=DIR out=DIR
    """
    if names_evaluation(config):
        evaluation = load_evaluation_config(config, overrides or [])
        check_evaluation_paths(evaluation)
        configure_ray_environment(evaluation)
        from replug.evals.lm_sweep import evaluate_lms
        from replug.evals.run import evaluate as run_evaluation

        (evaluate_lms if evaluation.lms else run_evaluation)(evaluation)
        return
    loaded = load_for_run(config, overrides)
    from replug.commands.commands import run_evaluate

    run_evaluate(loaded)


@app.command()
def search(
    directory: Annotated[Path, typer.Argument(help="A run directory or an index directory.")],
    text: Annotated[str, typer.Argument(help="What to look for.")],
    k: Annotated[int, typer.Option(help="Documents to show.", min=1)] = 5,
    against: Annotated[Path | None, typer.Option(help="A second run or index, shown side by side.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each directory.")] = False,
) -> None:
    """Show what a retriever finds for a text; two retrievers side by side with --against."""
    from replug.commands.commands import run_search

    run_search([directory] + ([against] if against else []), text, k, as_json)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What is to be continued.")],
    overrides: Overrides = None,
    index: Annotated[Path, typer.Option(help="A run directory or an index directory.")] = Path("runs/quickstart"),
    k: Annotated[int, typer.Option(help="Documents in the ensemble; 0 asks the LM alone.", min=0)] = 10,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer in tokens.", min=1)] = 64,
    stop: Annotated[str | None, typer.Option(help="The answer ends before this text; \\n is a newline.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token at each step.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this mass.", min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Continue a prompt with the LM and what the retriever finds for it: one token is chosen for all documents.

    The LM is that of the run, or lm.path=DIR. A server's answers, one from each document, are weighed as wholes.

    replug generate "The Python keyword yield" --k 10 --index runs/quickstart
    """
    from replug.commands.generate import run_generate
    from replug.models.generation import GenerationOptions

    end = None if stop is None else stop.replace("\\n", "\n")
    options = GenerationOptions(max_new_tokens, end, temperature, top_p, seed)
    run_generate(prompt, index, k, options, overrides or [], as_json)


@app.command()
def score(
    source: Annotated[Path, typer.Option("--in", help='JSON Lines: {"id", "prefix", "continuation"}.')],
    out: Annotated[Path, typer.Option("--out", help='JSON Lines: {"id", "sum", "num_tokens", "token_logprobs"}.')],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Any key of lm and ray; lm.path or lm.url must be there.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Log-probabilities (nats) of your own continuations, in the order of the input; a rerun goes on.

    replug score lm.path=DIR --in pairs.jsonl --out scores.jsonl
    """
    config = load_score_config(overrides or [])
    configure_ray_environment(config)
    from replug.commands.score import run_score

    run_score(config, source, out)


@app.command()
def cache(
    file: Annotated[Path, typer.Argument(help="A cache of scores, such as RUN_DIR/scores.sqlite.", metavar="FILE")],
    verify: Annotated[bool, typer.Option("--verify", help="Check the file and every row.")] = False,
    prune_bad: Annotated[bool, typer.Option("--prune-bad", help="Check, and delete the rows that are wrong.")] = False,
    prune_lm: Annotated[
        str | None, typer.Option(help="Delete the rows of LMs whose identity begins so.", metavar="IDENTITY_PREFIX")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(help="Delete rows at least so old; with --prune-lm, of those LMs.", metavar="DAYS", min=0),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what a cache of LM scores holds, by LM; check it; delete from it."""
    from replug.commands.cache import Prune, run_cache

    run_cache(file, Prune(prune_lm, older_than), verify, prune_bad, as_json)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Write the tuned retriever as a folder for transformers and sentence-transformers."""
    from replug.commands.commands import run_export

    run_export(run_dir, out)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="A finished run directory.")],
    figure: Annotated[Path | None, typer.Option(help="Also write the overview as a PNG.")] = None,
) -> None:
    """Write RUN_DIR/report.html again and print the table."""
    from replug.commands.commands import run_report

    run_report(run_dir, figure)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[
        list[str] | None, typer.Option(help="All GPUs, such as 8xA100, or cores, 16xcpu; repeat it to compare.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes they are in (default: eight GPUs to a node).")] = None,
    split: Annotated[
        str | None, typer.Option(help="GPUs that score/embed/train, such as 6/1/1, instead of the best.")
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help="Overrides to compare with, in one string; may be repeated.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A finished run whose rates are taken; --gpus is then such as 2xmeasured.")
    ] = None,
    lm_parameters: Annotated[float | None, typer.Option(help="Of an LM that is not known, such as 7e9.")] = None,
    retriever_parameters: Annotated[float | None, typer.Option(help="Of an unknown encoder, such as 110e6.")] = None,
    documents: Annotated[int | None, typer.Option(help="Documents of the corpus, where no file tells.", min=1)] = None,
    efficiency: Annotated[float | None, typer.Option(help="Share of the peak that is reached (GPUs: 0.35).")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write the time line of the first plan as a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table of a row each.")] = False,
) -> None:
    """Say what a run costs before anyone pays for it: hours, memory, disk, the best split of the GPUs.

    replug plan configs/paper.yaml --gpus 8xA100 --what-if lm.path=gpt2
    """
    from replug.commands.plan import run_plan
    from replug.planning.plans import Assumptions

    given = Assumptions(lm_parameters, retriever_parameters, documents, efficiency, split)
    run_plan(config, gpus or (), nodes, measured, as_json, chart, overrides or (), what_if or (), as_markdown, given)


@app.command()
def slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    submit: Annotated[bool, typer.Option("--submit", help="Freeze configuration and code, and submit.")] = False,
    job: Annotated[str, typer.Option(help="train, prepare or evaluate.")] = "train",
    nodes: Annotated[int | None, typer.Option(help="Nodes.", min=1)] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each node.", min=0)] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="CPUs of each node.", min=1)] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 24:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option of sbatch, such as --sbatch=--mem=64G; repeatable.")
    ] = None,
) -> None:
    """Show the SLURM job of a configuration; with --submit, freeze it into RUN_DIR and put it into the queue.

    replug slurm configs/paper.yaml --nodes 2 --gpus-per-node 4 --partition gpu --submit
    """
    from replug.commands.slurm import SlurmRequest, run_slurm

    request = SlurmRequest(job, nodes, gpus_per_node, cpus_per_task, time, partition, account, tuple(sbatch or ()))
    run_slurm(config, overrides or [], request, submit)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A YAML file; left out: this machine only.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Look at this machine, and at what a configuration needs of it; exits with 1 where something is wrong."""
    from replug.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(config, overrides or [], as_json))


@app.command()
def dashboard(
    project: Annotated[str, typer.Argument(help="Whose runs it shows.", metavar="ENTITY/PROJECT")],
) -> None:
    """Save a view of a W&B project's runs, in sections: learning, temperatures, index, time, throughput."""
    from replug.train.wandb_dashboard import run_dashboard

    run_dashboard(project)


@app.command()
def keys(section: Annotated[str, typer.Argument(help="Only keys that begin so, such as refresh.")] = "") -> None:
    """List every key of a configuration with its default and what it means; those of evaluations at the end."""
    from replug.configs.describe import key_descriptions
    from replug.configs.schema import EvaluationConfig

    of_runs = list(key_descriptions())
    of_evaluations = [row for row in key_descriptions(EvaluationConfig) if row not in of_runs]
    for key, default, description in of_runs + of_evaluations:
        if key.startswith(section):
            print(f"{key}={default}".ljust(44), description)


def load_for_run(path: Path, overrides: list[str] | None, corpus_only: bool = False) -> Config:
    """The configuration of a command that starts Ray, with its local paths checked before heavy imports."""
    config = load_config(path, overrides or [], needs_lm=not corpus_only)
    check_paths(config, corpus_only)
    configure_ray_environment(config)
    return config


if __name__ == "__main__":
    main()
