"""Train a small GPT of PyTorch on this documentation, one replica per rank.

    python docs/examples/gpt_torch.py
    mpirun -n 2 python docs/examples/gpt_torch.py --epochs 30 --checkpoints gpt

It reads characters, of the user's guide beside it or of --text, and learns which one
comes next. At the end it goes on with a sentence. On any number of ranks it learns what
one process learns; a second run goes on where the first one stopped.
"""

import argparse
import json
from pathlib import Path

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
import torch
from torch import nn
from torch.utils.data import TensorDataset

GUIDE = Path(__file__).parents[1] / "user-guide"
BATCH = 32  # sequences of all replicas; the last batch of an epoch has fewer
LENGTH = 64
CHARACTERS = 128  # of ASCII
BEGIN = "A strategy "


def sequences(texts):
    """Cut texts into sequences of characters, each with the characters that follow."""
    codes = torch.tensor(list("".join(texts).encode("ascii", "replace")))
    rows = (len(codes) - 1) // LENGTH
    inputs, targets = codes[: rows * LENGTH], codes[1 : rows * LENGTH + 1]
    return TensorDataset(inputs.view(rows, LENGTH), targets.view(rows, LENGTH))


class Block(nn.Module):
    """Attention to what was before, and a network for each character."""

    def __init__(self, width, heads):
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """Return what is known of each character."""
        parts = self.attend(self.before(x)).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.between(x))


class GPT(nn.Module):
    """A transformer that says which character comes next."""

    def __init__(self, width=64, heads=4, layers=2):
        """Make the layers, the same in every process."""
        super().__init__()
        torch.manual_seed(0)
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    def forward(self, codes):
        """Return a logit for each character that may follow."""
        places = torch.arange(codes.shape[1])
        return self.end(self.blocks(self.characters(codes) + self.places(places)))


@torch.no_grad()
def go_on(model, text, count):
    """Return a text with the characters that the model would write behind it."""
    codes = torch.tensor([list(text.encode())])
    for _ in range(count):
        last = model(codes[:, -LENGTH:])[:, -1:].argmax(dim=-1)
        codes = torch.cat([codes, last], dim=1)
    return bytes(codes[0].tolist()).decode()


def main():
    """Train, and print the loss and some text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoints", help="folder")
    parser.add_argument(
        "--text", type=Path, action="append", help="file; again for more"
    )
    options = parser.parse_args()
    files = options.text or sorted(GUIDE.glob("*.md"))
    dataset = sequences([file.read_text() for file in files])
    strategy = hs.MultiWorkerMirroredStrategy()
    model = hst.replicate(GPT(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = hst.GlobalBatchSampler(dataset, BATCH, strategy, shuffle=True)
    checkpoints = None
    if options.checkpoints:
        state = hst.state(model, optimizer)
        checkpoints = hs.CheckpointManager(options.checkpoints, **state, data=sampler)
        checkpoints.restore_or_initialize()

    loader, loss = sampler.loader(), torch.tensor(torch.nan)
    while sampler.epoch < options.epochs:
        for inputs, targets in loader:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(
                model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"
            )
            loss = hst.global_mean(losses, targets.numel())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if checkpoints is not None:
            checkpoints.save(sampler.epoch)
        hs.print_once(f"epoch {sampler.epoch}: loss {loss:.4f}")
    text = go_on(model, BEGIN, 60)
    hs.print_once(json.dumps({"loss": loss.item(), "text": text}))


if __name__ == "__main__":
    main()
