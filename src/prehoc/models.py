"""Models: the catalogue behind ``prehoc pull``, and loading whatever a user calls a model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prehoc import config
from prehoc._catalogue import CATALOGUE, Entry, ModelError, Progress
from prehoc._download import assemble, fetch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Entry",
    "ModelError",
    "ModelSource",
    "Progress",
    "catalogue",
    "check_folder",
    "find",
    "folder_of",
    "is_pulled",
    "load",
    "pull",
    "resolve",
]

MARKER = "prehoc.json"
FORMAT = 1  # raise it when the conversion changes: folders of an older format are converted again
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: `path` is a folder, a ``.gguf`` file, or a hub id."""

    kind: Literal["catalogue", "folder", "gguf", "hub"]
    path: str


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def catalogue() -> tuple[Entry, ...]:
    """Return the models that ``prehoc pull`` can fetch without an account."""
    return CATALOGUE


def find(name: str) -> Entry:
    """Return the catalogue entry called `name`.

    Raises
    ------
    ValueError
        For an unknown name, with the nearest known one.
    """
    for entry in CATALOGUE:
        if entry.name == name:
            return entry
    raise config.unknown("model", name, [entry.name for entry in CATALOGUE])


def folder_of(entry: Entry) -> Path:
    """Return the folder a pulled model has or will have."""
    return config.cache_dir() / "models" / entry.name


def is_pulled(entry: Entry) -> bool:
    """Tell whether a complete folder is there (by the sizes of its files; `pull` also checks their digests)."""
    return _fault(entry, deep=False) is None


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetch, verify and convert a model of the catalogue; a folder that is there and whole is only checked.

    Parameters
    ----------
    name : str
        A name of the catalogue.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.

    Returns
    -------
    Path
        A folder with safetensors weights (float32), configuration, tokenizer and chat template.

    Raises
    ------
    ValueError
        For an unknown name; as `ModelError`, if the disk is too full, the package cannot be fetched, or what was
        fetched is not what it should be. Parts that were fetched whole are kept, so the next run goes on from there.
    """
    from filelock import FileLock

    entry, report = find(name), progress or _silent
    folder = folder_of(entry)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot create the model folder {folder.parent} ({error}); set PREHOC_CACHE to a writable folder"
        ) from error
    with FileLock(folder.parent / f".{name}.lock"):  # a second process waits, then finds the folder whole
        report(f"checking {name}", 0, 0)
        if _fault(entry, deep=True) is None:
            return folder
        work = folder.parent / f".work-{name}"
        _check_disk(entry, work)
        converted = work / "converted"
        shutil.rmtree(converted, ignore_errors=True)  # left by an interrupted run
        gguf = assemble(entry, fetch(entry, work, report), work, report)
        report(f"converting {name}", 0, 0)
        from prehoc._gguf import convert

        convert(gguf, converted, entry.eos_tokens)
        _write_marker(entry, converted)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged folder: what replaces it is complete
        os.replace(converted, folder)
        shutil.rmtree(work, ignore_errors=True)
    return folder


def resolve(model: str, *, progress: Progress | None = None) -> ModelSource:
    """Say where `model` comes from; a catalogue model that is not there yet is pulled.

    Parameters
    ----------
    model : str
        A catalogue name, a local folder, a ``.gguf`` file, or a hub id (``owner/name``).
    progress : callable, optional
        As for `pull`.

    Raises
    ------
    ValueError
        For an unknown name, a missing path, or missing, truncated or damaged model files.
    """
    if not model:  # Path("") would be the current folder
        raise ModelError("the model's name is empty; give a catalogue name, a folder, a .gguf file or a hub id")
    if any(entry.name == model for entry in CATALOGUE):
        entry = find(model)
        folder = folder_of(entry) if is_pulled(entry) else pull(model, progress=progress)
        return ModelSource("catalogue", str(folder))
    path = Path(model).expanduser()
    if path.is_dir():
        check_folder(path)
        return ModelSource("folder", str(path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {model!r}; give an existing .gguf file")
        return ModelSource("gguf", str(path))
    if path.exists():
        raise ModelError(f"{model!r} is neither a folder nor a .gguf file; give the folder that holds config.json")
    if _HUB_ID.fullmatch(model):
        return ModelSource("hub", model)
    if "/" in model or os.sep in model or model.startswith((".", "~")):
        raise ModelError(f"there is no folder {model!r}; give an existing folder, a .gguf file or a hub id owner/name")
    find(model)  # raises, with the nearest known name
    raise AssertionError("unreachable")


def check_folder(folder: Path) -> None:
    """Check that a model folder has its configuration and whole weight files, from their headers alone.

    Raises
    ------
    ValueError
        Names the file that is missing, truncated or damaged.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: not a model folder; give the folder a model was saved to")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is damaged ({error}); fetch the model again") from error
        weights = [folder / name for name in names]
    else:
        weights = sorted(folder.glob("*.safetensors"))
    if not weights and not list(folder.glob("*.bin")):
        raise ModelError(f"{folder} has no weights (*.safetensors); fetch the model again")
    for file in weights:
        _check_safetensors(file)


