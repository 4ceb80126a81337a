"""Share cases among the tests of automatic choices."""

from __future__ import annotations

import torch

from testbed.distributed.launch import Launch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


ALONE = Launch(0, 1, 0, 1)
