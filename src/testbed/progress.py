"""What rank 0 tells a person: a bar on a terminal, a line now and then elsewhere. Programs read the JSON instead."""

from __future__ import annotations

import contextlib
import sys

from tqdm import tqdm

from testbed.error_text import printable
from testbed.settings import RunSettings


class Progress:
    """Progress over optimizer steps. Silent on every rank but 0."""

    def __init__(self, settings: RunSettings, first_step: int, is_speaking: bool):
        self.settings = settings
        self.is_speaking = is_speaking
        has_bar = is_speaking and sys.stderr.isatty() and not settings.profile_mode
        self.bar = None
        if has_bar:
            self.bar = tqdm(
                total=settings.last_step, initial=first_step, desc=settings.run_type, unit="step", dynamic_ncols=True
            )

    def say(self, message: str) -> None:
        """Print a line, above the bar where there is one. A run goes on when nobody reads any more (a closed terminal,
        the end of a pipe)."""
        if self.is_speaking:
            with contextlib.suppress(OSError):
                tqdm.write(printable(message, kept="\n\t"), file=sys.stdout)
                sys.stdout.flush()

    def show_step(self, step: int, loss: float, learning_rate: float, step_time_s: float) -> None:
        tokens_per_s = self.settings.tokens_per_step / step_time_s
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            self.bar.update()
        elif step == 1 or step % self.settings.steps_per_print == 0 or step == self.settings.last_step:
            self.say(
                f"step {step:>5}/{self.settings.last_step}  loss {loss:.4f}  lr {learning_rate:.2e}  "
                f"{step_time_s:.3f} s  {tokens_per_s:,.0f} tokens/s"
            )

    def batches(self, number: int, what: str) -> tqdm:
        """A bar over `number` batches that leaves nothing behind."""
        return tqdm(range(number), desc=what, unit="batch", leave=False, disable=self.bar is None)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
