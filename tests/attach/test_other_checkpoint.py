"""Whose checkpoint a script continues from that passes one that its framework saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resumekit.adapters.torch import Checkpointer
from resumekit.attach import replace_checkpoint
from resumekit.errors import ConfigurationError


def trained(directory: Path, num_steps: int, *, save_every: int | None) -> Path:
    """The run directory of a run that was not finished."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(20, 2)))
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, save_every=save_every)
    for number, (inputs,) in enumerate(ckpt.batches(loader, epochs=1), 1):
        model(inputs).sum().backward()
        optimizer.step()
        ckpt.step()
        if number == num_steps:
            break
    ckpt.close()
    return directory


@pytest.mark.parametrize(
    ("step", "save_every", "text"),
    [
        (4, 4, "resumes from step 4"),
        (3, 4, "resumes from step 4"),
        (6, 4, "resumes from step 4"),  # the journal has step 6
        (6, None, "starts from step 0"),
        (7, 4, "resumes from step 4"),  # it was saved, and the process died, in this step
    ],
)
def test_ours_is_used_if_the_run_has_reached_the_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step: int,
    save_every: int | None,
    text: str,
) -> None:
    directory = trained(tmp_path / "run", 6, save_every=save_every)
    replace_checkpoint("ckpt_path", "their.ckpt", step, directory, logs=True)
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"resumekit: ckpt_path=their.ckpt (step {step}) is not read: {directory} {text}"


@pytest.mark.parametrize(
    ("step", "num_steps", "found"),
    [
        (8, 6, "at step 8, and {} is at step 4"),
        (1, 0, "at step 1, and {} is empty: step 0"),
        (None, 6, "at an unknown step, and {} is at step 4"),
    ],
)
def test_a_later_checkpoint_is_an_error_with_both_steps(
    tmp_path: Path, step: int | None, num_steps: int, found: str
) -> None:
    directory = tmp_path / "run"
    if num_steps:
        trained(directory, num_steps, save_every=4)
    with pytest.raises(ConfigurationError) as caught:
        replace_checkpoint("ckpt_path", "their.ckpt", step, directory, logs=True)
    assert caught.value.where == "ckpt_path='their.ckpt'"
    assert caught.value.found == found.format(directory)
