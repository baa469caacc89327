"""``prune``: removes checkpoints of a run that has stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from resumekit.cadence import seconds_of
from resumekit.cli.arguments import AsJson, Directory, existing
from resumekit.errors import ConfigurationError

if TYPE_CHECKING:
    from resumekit.storage.manifest import Manifest

_EXIT_DAMAGED = 1
_BEFORE = "--weights-only-before"


def prune(
    directory: Directory,
    keep_latest: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the N newest steps.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the N best ones; default 1.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the multiples of N steps.")
    ] = None,
    weights_only_before: Annotated[
        str | None,
        typer.Option(
            _BEFORE,
            metavar="STEP|AGE",
            help="Of what is kept before this step, or is older than e.g. 30d or 12h, keep the "
            "weights only: it can be exported, and no run resumes from it.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; show what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints of a run that has stopped. Keeps the newest good one and the best whole.

    Exit code 1 if one stays because its weights are damaged.
    """
    from resumekit.cli.terminal import print_json, print_line
    from resumekit.cli.views import again_if_deleted, names_of
    from resumekit.log import show_messages
    from resumekit.progress_display import human_bytes
    from resumekit.prune import prune_run
    from resumekit.storage.retention import RetentionPolicy
    from resumekit.storage.store import Store

    show_messages()
    counts = (keep_latest, keep_best, keep_every)
    policy = RetentionPolicy(keep_latest or 1, keep_best or 1, keep_every) if any(counts) else None
    if policy is None and weights_only_before is None:
        expected = f"--keep-latest, --keep-best, --keep-every or {_BEFORE}"
        raise ConfigurationError("prune", found="no option says what to keep", expected=expected)
    reduces = _older_than(weights_only_before)
    store = Store(existing(directory))
    names = names_of(store)
    if not dry_run:
        store.acquire()
    try:
        newest, done = again_if_deleted(
            lambda: prune_run(store, policy, reduces=reduces, dry_run=dry_run), named=not dry_run
        )
    finally:
        store.release()
    freed = sum(each.freed_bytes for each in done)
    if as_json:
        found = {"dry_run": dry_run, "newest": str(newest), "freed_bytes": freed}
        rows = [asdict(each) for each in done]
        print_json({"directory": str(directory), **found, "checkpoints": rows})
    else:
        would = "would be " if dry_run else ""
        for each in done:
            what = f"{would}removed"
            if each.problem or each.weights:
                what = each.problem or f"{would}kept as weights only: {each.weights}"
            print_line(f"{each.name}  {what}  {human_bytes(each.freed_bytes)}")
        num_whole = len(names) - sum(not each.problem for each in done)
        print_line(
            f"{human_bytes(freed)} {would}freed; {num_whole} of {len(names)} checkpoints stay as "
            f"they are; newest good one: {newest}"
        )
    if any(each.problem for each in done):
        raise typer.Exit(_EXIT_DAMAGED)


def _older_than(bound: str | None) -> Callable[[Manifest], bool]:
    """Whether a checkpoint is before a step, or older than an age."""
    if bound is None:
        return lambda manifest: False
    if bound.isdecimal():
        return lambda manifest: manifest.step < int(bound)
    days = bound.removesuffix("d")
    seconds = 86_400.0 * int(days) if days.isdecimal() else seconds_of(bound)
    if not seconds:
        raise ConfigurationError(_BEFORE, found=bound, expected="a step, or an age such as 30d")
    limit = time.time() - seconds
    return lambda manifest: (manifest.created_seconds or limit) < limit
