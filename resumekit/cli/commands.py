"""The commands and their options.

Exit codes: 0 success, 1 a negative result (a run that diverged, a damaged checkpoint), 2 an error,
printed as one line, 141 a closed pipe. Each command imports what it needs, so ``--help`` does not
load torch.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from resumekit.cli.arguments import (
    AsJson,
    Directory,
    ResultFile,
    TrainingCommand,
    bytes_of,
    existing,
)
from resumekit.cli.doctor_command import doctor
from resumekit.cli.explain_command import explain
from resumekit.cli.history_command import history
from resumekit.cli.import_command import import_run
from resumekit.cli.output_files import require_file_path, traces_for, write_comparison
from resumekit.cli.prune_command import prune
from resumekit.cli.replay_command import replay
from resumekit.cli.report_command import report
from resumekit.cli.run_command import cadence_of, run
from resumekit.errors import ResumekitError
from resumekit.printable import printable
from resumekit.version import __version__

EXIT_NO = 1
EXIT_ERROR = 2
EXIT_PIPE = 128 + signal.SIGPIPE
DEBUG_OPTION = "--debug"

app = typer.Typer(
    name="resumekit",
    help="Makes a training job resume exactly where it stopped.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DirectoryOrStep = Annotated[
    Path, typer.Argument(metavar="DIR|STEP", help="A run directory, or one step in it.")
]
PlaceArgument = Annotated[
    str, typer.Argument(metavar="PLACE", help="A directory, or a URL such as s3://bucket/run.")
]
OneStep = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP", help="Only this checkpoint: 500, or step-00000500-r1."),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits with its exit code.

    Args:
        arguments: what follows the program's name; the process's arguments by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    before_command = words[: words.index("--")] if "--" in words else words
    try:
        app(words)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich and typer exit with 1 then
            raise SystemExit(EXIT_PIPE) from None
        raise
    except Exception as error:  # the edge of the program: a line for the user, no traceback
        if DEBUG_OPTION in before_command:
            raise
        line = str(error)
        if not isinstance(error, ResumekitError):
            line = f"{type(error).__name__}: {error} (resumekit {DEBUG_OPTION} ... shows where)"
        typer.echo(f"error: {printable(' '.join(line.split()))}", err=True)
        raise SystemExit(EXIT_ERROR) from None


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"resumekit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG_OPTION, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Makes a training job resume exactly where it stopped."""


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seeds the training and the kill times.")] = 0,
    kills: Annotated[int, typer.Option(min=1, help="How often the job is killed.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Train a quarter as long.")] = False,
    device: Annotated[str, typer.Option(help="Where it trains: cpu or cuda.")] = "cpu",
) -> None:
    """Train, kill at random times, resume, and compare with an uninterrupted run."""
    from resumekit.demo import run_demo

    if not run_demo(seed=seed, num_kills=kills, quick=quick, device=device):
        raise typer.Exit(EXIT_NO)


@app.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
)
def prove(
    command: TrainingCommand,
    kills: Annotated[
        int | None,
        typer.Option(min=1, help="How often the second run is killed at a random time; default 5."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seeds the kill times; default 0.")] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EVENT:STEP",
            help="Kill at this point instead: step:35, right after that step, before its save, or "
            "checkpoint:40, right after that checkpoint. Repeat it to kill the next launches too.",
        ),
    ] = None,
    world: Annotated[
        int, typer.Option(min=1, help="Ranks, started through torch.distributed.run.")
    ] = 1,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="COMPONENT",
            help="Negative control: do not restore this component, or each in turn with 'all'.",
        ),
    ] = None,
    json_path: ResultFile = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with charts and likely causes."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the files, logs and traces of every run here."),
    ] = None,
    relaunch: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="The command after a kill, if it is another one; {latest} in it is the newest "
            "file or directory named like a checkpoint.",
        ),
    ] = "",
    with_resumekit: Annotated[
        bool,
        typer.Option(
            "--with-resumekit",
            help="Attach resumekit to the killed runs, as 'resumekit run' does: would this script "
            "resume exactly with it?",
        ),
    ] = False,
    save_every: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS|TIME",
            help="With --with-resumekit: save every 500 steps, or every 10min; default a tenth of "
            "the steps.",
        ),
    ] = None,
    digest_every: Annotated[
        int, typer.Option(min=1, metavar="N", help="Digest weights and states at every N-th step.")
    ] = 1,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="RELATIVE",
            help="Accept losses that differ by this much, and do not compare weights; for "
            "operations that do not repeat.",
        ),
    ] = None,
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Time limit of each launch.")
    ] = 3600.0,
) -> None:
    """Run a command uninterrupted and killed, and compare the two bit for bit."""
    from resumekit.prove import print_result
    from resumekit.prove import prove as run_proof

    for file in (json_path, html_path):
        if file is not None:
            require_file_path(file, without=())
    with traces_for(html_path, keep) as traces:
        result = run_proof(
            command,
            kills=kills,
            seed=seed,
            at=at or (),
            world=world,
            inject=inject,
            json_path=json_path,
            keep=traces,
            relaunch=shlex.split(relaunch),
            with_resumekit=with_resumekit,
            save_every=cadence_of(save_every),
            digest_every=digest_every,
            tolerance=tolerance,
            timeout_seconds=timeout_seconds,
            on_event=lambda line: typer.echo(line, err=True),
        )
        print_result(result)
        if html_path is not None and traces is not None:
            write_comparison(result, traces, html_path)
    if not result.ok:
        raise typer.Exit(EXIT_NO)


