"""Make docs/flags.md from the table of flags, for scripts/maintain/update_docs.py. No torch."""

from __future__ import annotations

import argparse
import re
from enum import Enum

from testbed.config.flag import Filled, Flag, Kind, Resume
from testbed.config.flags import build_parser
from testbed.config.run_types import STRATEGIES
from testbed.config.table import FLAGS, GROUPS

_HEAD = """# Flags of `src/gpt2.py`

Made by `python scripts/maintain/update_docs.py` from [training_flags.py](../src/testbed/config/training_flags.py) and
[system_flags.py](../src/testbed/config/system_flags.py). A new flag is one row there, and code reads its value from
`settings.<group>.<flag>` (`settings.model.size` for `--model`, `settings.optimizer.name` for `--optimizer`). Dashes and
underscores are the same: `--save-every` is `--save_every`.

**Kind**: how a comparison treats a flag in which two runs differ:

{kinds}

**Resume**: what `--resume` may do with it:

{resumes}

**In files**: what `effective_config.json` and `settings` of the metrics file hold if it was not given:

{filled}

A `--config` file may hold every flag except those marked "one start".
"""


def page() -> str:
    """Return the page as Markdown."""
    parser = build_parser()
    formatter = parser._get_formatter()
    said = {
        action.dest: formatter._expand_help(action) for action in parser._actions if action.help != argparse.SUPPRESS
    }
    parts = [_HEAD.format(kinds=_listed(Kind), resumes=_listed(Resume), filled=_listed(Filled))]
    for group, held_by in GROUPS.items():
        title = held_by.__doc__ or group
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n`settings.{group}`\n")
        parts.append("| flag | effect | default | kind | resume | in files |\n|---|---|---|---|---|---|")
        flags = [flag for flag in FLAGS.values() if flag.group == group and flag.name in said]
        parts.append("\n".join(_line(flag, said[flag.name]) for flag in flags) + "\n")
    return "\n".join(parts)


def _listed(words: type[Enum]) -> str:
    return "\n".join(f"- `{word.name.lower()}`: {word.value}" for word in words)


def _line(flag: Flag, said: str) -> str:
    """Return the row of a flag. `said`: its help."""
    effect, _, rest = said.partition("(default: ")
    default = "off" if flag.is_switch else rest.rstrip(")")
    spelled = "`, `".join(flag.option_strings)
    values = " ".join(map(str, flag.choices)) if flag.choices else flag.metavar or ""
    owners = ", ".join(name for name, entry in STRATEGIES.items() if flag.name in entry.options)
    is_in_files = flag.field and flag.recorded and not flag.of_one_start
    cells = [
        f"`{spelled}`" + (f" `{values}`" if values else ""),
        effect.strip().rstrip(";") + (f" [{owners}]" if flag.is_option else ""),
        default,
        flag.kind.name.lower(),
        "one start" if flag.of_one_start else flag.resume.name.lower(),
        flag.filled.name.lower() if is_in_files else "no",
    ]
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\|", cell) for cell in cells) + " |"
