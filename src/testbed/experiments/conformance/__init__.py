"""Train one small model under releases of DeepSpeed and PyTorch, and say which releases train the same one."""

RANKS, STEPS, ROWS = 2, 6, 16  # of every run; rows of a global batch
RATE, WARMUP_STEPS = 0.01, 2  # the learning rate rises in equal steps
