"""Which axes of a mesh a group of ranks lies along."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from testbed.distributed.mesh import MeshSizes

AXES = ("stages", "copies", "shards", "context", "tensor")


@given(st.tuples(*(st.integers(1, 3) for _ in AXES)), st.sets(st.sampled_from(AXES)))
def test_a_groups_axes_are_those_along_which_its_ranks_differ(lengths, along):
    """numpy lays the ranks out as Axes does. A group has all ranks of some axes, and one of the others."""
    stages, copies, shards, context, tensor = lengths
    shard = shards * context if shards > 1 else 1
    mesh = MeshSizes(copies * shards, stages, tensor, shard, context)
    ranks = np.arange(mesh.num_ranks).reshape(lengths)
    named = " x ".join(axis for axis, length in zip(AXES, lengths, strict=True) if axis in along and length > 1)
    places = [range(length) if axis not in along else [slice(None)] for axis, length in zip(AXES, lengths, strict=True)]
    for place in itertools.product(*places):
        assert mesh.axes_of(np.ravel(ranks[place]).tolist()) == named
