"""What TRL's Trainers keep from one step to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from resumekit.capture import Restorer, require_fields
from resumekit.distributed import WorldChange
from resumekit.state import SharingPattern, StateComponent

# trl 1.16, of each Trainer: what it sums up between two lines of the log.
SUMS_OF_TRL = ("_metrics", "_total_train_tokens")

# trl 1.16 experimental/orpo, experimental/cpo: the same, in dicts that make their entries.
_STORED = "_stored_metrics"

# trl 1.16 grpo_trainer.py, rloo_trainer.py, distillation_trainer.py _prepare_inputs: what was
# generated for several steps, and how many batches have been used.
_GENERATED = ("_step", "_buffered_inputs")

# trl 1.16 grpo_trainer.py _compute_loss: what steers the bonus for entropy.
_STEERED = ("entropy_coef", "_last_world_entropy")

# trl 1.16 grpo_trainer.py log: the completions that were made last, for a table.
_LOGS = "_logs"

_FOLLOWED = frozenset(
    {"SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation", "ORPO", "CPO", "_Base"}
)

# What a generated batch is cut by.
_GEOMETRY = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
)


def trl_components(trainer: Any, *, key: str, framework: str) -> Iterator[StateComponent]:
    """What a Trainer of TRL's holds beside its sums; nothing for any other one.

    Args:
        trainer: the ``transformers.Trainer``.
        key: the component's.
        framework: whose loop alone needs it.
    """
    held = TrlState(trainer, key=key)
    if held.names:
        yield StateComponent(
            key, held, SharingPattern.PER_RANK, required=False, framework=framework
        )


def lost_of_trl(trainer: Any) -> str:
    """Why a Trainer of TRL's cannot go on exactly, or nothing."""
    own = [each for each in type(trainer).__mro__ if each.__module__.partition(".")[0] == "trl"]
    unknown = [e.__name__ for e in own if e.__name__.removesuffix("Trainer") not in _FOLLOWED]
    if unknown:
        return f"what trl's {unknown[0]} keeps from step to step is not known here"
    if getattr(trainer, "use_vllm", False):
        return "vLLM draws its completions from random numbers of its own; use use_vllm=False"
    if getattr(trainer, "environments", None):
        return "the environments that completions act in are not saved; use none"
    if _logs_pictures(trainer):
        return "the log of completions has pictures, which are not saved; log_completions=False"
    return ""


def _logs_pictures(trainer: Any) -> bool:
    return getattr(trainer, "log_completions", False) and getattr(trainer, "_is_vlm", False)


class TrlState:
    """What was generated and not used up yet, counts, and what steers a loss.

    Args:
        trainer: of TRL's.
        key: the component's key, for errors.
    """

    def __init__(self, trainer: Any, *, key: str) -> None:
        self._trainer = trainer
        self.key = key
        steered = _STEERED if getattr(trainer, "use_adaptive_entropy", False) else ()
        is_table = getattr(trainer, "log_completions", False) and not _logs_pictures(trainer)
        possible = (_STORED, *_GENERATED, *steered, *((_LOGS,) if is_table else ()))
        self.names = tuple(each for each in possible if hasattr(trainer, each))

    def state_dict(self) -> dict[str, Any]:
        """The live values, in dicts and lists without a default."""
        state = {name: _plain(getattr(self._trainer, name)) for name in self.names}
        return {**state, "geometry": self._geometry()}

    def _geometry(self) -> dict[str, int]:
        args = self._trainer.args
        return {name: getattr(args, name) for name in _GEOMETRY if hasattr(args, name)}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: a value is missing.
        """
        require_fields(self.key, state, {"geometry": dict, **dict.fromkeys(self.names, object)})

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Sets every value where it stands, so that containers keep their kind and their limits.

        Returns:
            What did not come back exactly: batches that were cut otherwise are generated anew.
        """
        device = self._trainer.accelerator.device
        restore = Restorer()
        for name in self.names:
            live, saved = getattr(self._trainer, name), state[name]
            if isinstance(live, dict):
                _fill(live, restore(None, saved))
            else:
                made = restore(None, saved, lambda tensor: tensor.detach().to(device, copy=True))
                setattr(self._trainer, name, made)
        if "_buffered_inputs" in self.names and state["geometry"] != self._geometry():
            return self._generate_anew("the batches that were generated are cut otherwise now")
        return ()

    def _generate_anew(self, why: str) -> tuple[str, ...]:
        is_lost = self._trainer._buffered_inputs is not None
        self._trainer._buffered_inputs = None
        return (f"{why}; the next step generates new ones",) if is_lost else ()

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Any]], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Rank 0's counts; what each rank had generated belongs to the former ones."""
        state = dict(states[change.model_rank])
        if state.get("_buffered_inputs") is None:
            return state, ()
        remark = "the batches that were generated were those of the former ranks"
        return {**state, "_buffered_inputs": None}, (f"{remark}; the next step generates new ones",)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, deque)):
        return [_plain(each) for each in value]
    return value


def _fill(live: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Puts saved values into dicts that may make their entries, and lists that may be short."""
    for key in [each for each in live if each not in saved]:
        del live[key]
    for key, value in saved.items():
        if isinstance(value, dict):
            _fill(live[key], value)
        elif isinstance(value, list):
            live[key].clear()
            live[key].extend(value)
        else:
            live[key] = value


def without_times(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """``_metrics`` without what is read from a clock. trl 1.16 grpo_trainer.py training_step."""
    return {
        mode: {name: values for name, values in each.items() if name != "step_time"}
        for mode, each in metrics.items()
    }
