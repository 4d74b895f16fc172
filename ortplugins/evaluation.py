# SPDX-License-Identifier: MIT
"""Judges a model of text: by itself, or against the float model it was made from.

For each token t of a window but the first, with p the float model's distribution after the
tokens before it and q the other's:

    perplexity      exp(mean of -log q(t))
    KL divergence   mean of sum over the vocabulary of p log(p / q), in nats
    agreement       how often both give the same token the highest probability
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortplugins.errors import CalibrationError, ModelFileError, UsageError
from ortplugins.measurement.models import GivenModel, ModelSource, scratch_folder
from ortplugins.model_io.loading import load_model
from ortplugins.model_io.model_folder import model_in, tokenizer_beside
from ortplugins.model_io.saving import Progress
from ortplugins.runtime.stock_session import fetch, open_model, type_of
from ortplugins.samples.text import TextTokenizer, TokenFeeds, split_text

# Tokens of a text that an encoder gets.
_MAX_TOKENS = 128
# Characters: shorter paragraphs are too much alike.
_SHORTEST = 40
# Rows of logits that are worked on at a time: 100 MB of float32 for 256,000 tokens.
_STRIP = 100
# Tokens that show whether a model is causal.
_PROBE = 8

_Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` found; NaN where it does not apply.

    Attributes:
        names: The model's, and the float model's where one was given.
        bytes: Size of each .onnx file and its data.
        count: How many tokens were predicted, or texts compared.
        perplexity: Of each language model on the text; empty for encoders.
        kl_divergence: Mean over the tokens of the Kullback-Leibler divergence from the float
            model's distribution to the model's, in nats.
        top1_agreement: How often both models rank the same token first, 0 to 1.
        cosine: For encoders: mean cosine of the model's embeddings to the float model's.
        ranking_agreement: For encoders: Spearman's rank correlation of the similarities of all
            pairs of texts, -1 to 1: what a search puts first, it puts first with the other.
    """

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    count: int
    perplexity: tuple[float, ...] = ()
    kl_divergence: float = math.nan
    top1_agreement: float = math.nan
    cosine: float = math.nan
    ranking_agreement: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON's types; those that do not apply as None."""
        text = json.dumps(dataclasses.asdict(self))
        figures: dict[str, Any] = json.loads(text, parse_constant=lambda constant: None)
        return figures


def evaluate(
    model: ModelSource,
    against: ModelSource | None = None,
    *,
    text: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | None = None,
    tokens: int = 4096,
    window: int = 512,
    texts: int = 500,
    share: float = 1.0,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    progress: Progress | None = None,
) -> Evaluation:
    """Judge a model on a text: a causal language model, or a sentence encoder.

    Both models run in plain onnxruntime, as it runs them by default, one row at a time: 4-bit
    weights of DequantizeLinear meet int8 activations then. Give a session for other settings.

    Args:
        model: A path, the path of a folder with one model, bytes, an object, what
            :func:`.optimize` returned, or a session, which is run with its own settings.
        against: The float model, in the same way; it may have other inputs.
        text: Path of a file, UTF-8.
        tokenizer: Path of a ``tokenizer.json``; by default the one next to the model.
        tokens: How much of the text a language model reads, from its start, in whole windows.
        window: Tokens of a window, the BOS token included where the tokenizer has one; all but
            the first are predicted. Windows do not overlap. A model of fixed length has its
            own.
        texts: How many paragraphs an encoder gets, each cut at 128 tokens; spread over the
            text.
        share: Share of the text, its end, that is read, 0 to 1.
        providers: Execution providers.
        progress: Called before each run: done, total, what.

    Returns:
        The figures.

    Raises:
        MissingFileError, ModelFileError: If a model or folder cannot be used, fails, or gives
            NaN, or an encoder has no float model to compare with.
        CalibrationError: If text or tokenizer cannot be used, the text is too short, or a
            token is not a row of the model's table.
        UsageError: If an argument is out of range, no tokenizer is given or found, or a
            package is missing.
    """
    for name, value in (("tokens", tokens), ("window", window), ("texts", texts)):
        if value < 2:
            raise UsageError(f"{name} is {value}; expected 2 or more")
    if not 0 <= share <= 1:
        raise UsageError(f"share is {share}; expected 0 to 1")
    if tokenizer is None:
        paths = [item for item in (model, against) if isinstance(item, str | os.PathLike)]
        tokenizer = next(filter(None, map(tokenizer_beside, paths)), None)
        if tokenizer is None:
            raise UsageError(
                "no tokenizer.json next to the model: give the path of a tokenizer"
            )
    encoder = TextTokenizer(Path(tokenizer))
    with scratch_folder() as folder:
        models = [
            _TextModel(GivenModel(given), folder, providers)
            for item in (model, against)
            if item is not None
            for given in [model_in(item) if isinstance(item, str | os.PathLike) else item]
        ]
        show = progress or (lambda done, total, what: None)
        (_, content), source = split_text(Path(text), share), str(text)
        if models[0].gives_logits:
            found = _language_model(models, encoder, content, source, tokens, window, show)
        else:
            found = _encoder(models, encoder, content, source, texts, show)
        names, sizes = zip(*((item.name, item.bytes) for item in models), strict=True)
        return Evaluation(names, sizes, **found)


