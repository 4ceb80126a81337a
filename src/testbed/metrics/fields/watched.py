"""Fields of --watch_collectives: where each rank's time went, without clocks that agree."""

from typing import Annotated, TypedDict

from msgspec import Meta

from testbed.metrics.fields.types import Amount, Count, Name, OneOrMore, Positive


class WatchedSteps(TypedDict):
    step: Annotated[Positive, "first step of the window, and number of steps that its means are of"]
    num_steps: Positive
    per_rank_own_data_wait_s: Annotated[
        OneOrMore[Amount],
        "each rank's own time of a phase: without that in which it was blocked in collectives, and without garbage "
        "collection",
    ]
    per_rank_own_forward_s: OneOrMore[Amount]
    per_rank_own_backward_s: OneOrMore[Amount]
    per_rank_own_synchronise_s: OneOrMore[Amount]
    per_rank_own_optimizer_s: OneOrMore[Amount]
    per_rank_own_between_s: Annotated[
        OneOrMore[Amount], "own time from the end of the step before: rows, writing, checkpoints, validation"
    ]
    per_rank_own_elsewhere_s: Annotated[
        OneOrMore[Amount], "own time of the step in none of these phases, as between the passes of a pipeline"
    ]
    per_rank_cpu_data_wait_s: Annotated[OneOrMore[Amount], "the part of own time in which the thread computed"]
    per_rank_cpu_forward_s: OneOrMore[Amount]
    per_rank_cpu_backward_s: OneOrMore[Amount]
    per_rank_cpu_synchronise_s: OneOrMore[Amount]
    per_rank_cpu_optimizer_s: OneOrMore[Amount]
    per_rank_queued_data_wait_s: Annotated[
        OneOrMore[Amount],
        "the part of own time in which the thread was ready to run and its core did something else; 0 where the system "
        "does not tell it",
    ]
    per_rank_queued_forward_s: OneOrMore[Amount]
    per_rank_queued_backward_s: OneOrMore[Amount]
    per_rank_queued_synchronise_s: OneOrMore[Amount]
    per_rank_queued_optimizer_s: OneOrMore[Amount]
    per_rank_queued_between_s: OneOrMore[Amount]
    per_rank_queued_elsewhere_s: OneOrMore[Amount]
    per_rank_calls_s: Annotated[
        OneOrMore[Amount], "the part of own time in which it called collectives, without queued time"
    ]
    per_rank_blocked_s: Annotated[OneOrMore[Amount], "of the step, blocked in collectives"]
    per_rank_gc_s: Annotated[OneOrMore[Amount], "Python's garbage collection, between the steps too"]


class WatchedCollective(TypedDict):
    name: Name
    axes: Annotated[str, 'of the mesh, along which the ranks of its group differ: "shards x context"; "": one rank']
    phase: Annotated[Name, '"between": between the steps; "step": in none of the phases; "start_up"']
    num: Annotated[
        Count, "calls in the watched steps, warm-up included, and in the start-up; bytes of inputs and outputs"
    ]
    bytes: Count
    call_s: Annotated[Amount, "in the calls themselves; then blocked until they were over, or something else began"]
    blocked_s: Amount


class WatchedRank(TypedDict):
    rank: Count
    own_start_up_s: Annotated[Amount, "from the program's start to the first step, without waiting for other ranks"]
    num_steps: Annotated[Count, "steps that were watched, warm-up included"]
    collectives: list[WatchedCollective]


class Watched(TypedDict):
    per_rank: list[WatchedRank]


class TimedCollectives(TypedDict):
    has_smaller_groups: Annotated[bool, "in the steps some of the ranks exchanged too, or that is not known"]
    num_steps: Annotated[Count, "measured steps of which all ranks had timed their collectives; 0: too few"]
    per_rank_s: Annotated[
        list[OneOrMore[Amount]],
        Meta(max_length=10),
        "seconds of a step for which each rank's GPU waited for the one that came last, in the collective of all ranks "
        "in which it waited longest: means over ten windows of these steps",
    ]
