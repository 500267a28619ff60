"""One of two processes that train together; a module of its own, since each imports it anew."""

import torch
import torch.distributed as dist
from torch import nn

from scripts.training import fit
from scripts.training.fit import Fit


def train(rank, folder):
    """Some steps of a line that each process begins elsewhere; each keeps what it ends with."""
    torch.set_num_threads(1)
    store = f"file://{folder}/processes"
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    torch.manual_seed(rank)  # as after a stage, each with a source of chance of its own
    line = nn.Linear(3, 1)

    def loss(step):
        _, chosen = fit.pick(step, 5, torch.arange(50), batch=4)
        return line(chosen.float().view(-1, 1).expand(-1, 3)).square().mean()

    Fit("line", {"line": line}, (1e-2,), loss, 3, 0.5, {}, lambda _: None).run(folder)
    torch.save(line.state_dict(), folder / f"end-{rank}.pt")
    dist.destroy_process_group()
