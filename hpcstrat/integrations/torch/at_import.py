"""Changes that the import makes in torch.distributed; nothing to call.

A module of its own, which the reference leaves out where torch is not installed.
"""

from hpcstrat.integrations.torch.environment import use_for_env
from hpcstrat.integrations.torch.process_group import register

__all__: list[str] = []

# Its backend "hpcstrat", and what env:// finds under mpirun.
register()
use_for_env()
