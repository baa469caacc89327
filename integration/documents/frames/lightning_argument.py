import lightning as L  # noqa: N812 - as its documentation does
import torch
from parts import objects, record, stop_first_launch

from resumekit.adapters.lightning import ResumeCallback


class Net(L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        return (self.model(x) - x).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        record(outputs["loss"])
        stop_first_launch()
        self.trainer.should_stop = self.trainer.global_step == 40

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


model, _, loader = objects()
...  # fragment 2.2
trainer.fit(Net(model), loader)
