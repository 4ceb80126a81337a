"""The benchmark of a GPU machine, scripts/more/benchmark_gpu.py. No torch.

`table.py` lists the runs, `steps.py` makes the commands of one machine from it, `parts.py` splits them into parts of
minutes, `record.py` keeps what is done, `running.py` runs it, `summary.py` compares and sums up. `packages.py` lists
what the machine lacks.
"""
