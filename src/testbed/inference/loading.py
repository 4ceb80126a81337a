"""Open a trained model: a run's folder, one that `transformers` saved, or published weights from the hub. Of a run that
has not ended, the newest checkpoint is opened.

Torch is not imported before `load_model` is called, so that a program can look at the files first.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from testbed.checkpoint.folders import checkpoint_in, described_shape, read_description, tokenizer_of_saved
from testbed.config.initial_file import as_a_folder, file_of_another_in, is_file_of_another
from testbed.config.initial_shape import check_same_bpe, shape_of_folder, tokenizer_of_folder
from testbed.data.sidecar import GPT2_VOCAB_SIZE
from testbed.data.tokenizer import Tokenizer, load_gpt2_tokenizer
from testbed.data.tokenizer_file import load_tokenizer_file
from testbed.errors import InputError
from testbed.io import not_a_folder
from testbed.model.shape import MODEL_SIZES, ModelShape
from testbed.run_folder import COMPLETE, TOKENIZER, WEIGHTS, is_converted

if TYPE_CHECKING:
    import torch

    from testbed.model.gpt2 import GPT2


PUBLISHED = tuple(name for name in MODEL_SIZES if name.startswith("gpt2"))


def add_model_flags(flags: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flags that name a model, its tokenizer and its device."""
    model = flags.add_mutually_exclusive_group(required=True)
    own = (
        "folder of a run, its best/, or a checkpoint of it; of a run that has not ended, the newest checkpoint is taken"
    )
    model.add_argument("--checkpoint", type=Path, metavar="DIR", help=own)
    published = f"{', '.join(PUBLISHED)} from the Hugging Face hub, or a folder that transformers saved"
    model.add_argument("--from_pretrained", metavar="NAME|DIR", help=published)
    tokenizer = (
        "the training data's tokenizer, for example bpe_N.json or nanoGPT's meta.pkl (default: the folder's "
        "tokenizer.json, or GPT-2's)"
    )
    flags.add_argument("--tokenizer_file", type=Path, metavar="FILE.json", help=tokenizer)
    device = "auto = CUDA where PyTorch finds it (default: auto)"
    flags.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=device)


def named_model(arguments: argparse.Namespace) -> tuple[str, Path | str]:
    """Return the flag that names the model, and the `source` of `load_model` that it names."""
    if arguments.checkpoint is not None:
        return "--checkpoint", arguments.checkpoint
    name = arguments.from_pretrained
    return "--from_pretrained", name if is_published(name) else Path(name)


@contextlib.contextmanager
def naming(flag: str, between: str = " ") -> Iterator[None]:
    """Put the flag before the sentence that says what is wrong with its value."""
    try:
        yield
    except (InputError, OSError) as error:
        kind = OSError if isinstance(error, OSError) else InputError
        raise kind(f"{flag}{between}{error}") from None


