"""A plain loop with an optimizer or a loader of another package: ``--kind galore --workers 0``."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judged_script import arguments, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, BATCH_SIZE, EPOCHS, WIDTH = 40, 4, 2, 8  # 10 steps an epoch


def samples() -> np.ndarray:
    """Inputs of float32, shape (40, 8)."""
    return np.random.default_rng(0).normal(size=(NUM_SAMPLES, WIDTH)).astype(np.float32)


def low_rank(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """GaLore or APOLLO for the matrices; their projections change every 4 steps."""
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() != 2]
    settings: dict[str, Any] = {"rank": 2, "update_proj_gap": 4, "scale": 0.25, "proj_type": "std"}
    if kind == "galore":
        from galore_torch import GaLoreAdamW

        groups = [{"params": others}, {"params": matrices, **settings}]
        return GaLoreAdamW(groups, lr=1e-2, no_deprecation_warning=True)  # type: ignore[no-any-return]
    from apollo_torch import APOLLOAdamW

    settings |= {"proj": "random", "scale_type": "channel"}
    return APOLLOAdamW([{"params": others}, {"params": matrices, **settings}], lr=1e-2)  # type: ignore[no-any-return]


def webdataset(directory: Path, workers: int) -> Iterable[Any]:
    """Two tar files, shuffled through a buffer."""
    import webdataset as wds

    for shard in range(2):
        with tarfile.open(directory / f"{shard}.tar", "w") as archive:
            for number in range(shard, NUM_SAMPLES, 2):
                content = samples()[number].tobytes()
                info = tarfile.TarInfo(f"{number:04d}.bin")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    urls = [str(directory / f"{shard}.tar") for shard in range(2)]
    data = wds.WebDataset(urls, shardshuffle=False, nodesplitter=None)
    data = data.shuffle(8, seed=0).to_tuple("bin").map_tuple(_as_tensor)
    return DataLoader(data.batched(BATCH_SIZE, partial=False), batch_size=None, num_workers=workers)


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32)


def litdata(directory: Path, workers: int) -> Iterable[Any]:
    """A streaming dataset of two chunks and more, shuffled."""
    import litdata as ld

    path = directory / "chunks"
    if not (path / "index.json").exists():
        from litdata.streaming.cache import Cache

        cache = Cache(str(path), chunk_size=8)
        for number, sample in enumerate(samples()):
            cache[number] = torch.tensor(sample)
        cache.done()
        cache.merge()
        assert json.loads((path / "index.json").read_text())["chunks"]
    data = ld.StreamingDataset(str(path), shuffle=True, seed=0)
    return ld.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=workers)  # type: ignore[no-any-return]


def grain(directory: Path, workers: int) -> Iterable[Any]:
    """Grain's loader with a sampler of its own."""
    import grain.python as pygrain

    class Inputs:
        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitem__(self, index: int) -> np.ndarray:
            return samples()[index]

    sampler = pygrain.IndexSampler(
        num_records=NUM_SAMPLES,
        shuffle=True,
        seed=0,
        num_epochs=1,
        shard_options=pygrain.NoSharding(),
    )
    operations = [pygrain.Batch(BATCH_SIZE, drop_remainder=True)]
    return pygrain.DataLoader(  # type: ignore[no-any-return]
        data_source=Inputs(), sampler=sampler, operations=operations, worker_count=workers
    )


LOADERS = {"webdataset": webdataset, "litdata": litdata, "grain": grain}


def train(directory: str, *, kind: str, workers: int, **options: Any) -> None:
    """Trains and saves every 3 steps."""
    from resumekit.adapters.torch import Checkpointer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 4))
    if kind in LOADERS:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        files = Path(f"{directory}-files")
        files.mkdir(exist_ok=True)
        loader = LOADERS[kind](files, workers)
    else:
        optimizer = low_rank(kind, model)
        data = TensorDataset(torch.tensor(samples()))
        loader = DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=workers)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, save_every=3, **options)
    with ckpt:
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            first = batch[0] if isinstance(batch, (list, tuple)) else batch
            inputs = torch.as_tensor(np.asarray(first))
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record(ckpt.progress.step + 1, loss=loss, optimizers=optimizer, inputs=inputs)
            ckpt.step(loss=loss)


if __name__ == "__main__":
    args = arguments("kind", "workers")
    count = int(args.workers or 0)
    train(args.directory, kind=args.kind, workers=count, strict=args.strict)