class _TextModel:
    """A session on a model of tokens, which reads one row at a time."""

    def __init__(self, model: GivenModel, scratch: Path, providers: Sequence[Any]) -> None:
        path = model.file(scratch)
        loaded = load_model(path)
        self.name = model.name
        self.bytes = sum(map(os.path.getsize, {path, *loaded.data_files.values()}))
        self.feeds = TokenFeeds(loaded.model.graph)
        self._session = model.session or open_model(path, "all", providers, model.settings)
        self.output, self.gives_logits = self._find_output()

    def run(self, ids: Sequence[int], what: str) -> _Floats:
        """Return the output for some tokens, ``[tokens, size]``."""
        feed = self.feeds.feed(ids)
        (output,) = fetch(self._session, [self.output], feed, f"{self.name}, {what}")
        if output.ndim != 3 or output.shape[1] < len(ids):
            raise ModelFileError(
                f"{self.name}: output {self.output!r} is {list(output.shape)} for {len(ids)} "
                "tokens; expected a row for each token"
            )
        rows = output[0, : len(ids)].astype(np.float32, copy=False)
        if np.isnan(rows).any():
            raise ModelFileError(f"{self.name}: output {self.output!r} has NaN for {what}")
        return rows

    def check_causal(self, ids: Sequence[int]) -> None:
        """Refuse a masked language model, which sees the tokens that it should predict."""
        if self.feeds.length:
            return
        changed = [*ids[:-1], ids[0] if ids[0] != ids[-1] else (ids[-1] + 1) % 4]
        before, after = (self.run(tokens, "a few tokens")[:-1] for tokens in (ids, changed))
        if np.linalg.norm(before - after) > 0.02 * np.linalg.norm(before):
            raise ModelFileError(
                f"{self.name}: what it predicts depends on later tokens, so it is not a "
                "causal language model and has no perplexity"
            )

    def _find_output(self) -> tuple[str, bool]:
        """Return the name of the output, and whether it holds logits."""
        outputs = self._session.get_outputs()
        sizes = {
            item.name: item.shape[-1]
            for item in outputs
            if type_of(item) in ("float", "float16") and len(item.shape) == 3
        }
        logits = [n for n, size in sizes.items() if "logits" in n or size == self.feeds.rows]
        if sizes:
            return (logits or list(sizes))[0], bool(logits)
        found = ", ".join(f"{item.name!r} {item.shape}" for item in outputs)
        raise ModelFileError(
            f"{self.name}: has no float output [batch, sequence, vocabulary] or [batch, "
            f"sequence, hidden]: its outputs are {found}"
        )


