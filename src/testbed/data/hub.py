"""Documents from the Hugging Face Hub, and the shorthands for well-known corpora."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.data.reachable import status_of
from testbed.data.streams import DatasetsSource, Source, SourceError, Stream, cut_lines, join_articles
from testbed.errors import InputError, first_line

if TYPE_CHECKING:
    from datasets import IterableDataset

_WAY_OUT = "without a network use --dataset stdlib, or --dataset PATH with local .txt, .jsonl or .parquet files"
_TIMEOUT_S = 10.0
# The Hub's own copy, in Parquet, of data that is otherwise made by a script; `datasets` runs no scripts since 4.0.
_CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class Shorthand:
    """A name for a corpus on the Hub."""

    repository: str
    config: str | None = None
    note: str | None = None
    data_files: str | None = None  # JSON lines, read past the repository's script; {revision}, {config} are filled in
    text_field: str | None = None


SHORTHANDS = {
    "openwebtext": Shorthand("Skylion007/openwebtext"),
    "wikitext": Shorthand("Salesforce/wikitext", config="wikitext-103-raw-v1"),
    "oscar": Shorthand(
        "oscar-corpus/OSCAR-2301",
        config="en",
        note="OSCAR-2301 is gated: accept its terms on its page and run hf auth login; --config is a language",
        data_files="hf://datasets/oscar-corpus/OSCAR-2301@{revision}/{config}_meta/*.jsonl.zst",
        text_field="content",
    ),
    "webtext": Shorthand(
        "Skylion007/openwebtext",
        note="WebText was never published and its sample's host is gone; OpenWebText, its open copy, is taken",
    ),
}


class HubDataset(DatasetsSource):
    """One split of one configuration of a dataset on the Hub, at the revision that is newest when it is opened."""

    def __init__(self, dataset: str, config: str | None, split: str | None, text_field: str | None) -> None:
        shorthand = SHORTHANDS.get(dataset, Shorthand(dataset))
        # Only what the user adds to a dataset's name becomes part of the folder's.
        name = "--".join([dataset.replace("/", "--"), *(part for part in (config, split) if part)])
        super().__init__(
            re.sub(r"[^\w.-]+", "-", name),
            shorthand.repository,
            config or shorthand.config,
            split or "train",
            text_field or shorthand.text_field,
        )
        if shorthand.data_files is not None and split not in (None, "train"):
            raise InputError(f"--split {split} is none of the splits of {dataset}: train")
        self._dataset = dataset
        self._data_files = shorthand.data_files
        if shorthand.note:
            self.notes.append(shorthand.note)

    def _streams(self) -> list[Stream]:
        import huggingface_hub

        endpoint = huggingface_hub.constants.ENDPOINT
        offline = huggingface_hub.constants.is_offline_mode()
        if offline or status_of(endpoint) is None:
            reason = "is not asked because HF_HUB_OFFLINE is set" if offline else "cannot be reached"
            shown = endpoint.rpartition("@")[2]  # an address can hold a password
            raise SourceError(f"--dataset {self._dataset}: {shown} {reason}; {_WAY_OUT}")
        if self._data_files is not None and importlib.util.find_spec("zstandard") is None:
            raise SourceError(
                f"--dataset {self._dataset} is compressed with Zstandard; install it first: pip install zstandard"
            )
        self.revision = self._newest_revision(None)
        try:
            dataset = self._load(self.revision)
        except Exception as error:  # any of the HTTP client's, the Hub's and the library's own
            if not isinstance(error, RuntimeError) or "scripts are no longer supported" not in str(error):
                raise self._sentence(error) from error
            dataset = self._load_converted()
        return [Stream(lambda: dataset, join_articles if self.source == "Salesforce/wikitext" else None)]

    def _load_converted(self) -> IterableDataset:
        """Open the Hub's own Parquet copy of a dataset that a script makes."""
        self.revision = self._newest_revision(_CONVERTED)
        self.notes.append(
            f"{self.source} is made by a script, which `datasets` no longer runs; the Hub's Parquet copy is read"
        )
        try:
            return self._load(self.revision)
        except Exception as error:
            raise self._sentence(error) from error

    def _load(self, revision: str) -> IterableDataset:
        import datasets

        if self._data_files is not None:
            files = self._data_files.format(revision=revision, config=self.config)
            return datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        return datasets.load_dataset(self.source, self.config, split=self.split, revision=revision, streaming=True)

    def _newest_revision(self, branch: str | None) -> str:
        import huggingface_hub

        try:
            info = huggingface_hub.HfApi().dataset_info(self.source, revision=branch, timeout=_TIMEOUT_S)
        except Exception as error:
            raise self._sentence(error) from error
        assert info.sha is not None, "a repository on the Hub has a commit"
        return info.sha

    def _sentence(self, error: Exception) -> Exception:
        """Return the error to raise: InputError for what was typed, SourceError for what the Hub did not give."""
        import datasets
        from huggingface_hub import errors

        said = str(error)
        page = f"https://huggingface.co/datasets/{self.source}"
        if isinstance(error, errors.GatedRepoError) or "gated dataset" in said:
            return SourceError(f"--dataset {self._dataset} is gated; accept its terms at {page} and run: hf auth login")
        if isinstance(error, errors.RevisionNotFoundError):
            return SourceError(
                f"--dataset {self._dataset} is made by a script, which `datasets` no longer runs, and the Hub has no "
                f"Parquet copy of it; take another dataset"
            )
        if isinstance(
            error, (errors.RepositoryNotFoundError, errors.HFValidationError, datasets.exceptions.DatasetNotFoundError)
        ):
            return InputError(
                f"--dataset {self._dataset} is not a dataset on the Hub, or is private; look up its id (owner/name) at "
                f"https://huggingface.co/datasets and run hf auth login if it is yours"
            )
        if "Config name is missing" in said or "BuilderConfig" in said:
            return InputError(f"--config {self.config} is none of the configurations of {self.source}: {_listed(said)}")
        if "Bad split" in said:
            return InputError(f"--split {self.split} is none of the splits of {self.source}: {_listed(said)}")
        return SourceError(f"--dataset {self._dataset} is not available from the Hub ({first_line(error)}); {_WAY_OUT}")


def _listed(said: str) -> str:
    """Return the list in brackets in the library's message."""
    found = re.search(r"\[(.*?)\]", said, re.DOTALL)
    return found[1].replace("'", "") if found else said


class TinyShakespeare(Source):
    """The 1.1 MB of Shakespeare that char-rnn made known, from where it lies: the copies on the Hub need scripts.

    Its sha256 is its revision, and anything else that the address gives is refused.
    """

    _URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    _SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

    def __init__(self, url: str = _URL, sha256: str = _SHA256) -> None:
        super().__init__("shakespeare", url)
        self.revision = sha256
        self._text = ""

    def open(self) -> None:
        import requests

        if status_of(self.source) != 200:
            raise SourceError(f"--dataset shakespeare: {self.source} cannot be reached; {_WAY_OUT}")
        try:
            response = requests.get(self.source, timeout=_TIMEOUT_S)
            response.raise_for_status()
        except requests.RequestException as error:
            raise SourceError(f"--dataset shakespeare: {first_line(error)}; {_WAY_OUT}") from error
        if hashlib.sha256(response.content).hexdigest() != self.revision:
            raise SourceError(f"--dataset shakespeare: {self.source} is not the text it was; {_WAY_OUT}")
        self._text = response.content.decode()

    def batches(self) -> Iterator[list[str]]:
        yield from cut_lines(iter([self._text.splitlines(keepends=True)]))
