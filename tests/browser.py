"""A real browser without a screen: opens a page with the network cut off and reports what its scripts see."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_BEFORE = """<script>
const seen = {errors: []};
addEventListener("error", (event) => seen.errors.push(String(event.message || event.target.outerHTML)), true);
addEventListener("unhandledrejection", (event) => seen.errors.push(String(event.reason)));
</script>"""
_AFTER = """<script type="module">
await (async () => { SCRIPT })().catch((error) => seen.errors.push(String(error)));
const root = document.documentElement;
seen.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
Object.assign(seen, {width: innerWidth, content: root.scrollWidth});
parent.postMessage(JSON.stringify(seen), "*");
</script>"""
# a window is at least 500 pixels wide: the page lies in a frame that is not
_FRAME = """<!DOCTYPE html><body style="margin: 0"><pre id="seen" hidden></pre>
<script>addEventListener("message", (event) => document.getElementById("seen").textContent = event.data);</script>
<iframe src="PAGE" style="border: 0; width: WIDTHpx; height: HEIGHTpx"></iframe></body>"""


def look(page: Path, width: int, script: str = "", picture: Path | None = None, height: int = 1600) -> dict[str, Any]:
    """Open a page `width` pixels wide, run a script in it, and return what is in `seen`: errors, widths, what was loaded.

    The script may add to `seen`. With a picture, the page is also photographed behind the script. Without a browser the
    test is skipped.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium on this machine; on Debian: apt-get install chromium")
    text = page.read_text(encoding="utf-8")
    at, end = text.index("<head>") + len("<head>"), text.rindex("</body>")
    watched, frame = (page.with_name(f"{page.stem}-{name}.html") for name in ("watched", "frame"))
    watched.write_text(
        text[:at] + _BEFORE + text[at:end] + _AFTER.replace("SCRIPT", script) + text[end:], encoding="utf-8"
    )
    frame.write_text(
        _FRAME.replace("PAGE", watched.name).replace("WIDTH", str(width)).replace("HEIGHT", str(height)),
        encoding="utf-8",
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={max(width, 500)},{height}",
    ]
    flags += [f"--user-data-dir={page.parent / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]

    def run(what: str) -> str:
        command = [chromium, *flags, "--virtual-time-budget=20000", what, f"file://{frame}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    found = re.search(r'<pre id="seen"[^>]*>(.+?)</pre>', run("--dump-dom"), re.S)
    assert found, "the page did not finish"
    if picture is not None:
        run(f"--screenshot={picture}")
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen
