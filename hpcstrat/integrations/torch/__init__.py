"""PyTorch's modules, optimizers and data loaders on replicas."""

from hpcstrat.integrations.frameworks import require

# Check before the import, so that a missing or old torch is reported in one sentence.
require("torch", "2.4")

# ruff: noqa: E402
import hpcstrat.integrations.torch.at_import  # noqa: F401
from hpcstrat.integrations.torch import inside
from hpcstrat.integrations.torch.batch_norm import SyncBatchNorm
from hpcstrat.integrations.torch.environment import init_env
from hpcstrat.integrations.torch.meshes import device_mesh
from hpcstrat.integrations.torch.module_state import state
from hpcstrat.integrations.torch.replication import global_mean, no_sync, replicate
from hpcstrat.integrations.torch.sampling import GlobalBatchSampler

__all__ = [
    "GlobalBatchSampler",
    "SyncBatchNorm",
    "device_mesh",
    "global_mean",
    "init_env",
    "inside",
    "no_sync",
    "replicate",
    "state",
]
