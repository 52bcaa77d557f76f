"""Stand-in: importing it registers the process group. HCCL sends and receives; so does gloo."""

import torch.distributed as dist

dist.Backend.register_backend(
    "hccl", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["cpu"]
)
