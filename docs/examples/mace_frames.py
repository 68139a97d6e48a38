"""Write small data for MACE: copper cells with random displacements, by ASE's EMT.

python mace_frames.py      # writes train.xyz and valid.xyz
"""

from __future__ import annotations

import numpy as np
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.io import write


def main() -> None:
    """Write 16 frames for training, and 4 for validation."""
    random = np.random.default_rng(1)
    frames = []
    for _ in range(20):
        atoms = bulk("Cu", cubic=True)
        atoms.positions += random.normal(0, 0.1, atoms.positions.shape)
        calculated = atoms.copy()
        calculated.calc = EMT()
        atoms.info["REF_energy"] = calculated.get_potential_energy()
        atoms.arrays["REF_forces"] = calculated.get_forces()
        frames.append(atoms)
    write("train.xyz", frames[:16])
    write("valid.xyz", frames[16:])


if __name__ == "__main__":
    main()
