"""Show that DeepSpeed takes an optimizer step before training: bf16 without ZeRO. DeepSpeed alone, one process.

    MASTER_ADDR=127.0.0.1 MASTER_PORT=29599 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 DS_ACCELERATOR=cpu \
        python docs/results/conformance/steps_before_training.py
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
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    masters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    after = torch.cat([master.flatten() for master in masters])[: before.numel()].view_as(before)
    steps = sorted({int(state["step"]) for state in optimizer.state.values() if "step" in state})
    change = float((after.float() / before).mean() - 1)
    print(f"ZeRO {stage}: Adam has taken steps {steps} before training; its fp32 weights changed by {change:+.2%}")
