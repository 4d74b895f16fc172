# SPDX-License-Identifier: MIT
"""The documentation in a browser, as phones and readers of screens have them.

``make test-pages``: at two widths, light and dark, no page must be wider than its window, and
axe must find nothing. It needs chromium, and npm for axe.
"""

import http.server
import json
import queue
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from checks.environments import CACHE

ROOT = Path(__file__).resolve().parents[3]
AXE = "axe-core@4.14.1"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
# A frame for each page and width, since a browser's own window has a least width.
RUNNER = """<!doctype html><meta name="color-scheme" content="light dark"><body><script>
(async () => {
  const axe = await (await fetch("/axe.js")).text();
  const found = [];
  for (const page of %s) for (const width of [390, 1280]) {
    const frame = document.createElement("iframe");
    Object.assign(frame, {width, height: 800, src: page, style: "border: 0"});
    document.body.replaceChildren(frame);
    await new Promise(loaded => frame.onload = loaded);
    const inside = frame.contentWindow, root = inside.document.documentElement;
    if (root.scrollWidth > width) found.push(`${page}, ${width}: ${root.scrollWidth} wide`);
    inside.eval(axe);
    const {violations} = await inside.axe.run({resultTypes: ["violations"]});
    for (const {id, nodes} of violations) for (const node of nodes)
      found.push(`${page}, ${width}: ${id}: ${node.target}: ${node.failureSummary}`);
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, and axe, in one folder."""
    if CHROMIUM is None or shutil.which("npm") is None:
        pytest.skip("needs chromium and npm")
    CACHE.mkdir(exist_ok=True)
    packed = CACHE / f"{AXE.replace('@', '-')}.tgz"
    if not packed.exists():
        subprocess.run(["npm", "pack", "--silent", AXE], cwd=CACHE, check=True)
    folder = tmp_path_factory.mktemp("pages")
    build = ("mkdocs", "build", "--quiet", "--strict", "--site-dir", folder)
    subprocess.run([sys.executable, "-m", *build], cwd=ROOT, check=True)
    shutil.unpack_archive(packed, folder)
    shutil.move(folder / "package" / "axe.min.js", folder / "axe.js")
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_and_are_accessible(pages: Path, scheme: str, tmp_path: Path):
    names = [f"/{path.relative_to(pages)}" for path in sorted(pages.rglob("index.html"))]
    (pages / "runner.html").write_text(RUNNER % json.dumps(names))
    answers: queue.Queue[list[str]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=pages)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path}"]
        if scheme == "dark":
            options.append("--blink-settings=preferredColorScheme=0")
        address = f"http://127.0.0.1:{server.server_port}/runner.html"
        browser = subprocess.Popen([CHROMIUM, *options, address], stderr=subprocess.DEVNULL)
        try:
            found = answers.get(timeout=900)
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
    assert not found, f"{len(found)}:\n" + "\n".join(found)
