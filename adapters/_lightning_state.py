"""What a fit is made of, as components."""

from __future__ import annotations

from typing import Any

from resumekit.adapters._lightning_callbacks import Hooked, as_kept, overrides
from resumekit.adapters._lightning_package import callbacks, strategies
from resumekit.adapters._lightning_place import Place
from resumekit.adapters._lightning_settings import keeps_gradients
from resumekit.adapters._lightning_user_state import user_state
from resumekit.capture import (
    buckets_of,
    gradient_components,
    one_or_named,
    registered_components,
    require_gradients,
    state_components,
)
from resumekit.state import SharingPattern, StateComponent


def fit_components(trainer: Any, place: Place, ema: Any) -> tuple[StateComponent, ...]:
    """All that the Trainer holds.

    Args:
        trainer: the Trainer, with its strategy set up.
        place: where its loops are.
        ema: averaged models that the user gave.
    """
    averaging = [each for each in trainer.callbacks if isinstance(each, callbacks.WeightAveraging)]
    averages = [*(each._average_model for each in averaging), *([] if ema is None else [ema])]
    ema = one_or_named(averages) if averaging else ema
    schedulers = one_or_named([each.scheduler for each in trainer.lr_scheduler_configs])
    stateful = [each for each in trainer.callbacks if overrides(each, "state_dict")]
    user = user_state(trainer, others=[ema, *averages])
    place.user_state = user
    return (
        *_trained(trainer, schedulers, ema),
        place.component(),
        StateComponent("callbacks/hooks", Hooked(trainer), SharingPattern.PER_RANK),
        user.component(),
        *map(as_kept, registered_components([*stateful, *filter(None, [trainer.datamodule])])),
    )


def _trained(trainer: Any, schedulers: Any, ema: Any) -> tuple[StateComponent, ...]:
    """What a step changes, as the strategy shares it among the ranks."""
    if isinstance(trainer.strategy, strategies.DeepSpeedStrategy):
        # Imports DeepSpeed, which has made this engine.
        from resumekit.frameworks.deepspeed import engine_components, require_resumable

        require_resumable(trainer.model)
        return tuple(engine_components(trainer.model, lr_scheduler=schedulers, ema=ema))
    shared = state_components(
        model=trainer.lightning_module,
        optimizer=one_or_named(trainer.optimizers),
        lr_scheduler=schedulers,
        grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
        ema=ema,
        adopt=True,
        num_ranks=trainer.world_size,
    )
    # Between two steps of one optimizer another one may take some.
    if not keeps_gradients(trainer):
        return (*shared, *buckets_of(trainer.model))
    require_gradients(shared)
    return (*shared, *gradient_components(shared, lambda: True), *buckets_of(trainer.model))
