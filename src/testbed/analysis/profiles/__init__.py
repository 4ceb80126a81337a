"""Profiles as one summary: Nsight's tables and exports, torch.profiler traces, and what two of them differ in."""
