"""Build the compiled modules as the package is built, where a C compiler is there.

A build hook of hatchling. Without a compiler, or Python's headers, the package is built
without the kernel, and NumPy does its work. ``CC`` names another compiler;
``HPCSTRAT_NATIVE=0`` leaves the kernel out.
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
    # Sums and steps have the bits of NumPy's; arrays come in any type; nobody asks for
    # the errno of a square root, which would keep a loop from vectors.
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"),
]


class BuildKernel(BuildHookInterface):
    """Compiles the files of ``hpcstrat/engine/native`` for any Python from 3.11 on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the wheel for this kind of machine."""
        del version
        folder = Path(self.root, "hpcstrat", "engine", "native")
        for name in ("kernel", "reader", "update_rules"):
            made = folder / f"{name}.abi3.so"
            problem = compile_kernel(folder / f"{name}.c", made)
            if problem:
                # One from before would be of other sources.
                made.unlink(missing_ok=True)
                said = f"hpcstrat is built without its {name}: {problem}"
                self.app.display_warning(said)
                continue
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{_platform_tag()}"
            build_data["artifacts"].append(f"/hpcstrat/engine/native/{made.name}")


def compile_kernel(source: Path, made: Path) -> str:
    """Compile a file of C; return why that could not be, or nothing."""
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
    # Beside its place first: another process may have loaded what is there.
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
