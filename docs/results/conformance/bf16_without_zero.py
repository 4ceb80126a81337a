"""Show what DeepSpeed does in bf16 without ZeRO, beside ZeRO 1. DeepSpeed alone, one process, one linear layer.

    MASTER_ADDR=127.0.0.1 MASTER_PORT=29599 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 DS_ACCELERATOR=cpu \
        python docs/results/conformance/bf16_without_zero.py

Nothing should happen to weights before training, and with a learning rate of 0 one batch has one gradient norm.
"""

import logging

import deepspeed
import torch
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False)  # a build of a minute that is not needed
deepspeed.init_distributed("gloo")
print(f"DeepSpeed {deepspeed.__version__}, PyTorch {torch.__version__}")
for stage in (0, 1):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    before = model.weight.detach().clone().bfloat16().float()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    masters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    after = torch.cat([master.flatten() for master in masters])[: before.numel()].view_as(before)
    change = float((after.float() / before).mean() - 1)
    steps = sorted({int(state["step"]) for state in optimizer.state.values() if "step" in state}) or [0]
    print(f"ZeRO {stage}: before training, Adam has taken {steps[0]} steps, its weights changed by {change:+.2%}")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    norms = []
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        norms.append(f"{float(engine.get_global_grad_norm() or float('nan')):.4g}")
    print(f"ZeRO {stage}: gradient norms of one batch three times, learning rate 0: {', '.join(norms)}")
