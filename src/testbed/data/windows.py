"""Cut a token file into windows, the rows of a batch. No torch.

Text: window i holds tokens [i x T, i x T + T], T inputs and the same shifted by one as targets.

Pairs (a token file with targets): one pair per window, from its first token, filled up with end-of-text that is no
target. Pairs are not packed together: attention would see the pairs before, and positions would not begin at 0, as they
do when the model is given a prompt alone. A pair of more than T + 1 tokens has no window and is left out: cut into
windows it would train a reference without its prompt, cut at its end a reference that never ends.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from testbed.data.token_file import TokenFile


@dataclass(frozen=True)
class Windows:
    """The windows of a token file at a sequence length T, numbered from 0 in the order of the file."""

    token_file: TokenFile
    seq_length: int

    def __len__(self) -> int:
        if self.token_file.targets is None:
            return max(0, (len(self.token_file.tokens) - 1) // self.seq_length)
        return len(self._pairs)

    @functools.cached_property
    def _pairs(self) -> np.ndarray:
        """(pairs that fit, 3): where each begins, where it ends, and its number of targets."""
        assert self.token_file.targets is not None
        starts, ends = self.token_file.documents
        num_targets = np.add.reduceat(self.token_file.targets[:], starts, dtype=np.int64)
        return np.stack([starts, ends, num_targets], axis=1)[ends - starts <= self.seq_length + 1]

    def num_target_tokens(self, windows: np.ndarray | None = None) -> int:
        """Return the number of targets in these windows, or in all of them."""
        if self.token_file.targets is None:
            return (len(self) if windows is None else len(windows)) * self.seq_length
        return int((self._pairs if windows is None else self._pairs[windows])[:, 2].sum())

    def read(self, windows: Sequence[int] | np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Read windows as the rows of a batch; rows beyond them, up to `num_rows`, carry no targets.

        Returns:
            (num_rows, T + 1) int64 token ids, of which [:, :-1] are inputs and [:, 1:] what they predict, and
            (num_rows, T) bool: which of those predictions are targets. None, of text: all those of the windows are.

        Raises:
            FileChanged: the file no longer holds what it held (`TokenFile.check_unchanged`).
        """
        rows = self._read(windows, num_rows)
        while self.token_file.check_unchanged():
            rows = self._read(windows, num_rows)
        return rows

    def _read(self, windows: Sequence[int] | np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray | None]:
        length, file = self.seq_length, self.token_file
        if file.targets is None:
            tokens = np.zeros((num_rows, length + 1), dtype=np.int64)
            for row, window in enumerate(windows):
                tokens[row] = file.tokens[window * length : window * length + length + 1]
            return tokens, None
        assert file.end_of_text_id is not None, "a file of pairs has a sidecar, which names it"
        tokens = np.full((num_rows, length + 1), file.end_of_text_id, dtype=np.int64)
        is_target = np.zeros((num_rows, length), dtype=bool)
        for row, window in enumerate(windows):
            start, end, _ = self._pairs[window]
            tokens[row, : end - start] = file.tokens[start:end]
            is_target[row, : end - start - 1] = file.targets[start + 1 : end]
        return tokens, is_target


def num_windows(token_file: TokenFile, seq_length: int) -> int:
    """Return the number of windows of a token file at a sequence length."""
    return len(Windows(token_file, seq_length))


def longest_pair(token_file: TokenFile) -> int:
    """Return the --seq_length that holds the longest pair of a file of pairs; 0 where it has none."""
    starts, ends = token_file.documents
    return int((ends - starts).max()) - 1 if len(ends) else 0
