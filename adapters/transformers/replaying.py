"""A Trainer that is replayed: it uploads nothing."""

from __future__ import annotations

from typing import Any


def switch_hub_off(settings: Any) -> None:
    """Replaces ``Trainer.init_hf_repo``; called after the import of the module that has it.

    The constructor calls it where ``push_to_hub`` is set, before any event of a callback.

    Args:
        settings: unused, the launcher passes it.
    """
    from transformers.trainer import Trainer

    Trainer.init_hf_repo = _without_hub  # type: ignore[assignment,method-assign]


def _without_hub(trainer: Any, *arguments: Any, **named: Any) -> None:
    trainer.args.push_to_hub = False
