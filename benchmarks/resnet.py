"""The arrays of a network that many benchmarks of gradients use."""

from __future__ import annotations

import math

__all__ = ["resnet50_shapes"]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters.

    Not collective. He et al., Deep Residual Learning for Image Recognition, CVPR 2016,
    doi:10.1109/CVPR.2016.90, Table 1; as usual with a stride in the 3 x 3 convolutions,
    which changes no shape, and 1,000 classes.

    Returns
    -------
    list of tuple of int
        In the order in which they act; of each normalization, its scale and shift.
    """
    shapes: list[tuple[int, ...]] = []

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
    assert len(shapes) == 161
    assert sum(map(math.prod, shapes)) == 25_557_032
    return shapes
