"""Build hook that compiles the C modules of the package, if there is a C compiler.

A build hook of hatchling. Without a compiler, or without Python's headers, the package
is built without the kernel, and NumPy is used instead. ``CC`` names another compiler;
``HPCSTRAT_NATIVE=0`` omits the kernel.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = [
    *("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
    # Flags: results must equal NumPy's bit by bit; arrays of any type may alias; and
    # square roots do not set errno, which would prevent vectorized loops.
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"),
]


class BuildKernel(BuildHookInterface):
    """Compiles the files of ``hpcstrat/engine/native`` for Python 3.11 and later."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and set the wheel's platform tag."""
        del version
        folder = Path(self.root, "hpcstrat", "engine", "native")
        for name in ("kernel", "reader", "update_rules", "last_line", "hashed_copy"):
            made = folder / f"{name}.abi3.so"
            problem = compile_kernel(folder / f"{name}.c", made)
            if problem:
                # Remove an earlier build, which may have been compiled from other
                # sources.
                made.unlink(missing_ok=True)
                said = f"hpcstrat is built without its {name}: {problem}"
                self.app.display_warning(said)
                continue
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{_platform_tag()}"
            build_data["artifacts"].append(f"/hpcstrat/engine/native/{made.name}")


def compile_kernel(source: Path, made: Path) -> str:
    """Compile a C file; return the reason of a failure, or an empty text."""
    if os.environ.get("HPCSTRAT_NATIVE", "").strip() == "0":
        return "HPCSTRAT_NATIVE is 0"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler {compiler[0]}"
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        return f"there is no Python.h in {headers}"
    try:
        import numpy as np
    except ImportError as error:
        return f"NumPy's headers are missing: {error}"
    # Compile to a temporary file first, because a process may have loaded the old
    # module.
    beside = made.with_name(f"{made.name}.{os.getpid()}")
    includes = f"-I{headers}", "-isystem", np.get_include()
    command = [*compiler, *FLAGS, *includes, str(source), "-o", str(beside)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        beside.unlink(missing_ok=True)
        return done.stderr.strip()[-500:] or f"{compiler[0]} failed"
    beside.replace(made)
    return ""


def _platform_tag() -> str:
    tag = sysconfig.get_platform() or f"linux-{platform.machine()}"
    return tag.replace("-", "_").replace(".", "_")
