"""A recurrent language model, after PyTorch's official example ``word_language_model``.

The text is read in its order and the hidden state is passed from batch to batch; a validation loss
that does not fall divides the learning rate. Its own resume follows PyTorch's recipe for a general
checkpoint, after each epoch.
"""

from __future__ import annotations

import argparse
import os

import torch
from small_data import VOCABULARY_SIZE
from torch import nn

BPTT = 8


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=32, nhid=32, nlayers=2, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nlayers, self.nhid = nlayers, nhid

    def forward(self, source, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(source)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        return tuple(torch.zeros(self.nlayers, bsz, self.nhid) for _ in range(2))


def batchify(data, bsz):
    num_batches = data.size(0) // bsz
    return data[: num_batches * bsz].view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(model, data, criterion):
    model.eval()
    hidden = model.init_hidden(data.size(1))
    total_loss = 0.0
    with torch.no_grad():
        for i in range(0, data.size(0) - 1, BPTT):
            inputs, targets = get_batch(data, i)
            output, hidden = model(inputs, hidden)
            total_loss += len(inputs) * criterion(output, targets).item()
    return total_loss / (len(data) - 1)


def train(model, data, criterion, optimizer):
    model.train()
    hidden = model.init_hidden(data.size(1))
    for i in range(0, data.size(0) - 1, BPTT):
        inputs, targets = get_batch(data, i)
        hidden = tuple(each.detach() for each in hidden)
        optimizer.zero_grad()
        output, hidden = model(inputs, hidden)
        criterion(output, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=20.0)
    parser.add_argument("--save", default="model.pt")
    args = parser.parse_args()

    torch.manual_seed(1111)
    corpus = torch.randint(VOCABULARY_SIZE, (500,))
    train_data, val_data = batchify(corpus[:400], 8), batchify(corpus[400:], 8)
    model = RNNModel(VOCABULARY_SIZE)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    start_epoch, best_val_loss = 0, None
    if os.path.exists(args.save):
        checkpoint = torch.load(args.save)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        start_epoch, best_val_loss = checkpoint["epoch"], checkpoint["best_val_loss"]

    for epoch in range(start_epoch, args.epochs):
        train(model, train_data, criterion, optimizer)
        val_loss = evaluate(model, val_data, criterion)
        print(f"end of epoch {epoch}: valid loss {val_loss:.2f}")
        if best_val_loss is None or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            optimizer.param_groups[0]["lr"] /= 4.0
        checkpoint = {
            "epoch": epoch + 1,
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "best_val_loss": best_val_loss,
        }
        torch.save(checkpoint, args.save)


if __name__ == "__main__":
    main()