@app.command("list")
def list_checkpoints(
    directory: Directory,
    as_json: AsJson = False,
    place: Annotated[
        list[str] | None,
        typer.Option(metavar="PLACE", help="Show its copies too. Repeat it for more places."),
    ] = None,
) -> None:
    """List the checkpoints of a run, newest first. Reads the manifests only."""
    from resumekit.cli.views import list_directory

    if not list_directory(existing(directory), as_json=as_json, places=place or ()):
        raise typer.Exit(EXIT_NO)


@app.command()
def inspect(
    path: DirectoryOrStep,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint; for a run directory, of its newest one."""
    from resumekit.cli.views import inspect_checkpoint

    inspect_checkpoint(existing(path), as_json=as_json)


@app.command()
def verify(directory: Directory, step: OneStep = None, as_json: AsJson = False) -> None:
    """Read every byte of every checkpoint and compare it with its digest. Changes nothing."""
    from resumekit.cli.views import verify_directory

    if not verify_directory(existing(directory), step=step, as_json=as_json):
        raise typer.Exit(EXIT_NO)


@app.command()
def export(
    path: DirectoryOrStep,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file or directory to write.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="The model: safetensors, pretrained, torch, or dcp. All that continues the "
            "training: accelerate, trainer, lightning, or deepspeed.",
        ),
    ] = "safetensors",
    weights: Annotated[
        str | None, typer.Option(metavar="KIND", help="model, train, or ema: the averaged weights.")
    ] = None,
    component: Annotated[
        str | None, typer.Option(metavar="KEY", help="Which model, if there are several.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="fp32, bf16, fp16, or as-trained: as in the module."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of one file, e.g. 5GB; with an index.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="How many load it, for deepspeed.")
    ] = None,
    stage: Annotated[
        int | None, typer.Option(metavar="STAGE", help="Of ZeRO, 0 to 3, for deepspeed.")
    ] = None,
) -> None:
    """Write the model of a checkpoint for other tools, in fp32, or a checkpoint of a framework."""
    from resumekit.cli.views import export_checkpoint

    export_checkpoint(
        existing(path),
        out,
        to=to,
        weights=weights,
        key=component,
        dtype=dtype,
        max_shard_bytes=None if max_shard_size is None else bytes_of(max_shard_size),
        ranks=ranks,
        stage=stage,
    )


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run directory, or one step in it.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    step: OneStep = None,
    component: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Only this component, e.g. model. Repeat it for more."),
    ] = None,
    as_json: AsJson = False,
    all_rows: Annotated[bool, typer.Option("--all", help="Print long lists in full.")] = False,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")
    ] = None,
) -> None:
    """Compare two checkpoints tensor by tensor, whichever framework and ranks wrote them."""
    from resumekit.cli.diff_view import diff_checkpoints

    equal = diff_checkpoints(
        existing(first),
        existing(second),
        step=step,
        components=component or (),
        as_json=as_json,
        all_rows=all_rows,
        page=html_path,
    )
    if not equal:
        raise typer.Exit(EXIT_NO)


@app.command()
def fork(
    path: DirectoryOrStep,
    directory: Annotated[Path, typer.Argument(metavar="NEW", help="The new run's directory.")],
    step: OneStep = None,
    only_weights: Annotated[
        bool,
        typer.Option("--weights-only", help="Take the model's weights alone, for fine-tuning."),
    ] = False,
) -> None:
    """Begin a new run from a checkpoint of another one; the same command resumes from it."""
    from resumekit.cli.views import fork_run

    fork_run(existing(path), directory, step=step, only_weights=only_weights)


@app.command()
def mirror(directory: Directory, place: PlaceArgument, step: OneStep = None) -> None:
    """Copy the checkpoints of a run to a place, verified; what is there is not sent again."""
    from resumekit.cli.place_views import mirror_run

    if not mirror_run(existing(directory), place, step=step):
        raise typer.Exit(EXIT_NO)


@app.command()
def fetch(
    place: PlaceArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")],
    step: OneStep = None,
) -> None:
    """Copy the newest checkpoint that verifies from a place to a run directory, new or not."""
    from resumekit.cli.place_views import fetch_run

    fetch_run(place, directory, step=step)


app.command()(history)
app.command("import")(import_run)
app.command()(prune)
app.command()(report)
app.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="--dir DIR [OPTIONS] --",
)(run)
app.command(options_metavar="[OPTIONS] --")(replay)
app.command(options_metavar="[OPTIONS] --")(doctor)
app.command()(explain)
