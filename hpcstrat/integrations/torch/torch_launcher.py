"""Runs a program of torch.distributed over MPI, for ``hpcstrat torch``.

Usage: ``python -m hpcstrat.integrations.torch.torch_launcher OPTIONS KIND PROGRAM
[ARGS]``. ``OPTIONS`` is the text of a JSON object with the fields of `LauncherOptions`;
``KIND`` is ``script`` or ``module``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from hpcstrat.integrations.frameworks import run_program
from hpcstrat.integrations.torch import on_cpus, program_groups
from hpcstrat.integrations.torch.environment import VARIABLES, init_env
from hpcstrat.integrations.torch.error_notes import notes
from hpcstrat.integrations.torch.launcher_variables import change_variables
from hpcstrat.integrations.torch.replacements import tell
from hpcstrat.integrations.torch.separate_ranks import refuse_separate_ranks

__all__ = ["LauncherOptions", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOptions:
    """The options of ``hpcstrat torch``, see its help."""

    replace: tuple[str, ...] = ()
    make_group: bool = False
    on_cpus: bool = False
    hide: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    separate: bool = False
    explain: bool = False


def prepare(options: LauncherOptions) -> None:
    """Prepare torch and the environment for a program.

    Collective over all ranks of the job.
    """
    before = dict(os.environ)
    init_env()
    if options.explain:
        _explain(before)
    change_variables(options.hide, options.set, explains=options.explain)
    on_cpus.explain_cuda()
    program_groups.watch_creation()
    if options.replace:
        program_groups.replace_backends(options.replace)
    if options.make_group:
        program_groups.make_group(options.replace)
    if options.on_cpus:
        on_cpus.ignore_devices()
        on_cpus.synchronize_norms()
    if not options.separate:
        refuse_separate_ranks()


def _explain(before: dict[str, str]) -> None:
    """Print the values of torchrun's variables that `init_env` has set or kept."""
    pairs = [f"{name}={os.environ[name]}" for name in VARIABLES]
    kept = [name for name in VARIABLES if name in before]
    tell(f"set {', '.join(pairs)}")
    if kept:
        tell(f"kept the values that were set before of {', '.join(kept)}")


def _main() -> None:
    text, kind, program, *words = sys.argv[1:]
    given: dict[str, Any] = json.loads(text)
    prepare(LauncherOptions(**given))
    try:
        run_program(kind, program, words)
    except Exception as error:
        for note in notes(error):
            error.add_note(note)
        raise


if __name__ == "__main__":
    _main()
