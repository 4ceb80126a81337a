"""Compare gradient norms under accumulation with plain PyTorch's, in fp32. DeepSpeed alone, one process, one layer.

    MASTER_ADDR=127.0.0.1 MASTER_PORT=29598 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 DS_ACCELERATOR=cpu \
        python docs/results/conformance/accumulated_gradients.py

Two micro batches a step, three steps, learning rate 0: the same norm in each step, and the same as PyTorch's.
"""

import logging

import deepspeed
import torch
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False)  # a build of a minute that is not needed
deepspeed.init_distributed("gloo")
print(f"DeepSpeed {deepspeed.__version__}, PyTorch {torch.__version__}")
batches = torch.arange(8.0).view(2, 1, 4)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


model = build()
for batch in batches:
    (model(batch).square().mean() / 2).backward()
norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
print(f"PyTorch: {norm:.5g}")
for stage in (1, 2, 3):
    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    norms = []
    for _ in range(3):
        for batch in batches:
            engine.backward(engine(batch).square().mean())
            engine.step()
        norms.append(f"{float(engine.get_global_grad_norm()):.5g}")
    print(f"ZeRO {stage}: {', '.join(norms)}")
