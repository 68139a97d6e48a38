"""The shapes of the gradients of two common networks, and sizes as text."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = [
    "MODELS",
    "gradient_bytes",
    "resnet50_shapes",
    "size_text",
    "transformer_shapes",
]

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))

Shapes = list[tuple[int, ...]]


def resnet50_shapes() -> Shapes:
    """Return the shapes of ResNet-50's 25.6 million parameters.

    See He et al., Deep Residual Learning for Image Recognition, CVPR 2016,
    doi:10.1109/CVPR.2016.90, Table 1, with 1,000 classes. As usual, the stride is in
    the 3 x 3 convolutions, which does not change the shapes. The shapes are in the
    order of computation; each normalization has a scale and a shift.
    """
    shapes: Shapes = []

    def convolution(num_out: int, num_in: int, width: int) -> None:
        shapes.extend([(num_out, num_in, width, width), (num_out,), (num_out,)])

    convolution(64, 3, 7)
    num_in = 64
    for stage, num_blocks in enumerate([3, 4, 6, 3]):
        narrow = 64 << stage
        wide = 4 * narrow
        for block in range(num_blocks):
            convolution(narrow, num_in, 1)
            convolution(narrow, narrow, 3)
            convolution(wide, narrow, 1)
            if block == 0:
                # The shortcut has as many channels as the block's result.
                convolution(wide, num_in, 1)
            num_in = wide
    shapes.extend([(1000, num_in), (1000,)])
    return shapes


def transformer_shapes() -> Shapes:
    """Return the shapes of BERT-base's 109.5 million parameters.

    See Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for
    Language Understanding, NAACL 2019, doi:10.18653/v1/N19-1423. The network has 12
    layers of width 768, a vocabulary of 30,522 words in lower case, and a layer that
    pools the first word.
    """
    width, words, length, kinds = 768, 30522, 512, 2
    shapes: Shapes = [(words, width), (length, width), (kinds, width)]

    def dense(num_out: int, num_in: int) -> None:
        shapes.extend([(num_out, num_in), (num_out,)])

    def normalization() -> None:
        shapes.extend([(width,), (width,)])

    normalization()
    for _ in range(12):
        # Queries, keys and values, and the output projection of the heads.
        for _ in range(4):
            dense(width, width)
        normalization()
        dense(4 * width, width)
        dense(width, 4 * width)
        normalization()
    dense(width, width)
    return shapes


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50_shapes,
    "transformer": transformer_shapes,
}
"""The shapes of each model, by name."""


def gradient_bytes(model: str) -> int:
    """Return the size of a model's gradients in float32."""
    return 4 * sum(map(math.prod, MODELS[model]()))


def size_text(nbytes: float) -> str:
    """Return a size as text for people, such as ``64 KiB``."""
    unit, name = next(
        ((unit, name) for unit, name in _UNITS if nbytes >= unit), (1, "B")
    )
    return f"{nbytes / unit:.3g} {name}"
