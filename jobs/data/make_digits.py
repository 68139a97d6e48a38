#!/usr/bin/env python3
"""Make digits.h5: handwritten digits with a fixed, stratified split.

Not collective. Needs scikit-learn, which ships the images; training does not. Run it as
``python jobs/data/make_digits.py [FILE]``: it prints the SHA-256 of the file, which is
the same for each run, and which the README in this folder lists.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from sklearn.datasets import load_digits

SPLIT_SEED = 0
TEST_FRACTION = 0.2
ATTRIBUTES = {
    "title": "Optical Recognition of Handwritten Digits (test part of the UCI set)",
    "creators": "E. Alpaydin, C. Kaynak",
    "doi": "10.24432/C50P49",
    "license": "CC BY 4.0",
    "pixels": "8 x 8 blocks in row order; 4 x 4 pixels each, counts of 0 to 16",
    "split_seed": np.int64(SPLIT_SEED),
}


def split_rows(labels: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Split the row numbers into a train and a test part, class by class.

    Not collective.

    Parameters
    ----------
    labels : array of int, shape (n,)
        The class of each row.

    Returns
    -------
    dict of str to array of int
        The rows of ``train`` and of ``test``, each in ascending order; each class
        has the same share of both, rounded to whole rows.
    """
    # Use this older generator, because NumPy's policy (NEP 19) freezes its stream, but
    # not the stream of default_rng. The split must be the same with every NumPy
    # version.
    generator = np.random.RandomState(SPLIT_SEED)
    test = np.zeros(labels.size, dtype=bool)
    for digit in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == digit))
        test[rows[: round(TEST_FRACTION * rows.size)]] = True
    return {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}


def main() -> None:
    """Write the file named on the command line, or digits.h5 beside this script.

    Not collective.
    """
    default = Path(__file__).with_name("digits.h5")
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    digits = load_digits()
    with h5py.File(path, "w", libver="earliest") as file:
        file.attrs.update(ATTRIBUTES)
        for name, rows in split_rows(digits.target).items():
            group = file.create_group(name)
            columns = {"images": digits.data[rows], "labels": digits.target[rows]}
            for column, values in columns.items():
                # Do not store the time of creation, which would change the bytes in
                # every run.
                group.create_dataset(
                    column, data=values.astype(np.uint8), track_times=False
                )
    print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


if __name__ == "__main__":
    main()
