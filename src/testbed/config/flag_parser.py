"""The parser of every program: one-sentence errors, suggestions for misspelt flags, dashes as underscores. No torch."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from testbed.config.environment_variables import check_no_secret
from testbed.config.familiar_names import OF_OTHERS
from testbed.errors import printable

SUGGESTIONS = 2
ALIKE = 0.55  # difflib's ratio from which a flag is suggested
SHORTEST_PART = 4  # of a flag that is suggested because it holds what was typed, as --global_batch_size --batch_size
_NUMBERS = {int: "whole number", float: "number"}


class FlagParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with `--save-every` and `--save_every` as one flag, and errors of one sentence."""

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            check_no_secret("a flag", *words)
        except ValueError as error:
            self.refuse(str(error))
        if not self._subparsers and (unknown := next(filter(self._is_unknown, _before_the_end(words)), None)):
            self.error(self._not_a_flag(unknown))  # first: else what is missing would be said of what is misspelt
        parsed, left = self.parse_known_args(words, namespace)
        if left:
            self.error(self._not_a_flag(next((word for word in left if word.startswith("-")), left[0])))
        return parsed

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        flags = _before_the_end(words)
        return super().parse_known_args([*map(self._as_declared, flags), *words[len(flags) :]], namespace)

    def error(self, message: str) -> NoReturn:
        """Refuse in one sentence, without other names of the flag."""
        said = re.sub(r"^argument (--[\w-]+)(/--[\w-]+)*:", r"\1:", message)
        self.refuse(f"{said}; --help lists every flag")

    def refuse(self, sentence: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, printable(f"{self.prog}: error: {sentence}", kept="\n\t") + "\n")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        if action.type not in _NUMBERS:
            return super()._get_value(action, text)
        try:
            return action.type(text)
        except ValueError:
            raise argparse.ArgumentError(action, f"{text!r} is not a {_NUMBERS[action.type]}") from None

    def _as_declared(self, word: str) -> str:
        """Return a flag in its declared spelling; any other word as it is."""
        matches = self._flags_like(word)
        name, has_value, value = word.partition("=")
        return f"{matches[0]}{has_value}{value}" if len(matches) == 1 and name not in matches else word

    def _is_unknown(self, word: str) -> bool:
        return word.startswith("--") and " " not in word and not self._flags_like(word)

    def _flags_like(self, word: str) -> list[str]:
        """Return the declared flags that a word may mean: itself, or all that it abbreviates."""
        if not word.startswith("--"):
            return []
        name = _plain(word.partition("=")[0])
        flags = {flag: _plain(flag) for flag in self._option_string_actions if flag.startswith("--")}
        same = [flag for flag, plain in flags.items() if plain == name]
        return same or [flag for flag, plain in flags.items() if self.allow_abbrev and plain.startswith(name)]

    def _not_a_flag(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"{word!r} stands there without a flag"
        flags = {_plain(flag).strip("-"): flag for flag in self._visible_flags()}
        typed = _plain(name).strip("-")
        same = OF_OTHERS.get(typed.replace("-", "_"), "")
        if same.partition(" ")[0] in flags.values():
            return f"{name} is not a flag (did you mean {same}?)"
        longer = [flag for flag in flags if len(typed) >= SHORTEST_PART and typed in flag]
        close = difflib.get_close_matches(typed, longer or flags, n=SUGGESTIONS, cutoff=0 if longer else ALIKE)
        meant = " or ".join(flags[each] for each in close)
        return f"{name} is not a flag" + (f" (did you mean {meant}?)" if meant else "")

    def _visible_flags(self) -> list[str]:
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                actions += [each for parser in action.choices.values() for each in parser._actions]
        return [flag for action in actions if action.help != argparse.SUPPRESS for flag in action.option_strings]


def _before_the_end(words: Sequence[str]) -> list[str]:
    """Return the words up to a bare `--`."""
    return list(words[: words.index("--")] if "--" in words else words)


def _plain(flag: str) -> str:
    return flag.replace("_", "-")