def load_model(source: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> GPT2:
    """Return a model in eval mode.

    Args:
        source: a folder with config.json and model.safetensors, a run's folder or a checkpoint of it, or a str of
            PUBLISHED, from the Hugging Face hub.
        dtype: of its weights (default: torch.float32).

    Raises:
        InputError: a file is missing or damaged, or does not belong to the other. One sentence that begins with the
            folder.
        OSError: the hub cannot be reached.
    """
    from testbed.checkpoint.formats import read_checkpoint
    from testbed.checkpoint.weights import read_initial_weights
    from testbed.model.gpt2 import GPT2

    shape = shape_of_config(source)
    if (saved := unfinished(source)) is not None:
        with contextlib.redirect_stdout(sys.stderr):  # what is checked; a sample's text goes to the other
            weights = read_checkpoint(saved, str(source), with_optimizer=False).weights
    else:
        # a path that no published name is equal to: a folder may be called gpt2
        init_from = source if is_published(source) else str(Path(source).absolute())
        initial = read_initial_weights(init_from, shape, name=str(source))
        assert initial is not None, "only scratch has no weights"
        weights = initial
    model = GPT2(shape)
    model.load_state_dict(weights)
    return model.to(device=device, dtype=dtype).eval()


def is_published(source: Path | str) -> TypeGuard[str]:
    """Return whether `source` names weights on the hub; a Path does not, nor does a str that is also a folder."""
    return isinstance(source, str) and source in PUBLISHED and not Path(source).is_dir()


def unfinished(source: Path | str) -> Path | None:
    """Return the checkpoint that holds the weights of a run that has not ended, or `source` where it is a checkpoint.
    None: the weights lie in the folder, or nowhere."""
    if is_published(source) or (Path(source) / COMPLETE).is_file() or is_converted(source):
        return None
    return checkpoint_in(Path(source))


def note_on(source: Path | str) -> str | None:
    """Return a line on weights that are not those of a run's end; None where they are."""
    saved = unfinished(source)
    if saved is None:
        return None
    why = "is a checkpoint" if saved == Path(source) else f"has not ended, so its newest checkpoint is taken, {saved}"
    return f"note: {source} {why}: the weights are those of step {read_description(saved).step}"


def shape_of_config(source: Path | str) -> ModelShape:
    """Return the shape of a model, from its config.json. `source` and errors as in `load_model`."""
    if is_published(source):
        return MODEL_SIZES[source]
    directory = Path(source)
    if is_file_of_another(directory) and directory.is_file():
        raise InputError(f"{directory} is a file of another program; {as_a_folder(directory)}")
    if (saved := unfinished(source)) is not None:
        try:
            return described_shape(read_description(saved))
        except InputError as error:
            raise InputError(f"{directory}: {error}") from None
    missing = [name for name in WEIGHTS if not (directory / name).is_file()]
    if missing and (file := file_of_another_in(directory)):
        raise InputError(f"{directory} has no {missing[0]}, but {file.name} of another program; {as_a_folder(file)}")
    if missing:
        fault = not_a_folder(directory) or f"has no {missing[0]}"
        raise InputError(
            f"{directory} {fault}; give the folder of a run that has ended or saved a checkpoint, or one that "
            "transformers saved"
        )
    shape = shape_of_folder(directory, name=str(directory))
    num_bytes = (directory / "model.safetensors").stat().st_size
    if num_bytes < 2 * shape.num_parameters:  # two bytes each in half precision
        raise InputError(
            f"{directory}: model.safetensors has {num_bytes:,} bytes, too few for the {shape.num_parameters:,} "
            "parameters that config.json describes; one of them is damaged or belongs to another model"
        )
    return shape


def tokenizer_name(source: Path | str) -> str | None:
    """Return the name of the tokenizer whose ids a model reads; None where its config.json does not say."""
    if is_published(source):
        return "gpt2"
    if (saved := unfinished(source)) is not None:
        return tokenizer_of_saved(saved, str(source))
    return tokenizer_of_folder(Path(source), name=str(source))


def folder_of(source: Path | str) -> Path:
    """Return the folder that has the files of a model beside its weights: of a checkpoint, the run's."""
    folder = Path(source)
    return folder.resolve().parent.parent if unfinished(source) == folder else folder


def tokenizer_of(source: Path | str, tokenizer_path: Path | str | None = None) -> Tokenizer:
    """Return the tokenizer that a model was trained with: its folder's tokenizer.json, or GPT-2's.

    Args:
        source: as in `load_model`.
        tokenizer_path: take this bpe_N.json instead.

    Raises:
        InputError: there is none, it is damaged, or it is another one than the model's.
        OSError: GPT-2's files cannot be had.
    """
    shape, path, name = shape_of_config(source), tokenizer_path, tokenizer_name(source)
    if path is None and not is_published(source) and (folder_of(source) / TOKENIZER).is_file():
        path = folder_of(source) / TOKENIZER
    if path is None:
        if name == "gpt2" or (name is None and shape.vocab_size == GPT2_VOCAB_SIZE):
            return load_gpt2_tokenizer(str(source), "give a copy of GPT-2's tokenizer.json with --tokenizer_file")
        raise InputError(
            f"{source} has no {TOKENIZER}, and its model reads ids of {name or 'an unknown tokenizer'}; give its "
            "file with --tokenizer_file, which lies next to the token files (bpe_N.json, or meta.pkl of nanoGPT)"
        )
    try:
        tokenizer = load_tokenizer_file(Path(path))
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None
    expected = f"bpe:{GPT2_VOCAB_SIZE}" if name == "gpt2" else name  # a BPE in a file is called by its size
    if tokenizer.name != (expected or tokenizer.name) or tokenizer.vocab_size > shape.vocab_size:
        raise InputError(
            f"{source} reads ids of {name or f'at most {shape.vocab_size} tokens'}, but the tokenizer file {path} "
            f"holds {tokenizer.name}; give the one that its training data was made with"
        )
    if not is_published(source):
        check_same_bpe(
            folder_of(source),
            Path(path),
            str(source),
            f"the tokenizer file given is another {tokenizer.name}",
            "leave it out",
        )
    return tokenizer
