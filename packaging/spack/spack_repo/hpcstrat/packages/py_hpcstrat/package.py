# Recipe for Spack 1.0 or newer, which builds the committed state of this clone.
#   spack repo add packaging/spack/spack_repo/hpcstrat
#   spack install py-hpcstrat ^openmpi   # or ^cray-mpich, ^intel-oneapi-mpi, ^mpich

from pathlib import Path

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcstrat(PythonPackage):
    """Distribution strategies (replicas, mirrored variables, sync training) for MPI
    clusters, in NumPy or CuPy arrays."""

    # The clone is the source, because no archive is published.
    git = Path(__file__).resolve().parents[6].as_uri()

    license("Apache-2.0")

    version("0.2.0", branch="main")

    variant("plot", default=False, description="Draw curves and timelines")

    depends_on("c", type="build")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling@1.26:", type="build")

    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-cloudpickle@3.0:", type=("build", "run"))
    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-numpy@2.0:", type=("build", "run"))
    depends_on("py-optree@0.13:", type=("build", "run"))
    depends_on("py-rich@13.0:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.1:", type=("build", "run"))
    depends_on("py-xxhash@3.1:", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", type=("build", "run"), when="+plot")
