"""What a run reports: the capture report, changes since the checkpoint, and a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resumekit.cadence import SaveInterval, parse_cadence
from resumekit.capture.fingerprint import SettingChange
from resumekit.capture.slots import uncaptured_parameters
from resumekit.distributed import World, restart_risk
from resumekit.errors import InexactError
from resumekit.log import logger, warn
from resumekit.run.components import RunComponents, weakly
from resumekit.run.options import Options
from resumekit.run.resuming.compatibility import owners
from resumekit.run.resuming.state_origins import PER_RANK_KEYS
from resumekit.state import (
    CaptureLine,
    CaptureReport,
    Fidelity,
    SharingPattern,
    Slot,
    StateComponent,
)
from resumekit.storage.imported import ImportOrigin, import_of, imported_details
from resumekit.storage.manifest import LINEAGE, ForkOrigin, Manifest

# Gives lines for state that the run has and no component holds.
Finding = Callable[[], Iterable[CaptureLine]]


WARNINGS = {
    Fidelity.LOST: "RK-801",
    Fidelity.UNKNOWN: "RK-802",
    Fidelity.EQUIVALENT: "RK-803",
}


class Reporter:
    """Logs each thing once, and keeps what belongs into every manifest.

    Args:
        options: of the run.
        world: its ranks; rank 0 logs.
        components: of the run.

    Attributes:
        cadence: when it saves, in words.
    """

    def __init__(self, options: Options, world: World, components: RunComponents) -> None:
        self._options = options
        self._world = world
        self._components = components
        self._start = ""  # what the first line says; empty for a run that resumes
        self.cadence = str(parse_cadence(options.save_every, options.mtbf))
        self._has_logged_skipped = False
        self._interval: SaveInterval | None = None  # the last one that was logged
        self._findings: list[Finding] = []
        self._known: set[tuple[str, Any]] = set()  # the fidelity of each part, once announced
        self._lineage: Any = None  # where the run was forked from another one
        self._imported: ImportOrigin | None = None  # what it began from
        self._history: list[dict[str, Any]] = []  # of changes that a resume followed

    def log(self, message: str) -> None:
        """One line to the user, from rank 0."""
        if self._world.is_first:
            logger.info("%s", message)

    def warn(self, code: str, message: str) -> None:
        """One line to act on, from rank 0; see `resumekit.log.warn`."""
        if self._world.is_first:
            warn(code, "%s", message)

    def detail(self, message: str) -> None:
        """One line that only DEBUG shows, from rank 0."""
        if self._world.is_first:
            logger.debug("%s", message)

    def log_resume(self, report: ResumeReport, *, is_driven: bool) -> None:
        """One line: where the run continues, or that it is over.

        Args:
            report: of the resume.
            is_driven: whether a framework runs the loop.
        """
        hint = "" if is_driven else "; after the loop, ask already_finished"
        cadence = f"; saves {self.cadence}"
        self.log(f"{report}{cadence if report.finished is None else hint}")

    def log_restored_again(self, keys: Sequence[str], left: Sequence[str]) -> None:
        """One line on components that code has changed between the resume and the first batch.

        Args:
            keys: those that were restored again.
            left: those that differ from what was restored all the same.

        Raises:
            InexactError: ``strict=True``, and there are such.
        """
        if left:
            found = f"changed before the first batch, not restored: {_listed(left)}"
            if self._options.strict:
                raise InexactError("strict=True", found=found, remedy="Change it before the loop")
            self.warn("RK-822", f"{found}; change it before the loop")
        elif keys:
            self.log(
                f"restored again: {_listed(keys)} (code before the first batch changed it, and "
                "had run before the save)"
            )

    def note_start(
        self, directory: Path, unrelated_names: str, weights_of: ForkOrigin | None
    ) -> None:
        """Takes what the first line says of a run that starts.

        Args:
            directory: of the run.
            unrelated_names: what else lies in it, as where it was mistyped.
            weights_of: the checkpoint of another run whose weights it begins with.
        """
        others = f", beside {unrelated_names}" if unrelated_names else ""
        weights = "" if weights_of is None else f" with {weights_of}, all else fresh"
        self._start = f"starting in {directory}{others}{weights}"

    def log_interval(self, interval: SaveInterval | None) -> None:
        """Logs the interval that ``save_every="auto"`` has chosen, once until it has changed.

        At INFO where saves cost more than they should, else at DEBUG.

        Args:
            interval: after the last save; None without "auto".
        """
        if interval is None or not interval.differs_from(self._interval):
            return
        self._interval = interval
        log = self.log if interval.is_expensive else self.detail
        log(f"saves {interval}")

    def log_skipped(self, num_skipped: int) -> None:
        """Logs once how many saves were skipped, if any."""
        if num_skipped and not self._has_logged_skipped:
            self._has_logged_skipped = True
            why = "as the one before was still being written (on_save_in_flight)"
            self.log(f"{num_skipped} save{'s' * (num_skipped > 1)} skipped, {why}")

    def add_finding(self, finding: Finding) -> None:
        """Asks for more lines whenever a report is made, in the order of these calls.

        Args:
            finding: a method, whose object is referred to weakly.
        """
        self._findings.append(weakly(finding, ()))

    # ---------------------------------------------------------------- fidelity

    def announce(self) -> None:
        """Logs what a checkpoint will hold, before the first batch and when a loader changes it.

        One line for a run that starts, and a warning for each part that is not exact.

        Raises:
            InexactError: ``strict=True`` and a part would not be restored exactly.
        """
        report = self.capture_report()
        if self._options.strict:
            report.require_exact()
        if not self._known:
            self._log_start(report)
            if risk := restart_risk(self._world.world_size):
                self.warn("RK-863", risk)
        self._warn_of_new(report)

    def captured(self, *, are_complete: bool = False) -> CaptureReport:
        """The capture report for the next checkpoint; warns of parts that are newly not exact.

        Args:
            are_complete: whether late components were added just now.

        Raises:
            InexactError: ``strict=True``, and a part is not restored exactly.
        """
        report = self.capture_report(are_complete=are_complete)
        if self._options.strict and self._known:
            self._world.everywhere(report.require_exact)
        if self._known:
            self._warn_of_new(report)
        return report

    def _log_start(self, report: CaptureReport) -> None:
        self._known = {(line.key, line.fidelity) for line in report.lines}
        self._known -= {(line.key, line.fidelity) for line in report.inexact}
        inexact = len({line.key for line in report.inexact})
        parts = f"{inexact} part{'s' * (inexact > 1)} not exact:" if inexact else ""
        if self._start:
            parts = parts or "all saved state is exact"
            self.log(f"{self._start}; saves {self.cadence}; {parts}")
        for line in report.lines:
            self.detail(f"in each checkpoint: {line}")

    def look(self) -> None:
        """Reports what a step has changed and no component saves. Collective.

        Raises:
            InexactError: ``strict=True``, and something is not restored exactly.
        """
        if self._known:
            self.captured()

    def _warn_of_new(self, report: CaptureReport) -> None:
        for line in report.inexact:
            if (line.key, line.fidelity) not in self._known:
                self._known.add((line.key, line.fidelity))
                self.warn(WARNINGS[line.fidelity or Fidelity.UNKNOWN], f"{line}")

    def capture_report(self, *, are_complete: bool = False) -> CaptureReport:
        """One line for each component, each empty slot, and whatever was overlooked.

        Args:
            are_complete: whether late components were added just now.
        """
        lines: list[CaptureLine] = []
        for slot in Slot:
            present = [each for each in self._components.all if each.slot == slot.value]
            lines.extend(map(_capture_line, present))
            if not present:
                lines.append(CaptureLine(slot.value, None, f"no {slot.value} was given"))
        for component in self._components.all:
            lines.extend(component.state.findings())
        lines.extend(uncaptured_parameters(self._components.all, are_complete=are_complete))
        for finding in self._findings:
            lines.extend(finding())
        return CaptureReport(tuple(lines))

    # ---------------------------------------------------------------- what changed

    def take_history(self, manifest: Manifest) -> None:
        """The changes that earlier resumes followed, with room for those of this one; and forks."""
        self._lineage = manifest.details.get(LINEAGE)
        self._imported = import_of(manifest)
        earlier = manifest.details.get("changes", [])
        self._history = [*earlier, {"step": manifest.step, "changes": []}]

    def log_changes(self, changes: Sequence[str], *, warns: bool = False) -> None:
        """Logs and records the changes that this resume follows."""
        for change in changes:
            if warns:
                self.warn("RK-821", change)
            else:
                self.log(change)
            self._history[-1]["changes"].append(change)

    def log_changed_loaders(self) -> None:
        """The same for the loaders that were opened since the last call."""
        position = self._components.position
        changes, position.changes = position.changes, []
        self.log_changes(changes)
        unexpected, position.unexpected = position.unexpected, []
        self.log_changes(unexpected, warns=True)

    def details(self) -> dict[str, Any]:
        """What every manifest says about how this run came about."""
        details: dict[str, Any] = owners(self._components.all)
        if self._options.exclude:
            details["exclude"] = sorted(self._options.exclude)
        if self._components.per_rank:
            details[PER_RANK_KEYS] = sorted(self._components.per_rank)
        if self._options.resume_from is not None:
            details["resume_from"] = self._options.resume_from
        if self._interval is not None:
            details["saves"] = str(self._interval)
        if self._lineage:
            details[LINEAGE] = self._lineage
        if self._imported is not None:
            details |= imported_details(ImportOrigin(self._imported.source))
        history = [entry for entry in self._history if entry["changes"]]
        if history:
            details["changes"] = history
        return details


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(keys)


def _capture_line(component: StateComponent) -> CaptureLine:
    """How exactly a component is restored; some states know it only at run time."""
    fidelity, reason = component.state.fidelity or (component.fidelity, component.reason)
    assert isinstance(component.sharing_pattern, SharingPattern)
    return CaptureLine(component.key, fidelity, reason, component.sharing_pattern)


@dataclass(frozen=True)
class Rejection:
    """A checkpoint that was passed over, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ResumeReport:
    """What ``resume()`` found and did.

    Args:
        resumed: whether a checkpoint was loaded; False for a fresh start.
        step: the optimizer step that the run continues from; 0 for a fresh start.
        path: the checkpoint's directory, or None.
        components: each component of the checkpoint and its fidelity.
        differences: what differs between the run that saved and this one.
        changes: changed parameter names, and what became of the ranks' own states where the number
            of ranks has changed.
        not_needed: what the checkpoint holds for the loop of another framework, and was left out.
        fresh: the keys of components that the checkpoint lacks, such as state of this framework's
            loop; they start from their live state.
        rejected: newer checkpoints that were passed over.
        finished: why the run was over when it was found, if it was.
        weights_of: the checkpoint of another run whose weights a fresh start begins with.
    """

    resumed: bool
    step: int = 0
    path: Path | None = None
    components: tuple[CaptureLine, ...] = ()
    differences: tuple[SettingChange, ...] = ()
    changes: tuple[str, ...] = ()
    not_needed: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    finished: str | None = None
    weights_of: ForkOrigin | None = None

    def __str__(self) -> str:
        if self.weights_of is not None:
            return f"starting with {self.weights_of}; all else is fresh"
        if not self.resumed:
            return "starting"
        if self.finished is not None:
            finished = f"step {self.step} ({self.finished})"
            return f"nothing to do, the run finished at {finished}: {self.path}"
        return f"resuming at step {self.step} from {self.path}"
