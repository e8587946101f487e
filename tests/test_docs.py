"""The documents: links lead somewhere, identifiers exist, and nothing names a folder of somebody's machine."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import prehoc
from prehoc.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def slug(heading: str) -> str:
    """Return the anchor that a heading gets on the usual forges."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.strip().replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_links_resolve(document: Path) -> None:
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([\w./#:-]+)\)", text, re.ASCII):
        if re.match(r"[a-z]+://|mailto:", target) or not re.search(r"[./#]", target):
            continue  # elsewhere, or a formula such as [B(q') - B(q)](S)
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{target} does not exist"
        assert file.is_relative_to(ROOT), f"{target} leaves the repository"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in [slug(heading) for heading in headings], f"{target}: no such heading"


def public(identifier: str) -> Any:
    """Return what a dotted identifier of the package names; fields of dataclasses count."""
    head, _, rest = identifier.removeprefix("prehoc.").partition(".")
    for module in ["prehoc", *(m.name for m in pkgutil.walk_packages(prehoc.__path__, "prehoc."))]:
        if module.startswith("prehoc.kernels.triton") or module.endswith(("__main__", "lm_eval")):
            continue
        found = getattr(importlib.import_module(module), head, None)
        if module.rpartition(".")[2] == head:
            found = importlib.import_module(module)
        for part in rest.split(".") if rest else []:
            fields = getattr(found, "__dataclass_fields__", {})
            found = fields.get(part) or getattr(found, part, None)
        if found is not None:
            return found
    return None


def symbol_rows() -> list[tuple[str, str]]:
    """Return (document, identifier) for every code span in the last column of a table headed "identifier"."""
    rows = []
    for document in sorted((ROOT / "docs" / "methods").glob("*.md")):
        inside = False
        for line in document.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
            if not cells:
                inside = False
            elif "identifier" in cells:
                inside, column = True, cells.index("identifier")
            elif inside and not set(line) <= set("|-: "):
                rows += [(document.name, name) for name in re.findall(r"`([^`]+)`", cells[column])]
    return rows


def test_every_method_of_the_paper_has_a_symbol_map() -> None:
    for name in ("cis", "cpe"):
        assert len([row for row in symbol_rows() if row[0] == f"{name}.md"]) >= 4


@pytest.mark.parametrize(("document", "identifier"), symbol_rows())
def test_symbols_exist(document: str, identifier: str) -> None:
    assert public(identifier) is not None, f"{document}: {identifier} is not in the package"


def test_the_readme_has_every_method_in_its_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in METHODS:
        assert re.search(rf"^\| `{name}` \|", text, re.M), f"{name} is missing from the table of phases"


def test_no_committed_file_names_a_folder_of_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    places = re.compile(r"(?<![\w.~$\"'])/(?:home|root|work|Users|mnt|tmp)/[\w.-]+")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in {".png", ".svg", ".npz"} or not path.is_file():
            continue
        found = places.search(path.read_text(encoding="utf-8", errors="replace"))
        assert found is None, f"{name} names {found[0] if found else ''}"
