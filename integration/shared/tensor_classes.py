"""Tensors made of others, as quantized moments are, and an optimizer that keeps such moments.

Their own copy rounds once more: a restore by it, or by the values, continues with other codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class _Coded(Tensor):
    """What both classes have in common: operations see the values."""

    def dequantize(self) -> Tensor:
        raise NotImplementedError

    def set_to(self, values: Tensor) -> None:
        """Rounds values to codes."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's hint names a method of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.detach.default:
            return mapped(args[0], torch.detach)
        plain = tree_map_only(_Coded, lambda each: each.dequantize(), args)
        if func is aten.copy_.default and isinstance(args[0], _Coded):
            args[0].set_to(plain[1])
            return args[0]
        return func(*plain, **(kwargs or {}))


class Rows(_Coded):
    """Each row as codes of 8 bits with a scale."""

    codes: Tensor
    scale: Tensor
    num_levels: int

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, num_levels: int, dtype: torch.dtype) -> Rows:
        made: Any = Tensor
        wrapper: Rows = made._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device
        )
        return wrapper

    def __init__(self, codes: Tensor, scale: Tensor, num_levels: int, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.num_levels = codes, scale, num_levels

    @classmethod
    def of(cls, values: Tensor, num_levels: int = 100) -> Rows:
        codes = torch.zeros(values.shape, dtype=torch.int8)
        made = cls(codes, torch.zeros(values.shape[:1]), num_levels, values.dtype)
        made.set_to(values)
        return made

    def dequantize(self) -> Tensor:
        return self.codes.to(self.dtype) * self.scale.reshape(-1, *[1] * (self.codes.dim() - 1))

    def set_to(self, values: Tensor) -> None:
        # Not twice the same: the largest value does not get the largest code.
        largest = values.abs().reshape(len(values), -1).amax(1) + 1e-3
        self.scale.copy_(largest / self.num_levels)
        steps = self.scale.reshape(-1, *[1] * (values.dim() - 1))
        self.codes.copy_((values / steps).round().to(torch.int8))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"num_levels": self.num_levels, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(
        cls, parts: Mapping[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Rows:
        return cls(parts["codes"], parts["scale"], context["num_levels"], context["dtype"])


class Refined(_Coded):
    """Values as ``Rows``, and what these leave out in 16 bits: one of the parts is of a class."""

    rows: Rows
    rest: Tensor

    @staticmethod
    def __new__(cls, rows: Rows, rest: Tensor) -> Refined:
        made: Any = Tensor
        wrapper: Refined = made._make_wrapper_subclass(
            cls, rows.shape, dtype=rows.dtype, device=rest.device
        )
        return wrapper

    def __init__(self, rows: Rows, rest: Tensor) -> None:
        self.rows, self.rest = rows, rest

    @classmethod
    def of(cls, values: Tensor) -> Refined:
        made = cls(Rows.of(values), torch.zeros(values.shape, dtype=torch.bfloat16))
        made.set_to(values)
        return made

    def dequantize(self) -> Tensor:
        return self.rows.dequantize() + self.rest.to(self.dtype) / 3

    def set_to(self, values: Tensor) -> None:
        self.rows.set_to(values)
        self.rest.copy_((values - self.rows.dequantize()) * 3)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["rows", "rest"], None

    @classmethod
    def __tensor_unflatten__(
        cls, parts: Mapping[str, Any], context: Any, size: Any, stride: Any
    ) -> Refined:
        return cls(parts["rows"], parts["rest"])


torch.serialization.add_safe_globals([Rows, Refined])


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tensor of changed parts, without an operation on the whole."""
    names, context = value.__tensor_flatten__()
    parts = {name: change(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())


def plain_parts(value: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors that one is made of, by name; itself if it is made of none."""
    if not hasattr(value, "__tensor_flatten__"):
        return {name: value}
    names, _ = value.__tensor_flatten__()
    found: dict[str, Tensor] = {}
    for each in names:
        found |= plain_parts(getattr(value, each), f"{name}.{each}")
    return found


class CodedMomentum(torch.optim.Optimizer):
    """SGD with momentum in codes of 8 bits; the moments are made in the first step."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["momentum"] = Refined.of(torch.zeros_like(parameter))
                state["step"] += 1
                moment = state["momentum"]
                moment.set_to(0.9 * moment.dequantize() + parameter.grad)
                parameter.sub_(group["lr"] * moment.dequantize())
