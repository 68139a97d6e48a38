"""PyTorch models that are small enough for a few cores, and their batches."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from mlp import MLP_SIZES, ROWS
from torch import nn

__all__ = ["MODELS", "Transformer"]

Batch = tuple[torch.Tensor, torch.Tensor]


def mlp() -> nn.Module:
    """Return a multi-layer perceptron of 5.2 million parameters."""
    layers: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(MLP_SIZES):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Block(nn.Module):
    """A residual block: two convolutions and a shortcut."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or num_in != num_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False),
                nn.BatchNorm2d(num_out),
            )

    def forward(self, x: Any) -> Any:
        return torch.relu(self.main(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """Return a ResNet-18 for images of 32 x 32, of 11.2 million parameters.

    He et al., Deep Residual Learning for Image Recognition, CVPR 2016,
    doi:10.1109/CVPR.2016.90; with a first convolution of 3 x 3, as for small images.
    """
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks, num_in = [], 64
    for num_out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [_Block(num_in, num_out, stride), _Block(num_out, num_out, 1)]
        num_in = num_out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 10)]
    return nn.Sequential(*stem, *blocks, *head)


class Transformer(nn.Module):
    """A causal transformer of 9.9 million parameters, 7 layers of width 320."""

    words, width, length = 2048, 320, 32

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.words, self.width)
        self.positions = nn.Parameter(torch.zeros(self.length, self.width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                self.width, 8, 4 * self.width, dropout=0.0, batch_first=True
            )
            for _ in range(7)
        )
        self.output = nn.Linear(self.width, self.words)
        mask = nn.Transformer.generate_square_subsequent_mask(self.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, words: Any) -> Any:
        hidden = self.embedding(words) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, self.mask, is_causal=True)
        return self.output(hidden).flatten(0, 1)


def _images(*shape: int) -> Any:
    def draw(generator: torch.Generator) -> Batch:
        targets = torch.randint(0, 10, shape[:1], generator=generator)
        return torch.randn(shape, generator=generator), targets

    return draw


def _text(generator: torch.Generator) -> Batch:
    shape = (4, Transformer.length)
    words = torch.randint(0, Transformer.words, shape, generator=generator)
    return words, words.roll(-1, 1).flatten()


# For each model: a function that makes it, and one that draws a replica's batch.
MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (mlp, _images(ROWS, MLP_SIZES[0])),
    "resnet18": (resnet18, _images(4, 3, 32, 32)),
    "transformer": (Transformer, _text),
}
