"""What callbacks change in the arguments and the intervals of a Trainer while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resumekit.capture.mismatch import require_fields
from resumekit.layout import WorldChange

# The adapter's own, and what says how far the run goes.
_LEFT_OUT = frozenset({"eval_on_start", "save_total_limit", "max_steps", "num_train_epochs"})

# transformers 5.23 trainer_callback.py TrainerState.compute_steps: made of the arguments.
_INTERVALS = ("logging_steps", "eval_steps", "save_steps")

_KINDS = (bool, int, float, type(None))


class ChangedSettings:
    """Numbers and switches that are not what the script had set when the first epoch began.

    Those that never changed are the script's, in each launch.

    Args:
        trainer: the ``transformers.Trainer``, when its state is made.
        key: the component's key, for errors.
    """

    def __init__(self, trainer: Any, *, key: str) -> None:
        self._trainer = trainer
        self._as_set = self._settings()
        self._pending: Mapping[str, Any] = {}
        self.key = key

    def _settings(self) -> dict[str, Any]:
        args, state = vars(self._trainer.args), self._trainer.state
        found = {f"args.{name}": value for name, value in args.items() if name not in _LEFT_OUT}
        found |= {f"state.{name}": getattr(state, name) for name in _INTERVALS}
        return {name: value for name, value in found.items() if type(value) in _KINDS}

    def state_dict(self) -> dict[str, Any]:
        """The settings that changed, as they are now."""
        if self._pending:
            return dict(self._pending)
        missing = object()
        before, now = self._as_set, self._settings()
        return {n: value for n, value in now.items() if before.get(n, missing) != value}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be kept; changes nothing.

        Raises:
            StateMismatchError: it is no state of such settings.
        """
        require_fields(self.key, state, {})

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the state until ``put_back``: callbacks may set theirs first, as they begin."""
        self._pending = dict(state)
        return ()

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Any]], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What a callback had set on one former rank."""
        return dict(states[change.model_rank]), ()

    def put_back(self) -> str:
        """Sets what had changed in the run, after the script has set its own.

        Returns:
            What to tell of it, or nothing.
        """
        self._as_set = self._settings()
        pending, self._pending = self._pending, {}
        for name, value in pending.items():
            holder, _, attribute = name.partition(".")
            setattr(getattr(self._trainer, holder), attribute, value)
        if not pending:
            return ""
        values = ", ".join(f"{name}={value!r}" for name, value in pending.items())
        return f"{values}: changed in the run, so it is the checkpoint's that counts"
