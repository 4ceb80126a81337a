#!/usr/bin/env python3
"""Download documents into dataset/<name>/: documents.jsonl and manifest.json. See docs/data.md."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import InputError, counted, say
from testbed.io import cannot_become_a_folder
from testbed.program import program, recorded_command


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument_group("what to take").add_argument
    dataset = (
        "stdlib (this Python's own library, offline too), openwebtext, wikitext, oscar, webtext, shakespeare, any "
        "Hugging Face dataset id (owner/name), or a .txt, .jsonl or .parquet file or a folder of them (default: stdlib)"
    )
    flag("--dataset", default="stdlib", metavar="NAME", help=dataset)
    flag("--config", metavar="NAME", help="configuration of a Hugging Face dataset (default: its only one)")
    flag("--split", metavar="NAME", help="split of a Hugging Face dataset (default: train)")
    flag("--text_field", metavar="COLUMN", help="column that holds the text (default: the one with an obvious name)")
    flag = parser.add_argument_group("how much").add_argument
    size = "stop before this much text, as UTF-8; 10^6 is MB, 2^20 is MiB (default: 100MB)"
    flag("--max_bytes", default="100MB", metavar="SIZE", help=size)
    flag("--max_docs", type=positive, metavar="DOCUMENTS", help="documents to take at most (default: no limit)")
    flag = parser.add_argument_group("where to").add_argument
    flag(
        "--output_dir", type=Path, default=Path("dataset"), metavar="DIR", help="folder above <name> (default: dataset)"
    )
    flag("--overwrite", action="store_true", help="replace a corpus that is there under the same name")
    return parser.parse_args(arguments)


def download(settings: argparse.Namespace) -> None:
    from tqdm import tqdm

    from testbed.data.corpus import DOCUMENTS, MANIFEST, Limits, existing_corpus, parse_size, write_corpus
    from testbed.data.sources import find_source

    if fault := cannot_become_a_folder(settings.output_dir):
        raise InputError(f"--output_dir {settings.output_dir} {fault}; name a folder for corpora")
    limits = Limits(parse_size(settings.max_bytes), settings.max_docs)
    source = find_source(settings.dataset, settings.config, settings.split, settings.text_field)
    directory = settings.output_dir / source.name
    manifest = None if settings.overwrite else existing_corpus(source, limits, directory)
    if manifest is not None:
        # preprocess_small.py takes the newest manifest: that must be the corpus asked for last.
        os.utime(directory / MANIFEST)
        say(f"{directory} is whole already, nothing to do (revision {manifest['revision']})")
    else:
        source.open()
        for note in source.notes:
            say(f"note: {note}")
        with tqdm(unit="B", unit_scale=True, desc=source.name) as bar:  # no total: how much there is, the end tells
            command_line = recorded_command(__file__, sys.argv[1:])
            manifest = write_corpus(source, limits, directory, command_line, bar.update)
    stopped = f", stopped by --{manifest['stopped_by']}" if manifest["stopped_by"] else ", all there is"
    say(f"{counted(manifest['documents'], 'document')}, {manifest['text_bytes']:,} bytes of text{stopped}")
    say(f"{directory / DOCUMENTS}\n{directory / MANIFEST}")


@program
def main() -> None:
    download(parse_arguments())


if __name__ == "__main__":
    sys.exit(main())
