"""The configuration that DeepSpeed prints into a log.

Lines of https://github.com/XXXG00W0/hpml_project, logs/gpt2-deepspeed_25809_2GPU.out, commit 22fdb1c (MIT licence),
with other values filled in. The lines between them, and the end of the last, are left out.
"""

LINES = """\
[2024-12-08 17:04:23,430] [INFO] [stage_1_and_2.py:151:__init__] CPU Offload: {offload}
[2024-12-08 17:04:25,138] [INFO] [config.py:1003:print]   bfloat16_enabled ............. False
[2024-12-08 17:04:25,138] [INFO] [config.py:1003:print]   bfloat16_immediate_grad_update  False
[2024-12-08 17:04:25,138] [INFO] [config.py:1003:print]   fp16_enabled ................. {fp16}
[2024-12-08 17:04:25,139] [INFO] [config.py:1003:print]   train_batch_size ............. {batch}
[2024-12-08 17:04:25,139] [INFO] [config.py:1003:print]   train_micro_batch_size_per_gpu  {micro_batch}
[2024-12-08 17:04:25,139] [INFO] [config.py:1003:print]   wall_clock_breakdown ......... {breakdown}
[2024-12-08 17:04:25,139] [INFO] [config.py:1003:print]   world_size ................... {ranks}
[2024-12-08 17:04:25,139] [INFO] [config.py:1003:print]   zero_config .................. stage=2 \
contiguous_gradients=True offload_param=None offload_optimizer={offload_config} sub_group_size=1000000000
[2024-12-08 17:04:25,139] [INFO] [config.py:1003:print]   zero_optimization_stage ...... 2
"""
TO_CPU = "DeepSpeedZeroOffloadOptimizerConfig(device='cpu', nvme_path=None, buffer_count=4, pin_memory=True)"


def deepspeed_lines(
    ranks: int, batch: int = 8, *, is_offloaded: bool = True, fp16: bool = False, breakdown: bool = False
) -> str:
    """The real lines for `ranks` ranks and a global batch of 8."""
    return LINES.format(
        ranks=ranks, batch=batch, micro_batch=batch // ranks, fp16=fp16, breakdown=breakdown, offload=is_offloaded,
        offload_config=TO_CPU if is_offloaded else None,
    )  # fmt: skip
