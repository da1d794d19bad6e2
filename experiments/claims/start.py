"""One of two ranks whose weights differ until DDP broadcasts rank 0's; rank 0 prints the largest differences."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def largest_difference(model: nn.Module) -> float:
    """The largest difference of any weight between the ranks."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    highest, lowest = flat.clone(), flat.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return (highest - lowest).max().item()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    before = largest_difference(model)
    DistributedDataParallel(model)
    after = largest_difference(model)
    if dist.get_rank() == 0:
        print(json.dumps({"before": before, "after": after}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