def _language_model(
    models: Sequence[_TextModel],
    tokenizer: TextTokenizer,
    text: str,
    source: str,
    tokens: int,
    window: int,
    progress: Progress,
) -> dict[str, Any]:
    length = next((item.feeds.length for item in models if item.feeds.length), window)
    windows = tokenizer.cut(text, length, source, closed=False)
    whole = [ids for ids in windows if len(ids) == length][: max(1, tokens // length)]
    if not whole:
        raise CalibrationError(
            f"{source}: has {len(windows[0])} tokens, fewer than a window of {length}: give a "
            "longer text or a smaller window"
        )
    for item in models:
        item.feeds.check(whole, tokenizer)
    models[0].check_causal(whole[0][:_PROBE])
    surprise, divergence, agreed = np.zeros(len(models)), 0.0, 0
    for number, ids in enumerate(whole):
        progress(number, len(whole), "reading the text")
        targets = np.array(ids[1:])
        logits = _logits(models, ids, f"window {number} of the text")
        for start in range(0, len(targets), _STRIP):
            rows = slice(start, start + _STRIP)
            logs = [_log_softmax(each[rows]) for each in logits]
            right = (np.arange(len(logs[0])), targets[rows])
            surprise -= [each[right].sum(dtype=np.float64) for each in logs]
            if len(logs) > 1:
                log_q, log_p = logs
                p = np.exp(log_p)
                with np.errstate(invalid="ignore"):  # tokens that a model rules out: -inf
                    terms = np.where(p > 0, p * (log_p - log_q), 0)
                divergence += float(terms.sum(dtype=np.float64))
                agreed += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    count = sum(len(ids) - 1 for ids in whole)
    found = {
        "count": count,
        "perplexity": tuple(math.exp(min(total / count, 700)) for total in surprise),
    }
    if len(models) > 1:
        found |= {"kl_divergence": divergence / count, "top1_agreement": agreed / count}
    return found


def _logits(models: Sequence[_TextModel], ids: Sequence[int], what: str) -> list[_Floats]:
    """Return what each model predicts for tokens but the first, ``[tokens, vocabulary]``."""
    found = [item.run(ids, what)[:-1] for item in models]
    _check_comparable(models, found)
    if max(ids[1:]) >= (size := found[0].shape[-1]):
        raise CalibrationError(
            f"{models[0].name}: has {size} logits for each token, and the text has token "
            f"{max(ids[1:])}: it is another model's tokenizer, or the model predicts no tokens"
        )
    return found


def _check_comparable(models: Sequence[_TextModel], outputs: Sequence[_Floats]) -> None:
    sizes = [rows.shape[-1] for rows in outputs]
    if sizes[-1] != sizes[0]:
        raise ModelFileError(
            f"{models[0].name} and {models[-1].name} cannot be compared: {sizes[0]} numbers "
            f"for each token or text, and {sizes[-1]}"
        )


def _log_softmax(logits: _Floats) -> _Floats:
    shifted: _Floats = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _encoder(
    models: Sequence[_TextModel],
    tokenizer: TextTokenizer,
    text: str,
    source: str,
    count: int,
    progress: Progress,
) -> dict[str, Any]:
    if len(models) == 1:
        raise ModelFileError(
            f"{models[0].name}: is an encoder, judged against its float model: give that one"
        )
    found = [each for each in text.split("\n\n") if len(each) > _SHORTEST]
    if len(found) < 2:
        raise CalibrationError(
            f"{source}: {len(found)} of its paragraphs (between empty lines) have {_SHORTEST} "
            "characters: two are needed at least"
        )
    texts = [found[int(x)] for x in np.linspace(0, len(found), min(count, len(found)), False)]
    a, b = (_embed(item, tokenizer, texts, progress) for item in models)
    _check_comparable(models, (a, b))
    pairs = np.triu_indices(len(a), 1)
    agreement = _rank_correlation(*((rows @ rows.T)[pairs] for rows in (a, b)))
    cosine = float((a * b).sum(1).mean())
    return {"count": len(texts), "cosine": cosine, "ranking_agreement": agreement}


def _rank_correlation(a: _Floats, b: _Floats) -> float:
    """Return Spearman's rank correlation of numbers that hardly ever are equal; or NaN."""
    if len(a) < 2:
        return math.nan
    ranks = np.stack([a, b]).argsort(kind="stable").argsort().astype(np.float64)
    ranks -= ranks.mean(axis=1, keepdims=True)
    return float(ranks[0] @ ranks[1] / np.linalg.norm(ranks[0]) / np.linalg.norm(ranks[1]))


def _embed(
    model: _TextModel,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    progress: Progress,
) -> _Floats:
    """Return the mean over its tokens for each text, ``[texts, hidden]``, of length 1."""
    length = model.feeds.length or _MAX_TOKENS
    rows = []
    ids = [tokenizer.cut(text, length, "a paragraph")[0] for text in texts]
    model.feeds.check(ids, tokenizer)
    for number, tokens in enumerate(ids):
        progress(number, len(ids), model.name)
        rows.append(model.run(tokens, f"text {number}").mean(0))
    vectors = np.stack(rows)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors
