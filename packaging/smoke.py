"""Test an installed hpcstrat: versions, kernel, types, and a training on two ranks.

Run it outside of the repository, with the installed file as its argument.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

_PROGRAM = """
import numpy as np
import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = hs.Variable(np.zeros(3), name="weights")
    optimizer = hs.optimizers.SGD(0.5)
x = np.eye(3)
def step(batch):
    optimizer.apply_gradients([(batch.T @ (batch @ weights.value() - 1.0), weights)])
manager = hs.CheckpointManager("checkpoints", weights=weights, optimizer=optimizer)
for _ in range(20):
    for batch in strategy.experimental_distribute_dataset(hs.Dataset(x, batch_size=3)):
        strategy.run(step, args=(batch,))
manager.save()
assert manager.restore_or_initialize() is not None
np.testing.assert_allclose(weights.numpy(), np.ones(3), atol=1e-3)
hs.print_once("trained on", strategy.num_replicas_in_sync)
"""


def output_of(*command: str, **options: str) -> str:
    """Return the output of a command; raise if it fails."""
    environment = {**os.environ, **options}
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout


def main() -> None:
    """Test the hpcstrat that is installed in the environment of this Python."""
    file = Path(sys.argv[1]).name
    version = importlib.metadata.version("hpcstrat")
    assert f"hpcstrat-{version}" in file, (version, file)
    package = importlib.resources.files("hpcstrat")
    assert "site-packages" in str(package), package
    assert package.joinpath("py.typed").is_file()
    # For an sdist, the kernel was compiled on this machine.
    has_kernel = "none-any" not in file
    native = package.joinpath("engine", "native")
    for name in ("kernel.abi3.so", "reader.abi3.so"):
        assert native.joinpath(name).is_file() == has_kernel, (name, file)
    bin_ = Path(sys.executable).parent
    assert version in output_of(str(bin_ / "hpcstrat"), "--version")
    assert version in output_of(str(bin_ / "hpcstrat"), "info")
    launcher = [str(bin_ / "mpirun"), "--oversubscribe", "--bind-to", "none", "-n", "2"]
    for size, words in ((1, []), (2, launcher)):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            Path("program.py").write_text(_PROGRAM)
            said = output_of(
                *words,
                sys.executable,
                "program.py",
                OMPI_ALLOW_RUN_AS_ROOT="1",
                OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            )
            # Ignore further lines, which libraries below MPI may print.
            assert f"trained on {size}" in said.splitlines(), said
            os.chdir("/")
    print(f"ok  Python {platform.python_version()}  {file}")


if __name__ == "__main__":
    main()
