"""Set how OpenMP's threads wait for each other. libgomp, of PyTorch's CPU build, reads it as it loads. No torch."""

from __future__ import annotations

import os

# GNU's libgomp. At the end of every parallel region a thread looks this often for the others before it sleeps.
SPINS = "10000"
USER_OVERRIDES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_gomp_spinning() -> None:
    """Let threads that wait for each other go to sleep early, unless the environment says how they shall wait.

    libgomp's own 300,000 looks take milliseconds. Beside other work they use up the time slices that the other threads
    need, so steps take longer. docs/measuring.md has the numbers.
    """
    if not any(os.environ.get(name) for name in USER_OVERRIDES):
        os.environ["GOMP_SPINCOUNT"] = SPINS
