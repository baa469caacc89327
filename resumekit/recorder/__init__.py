"""The judge's view from inside a training process, without help from the script or the library.

Official hooks of torch record each optimizer step: the losses that ``backward`` was called on, the
batches that the model was called with, learning rates, random generators, and digests of weights,
buffers and optimizer state. Nothing is drawn from a generator and no value is changed.
"""

from __future__ import annotations

from resumekit.recorder.launches import Origin, Position, RecorderSettings, align

__all__ = ["Origin", "Position", "RecorderSettings", "align", "record_deepspeed", "record_torch"]


def record_torch(settings: dict[str, object]) -> None:
    """Activation after ``import torch``: registers the hooks of this process."""
    from resumekit.recorder.hooks import install

    install(RecorderSettings.parse(settings))


def record_deepspeed(settings: dict[str, object]) -> None:
    """Activation after ``import deepspeed``: records the steps of engines."""
    from resumekit.recorder.hooks import install_in_deepspeed

    install_in_deepspeed()
