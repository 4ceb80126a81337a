"""One rank of a side: `python -m testbed.experiments.divergence.worker FOLDER STEPS TRAINER FLAGS`, alone or by a
launcher.

TRAINER is "ours" or "transformers"; FLAGS are those of src/gpt2.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from testbed.config.check import check_command_line


def main(words: list[str]) -> int:
    """Train a few steps as src/gpt2.py does, with a recorder at the strategy. Returns the exit code."""
    folder, steps, trainer = Path(words[0]), int(words[1]), words[2]
    checked, launch = check_command_line(words[3:])

    import gpt2
    from testbed.experiments import peers
    from testbed.experiments.divergence.attach import EnoughSteps, attach
    from testbed.model.gpt2 import attention_kernel
    from testbed.train.ending import RunEnding
    from testbed.train.run import open_run

    with RunEnding(checked.settings, launch) as ending:
        run = open_run(checked, launch, ending)
        assert run is not None, "--resume is refused"
        if trainer == "transformers":
            peers.use_transformers(run)
        attach(run.strategy, run.settings, launch.rank, folder, steps)
        try:
            with attention_kernel(run.settings.model.attention):
                gpt2.do_steps(run)
        except EnoughSteps:
            pass
        run.batches.close()
        run.strategy.close()  # without `finish`, which refuses weights that differ between ranks
    assert ending.exit_code is not None  # leaving the block above sets it
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
