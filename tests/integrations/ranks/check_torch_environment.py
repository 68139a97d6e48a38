"""The port at which the ranks of torch's default group rendezvous."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcstrat.integrations.torch.process_group import BACKEND

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_group_is_made_again_where_the_last_still_listens(job: Any) -> None:
    for _ in range(2):
        dist.init_process_group(BACKEND)
        own = torch.ones(1)
        dist.all_reduce(own)
        assert own == job.size
        # The store listens as long as rank 0 keeps this reference.
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        if job.rank == 0:
            time.sleep(0.5)
        del store