def load(
    model: str,
    dtype: str | torch.dtype = "auto",
    *,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, ready to generate (evaluation mode).

    Parameters
    ----------
    model : str
        Anything `resolve` takes.
    dtype : str or torch.dtype
        ``auto`` keeps the type the weights are stored in (float32 for the catalogue and for GGUF files).
    device : str or torch.device, optional
        Where the model goes; the CPU when not given.
    progress : callable, optional
        As for `pull`.

    Raises
    ------
    ValueError
        As `resolve`; also for an unknown dtype, or if the files cannot be loaded or the hub cannot be reached.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise config.unknown("dtype", dtype, DTYPES)
    source = resolve(model, progress=progress)
    if progress is not None:
        progress(f"loading {model}", 0, 0)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind: str | torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    if source.kind == "gguf":
        from prehoc._gguf import load_gguf

        loaded, tokenizer = load_gguf(Path(source.path), torch.float32 if isinstance(kind, str) else kind)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.path)
            loaded = AutoModelForCausalLM.from_pretrained(source.path, dtype=kind)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            fix = f"check the name and the network, or take one of: {', '.join(entry.name for entry in CATALOGUE)}"
            raise ModelError(
                f"cannot load {model!r} ({reason}); {fix if source.kind == 'hub' else 'the folder is not complete'}"
            ) from error
    if device is not None:
        torch.nn.Module.to(loaded, device)
    return loaded.eval(), tokenizer


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def _fault(entry: Entry, *, deep: bool) -> str | None:
    """Say what is wrong with a pulled folder, or None; `deep` reads every byte."""
    folder = folder_of(entry)
    try:
        marker = json.loads((folder / MARKER).read_text())
        if marker["format"] != FORMAT or marker["gguf_sha256"] != entry.sha256:
            return "made by another version"
        for name, facts in marker["files"].items():
            if (folder / name).stat().st_size != facts["bytes"]:
                return f"{name} has another size"
            if deep and _file_digest(folder / name) != facts["sha256"]:
                return f"{name} has other content"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)
    return None


def _file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_marker(entry: Entry, folder: Path) -> None:
    files = {f.name: {"bytes": f.stat().st_size, "sha256": _file_digest(f)} for f in sorted(folder.iterdir())}
    marker = {"format": FORMAT, "name": entry.name, "gguf_sha256": entry.sha256, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n")


def _check_disk(entry: Entry, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    have = sum(file.stat().st_size for file in work.rglob("*.whl"))
    need, free = entry.disk_bytes - have, shutil.disk_usage(work).free
    if free < need:
        raise ModelError(
            f"{entry.name} needs {need / 1e9:.2f} GB of free disk while it is converted and "
            f"{entry.folder_bytes / 1e9:.2f} GB afterwards, but {work.parent} has {free / 1e9:.2f} GB; free some space "
            "or set PREHOC_CACHE to a folder on a larger disk"
        )


def _check_safetensors(file: Path) -> None:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if not 2 <= header_bytes <= size - 8:
                raise ValueError(f"header of {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
        tensors = [facts for name, facts in header.items() if name != "__metadata__"]
        expected = 8 + header_bytes + max((facts["data_offsets"][1] for facts in tensors), default=0)
    except OSError as error:
        raise ModelError(f"{file} is missing or unreadable ({error.strerror}); fetch the model again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is truncated or damaged ({error}); fetch the model again") from error
    if size != expected:
        raise ModelError(f"{file} is truncated: expected {expected} bytes, found {size}; fetch the model again")
