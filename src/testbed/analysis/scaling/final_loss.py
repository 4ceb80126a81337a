"""How much sooner one arm is where another one ends: seed by seed, to the loss at which its reference run ended.

A target that is alike for all seeds is one that the unluckiest reference run just reaches, and the others pass on the
way; what a recipe saves against "train to the end" is told only by each run's own last loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from testbed.analysis.document import markdown
from testbed.analysis.document.model import Document, Section, Table, Text
from testbed.analysis.document.words import BRACKETS, Number
from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.load import Point, Run
from testbed.analysis.scaling.time_to_loss import TimeToLoss, time_to_loss
from testbed.analysis.statistics import median_interval
from testbed.errors import InputError


@dataclass(frozen=True)
class SeedPair:
    """Two runs of one seed: where the reference ended, and when the other was there; None: never."""

    seed: int
    ended: Point
    reached: TimeToLoss | None

    @property
    def share_of_steps(self) -> float | None:
        """Steps that the other needed, as a share of the reference's; of tokens too, as their steps hold as many."""
        if self.reached is None:
            return None
        assert self.reached.step is not None and self.ended.step is not None
        return self.reached.step / self.ended.step

    @property
    def share_of_time(self) -> float | None:
        """The same of the sums of step times, so that dearer steps count."""
        if self.reached is None:
            return None
        assert self.reached.train_time_s is not None and self.ended.train_time_s is not None
        return self.reached.train_time_s / self.ended.train_time_s


def pairs_of_seeds(runs: Sequence[Run], references: Sequence[Run]) -> list[SeedPair]:
    """Return one pair per seed, in the order of the seeds.

    Raises:
        InputError: one sentence: a side lacks a seed or has it twice, a run did not validate, or the runs of a pair do
            not learn the same task in steps of as many tokens.
    """
    by_seed: list[dict[Any, Run]] = [{run.work.get("seed"): run for run in side} for side in (runs, references)]
    if any(len(found) != len(side) or None in found for found, side in zip(by_seed, (runs, references), strict=True)):
        raise InputError("a seed stands twice on one side, or is not recorded; each seed makes one pair")
    if by_seed[0].keys() != by_seed[1].keys():
        raise InputError(
            f"the sides have other seeds, {sorted(by_seed[0])} and {sorted(by_seed[1])}; give runs of the same ones"
        )
    return [_pair(seed, by_seed[0][seed], by_seed[1][seed]) for seed in sorted(by_seed[0])]


def _pair(seed: int, run: Run, reference: Run) -> SeedPair:
    pair = (run, reference)
    batch = [item for item in differing_work(pair) if item.field == "global_batch_size"]
    if unequal := [*differing_work(pair, "time_to_loss"), *batch]:
        words = "; ".join(f"{item.field} ({' and '.join(item.values)})" for item in unequal)
        raise InputError(f"{run.path} and {reference.path} differ in {words}")
    for each in (run, reference):
        if not each.validation_losses or None in (
            each.validation_losses[-1].step,
            each.validation_losses[-1].train_time_s,
        ):
            raise InputError(f"{each.path} records no validation loss with its step and time (--eval_every STEPS)")
    ended = reference.validation_losses[-1]
    return SeedPair(seed, ended, time_to_loss(run, ended.loss))


def final_loss_table(pairs: Sequence[SeedPair], name: str, reference: str) -> str:
    """Return Markdown: a row per seed, and the medians of the shares with 95 % intervals where every run got there."""
    header = ["seed", f"{reference} ends at", "after steps", f"{name} is there after"]
    header += ["share of the tokens", "share of the time"]
    rows = []
    for pair in pairs:
        row = [str(pair.seed), f"{pair.ended.loss:.4f}", f"{pair.ended.step:,.0f}"]
        found = ["never", "", ""]
        if pair.reached is not None:
            at_most = "at most " if pair.reached.is_upper_bound else ""  # nobody looked before
            found = [f"{pair.reached.step:,.0f}", f"{pair.share_of_steps:.3f}", f"{pair.share_of_time:.3f}"]
            found = [at_most + text for text in found]
        rows.append(row + found)
    if any(pair.reached is None for pair in pairs):
        outcome: Text = f"{name} did not get there in every run, so no median is claimed."
    else:
        of_steps = [pair.share_of_steps for pair in pairs if pair.share_of_steps is not None]
        of_time = [pair.share_of_time for pair in pairs if pair.share_of_time is not None]
        tokens, time = (
            Number(median, ".3f", low, high, interval=BRACKETS)
            for median, low, high in (median_interval(of_steps), median_interval(of_time))
        )
        outcome = f"Median over {len(pairs)} seeds: ", tokens, " of the tokens, ", time, " of the time."
    return markdown.text(Document(sections=[Section(blocks=[Table(header, rows)])], notes=[[outcome]]))
