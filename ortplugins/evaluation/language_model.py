# SPDX-License-Identifier: MIT
"""How well a causal language model predicts a text, and how far it is from its float model.

For each token t of a window but the first, with p the float model's distribution after the
tokens before it and q the other's:

    perplexity      exp(mean of -log q(t))
    KL divergence   mean of sum over the vocabulary of p log(p / q), in nats
    agreement       how often both give the same token the highest probability
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ortplugins.errors import CalibrationError, ModelFileError
from ortplugins.evaluation.text_model import TextModel
from ortplugins.model_io.saving import Progress

# Rows of logits that are worked on at a time: 100 MB of float32 for 256,000 tokens.
_STRIP = 100
_PROBE = 8


@dataclasses.dataclass
class Prediction:
    """Sums over the tokens of a text."""

    tokens: int = 0
    surprise: float = 0.0  # of -log q(t)
    divergence: float = 0.0  # from the float model
    agreed: int = 0  # both models have the same first choice

    @property
    def perplexity(self) -> float:
        """Of all tokens."""
        return math.exp(min(self.surprise / self.tokens, 700))

    def add(
        self,
        log_q: npt.NDArray[np.float32],
        targets: npt.NDArray[np.int64],
        log_p: npt.NDArray[np.float32] | None,
    ) -> None:
        """Add predictions; logarithms, the float model's last, ``[tokens, vocabulary]``."""
        right = log_q[np.arange(len(log_q)), targets]
        self.surprise -= float(right.sum(dtype=np.float64))
        if log_p is not None:
            p = np.exp(log_p)
            with np.errstate(invalid="ignore"):  # tokens that a model rules out: -inf
                terms = np.where(p > 0, p * (log_p - log_q), 0)
            self.divergence += float(terms.sum(dtype=np.float64))
            self.agreed += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        self.tokens += len(targets)


def read_windows(
    model: TextModel,
    against: TextModel | None,
    windows: Sequence[Sequence[int]],
    progress: Progress | None,
) -> tuple[Prediction, Prediction | None]:
    """Let one or two models read windows of a text."""
    found, floats = Prediction(), None if against is None else Prediction()
    _check_causal(model, windows[0][:_PROBE])
    for number, window in enumerate(windows):
        if progress is not None:
            progress(number, len(windows), "reading the text")
        what, targets = f"window {number} of the text", np.array(window[1:])
        logits = model.run(window, what)[:-1]
        if targets.max() >= logits.shape[-1]:
            raise CalibrationError(
                f"{model.name}: has {logits.shape[-1]} logits for each token, and token "
                f"{targets.max()} is in the text: it is the tokenizer of another model, or "
                "the model predicts no tokens"
            )
        reference = None
        if against is not None and floats is not None:
            reference = against.run(window, what)[:-1]
            if reference.shape != logits.shape:
                raise ModelFileError(
                    f"{model.name} has {logits.shape[-1]} logits for each token, "
                    f"{against.name} {reference.shape[-1]}: they have different vocabularies"
                )
        for start in range(0, len(targets), _STRIP):
            rows, log_p = slice(start, start + _STRIP), None
            if reference is not None and floats is not None:
                log_p = _log_softmax(reference[rows])
                floats.add(log_p, targets[rows], None)
            found.add(_log_softmax(logits[rows]), targets[rows], log_p)
    return found, floats


def _check_causal(model: TextModel, ids: Sequence[int]) -> None:
    """Refuse a masked language model, which sees the tokens that it should predict."""
    if model.feeds.length:
        return
    changed = [*ids[:-1], ids[0] if ids[0] != ids[-1] else (ids[-1] + 1) % 4]
    before, after = (model.run(tokens, "a few tokens")[:-1] for tokens in (ids, changed))
    if np.linalg.norm(before - after) > 0.02 * np.linalg.norm(before):
        raise ModelFileError(
            f"{model.name}: what it predicts depends on later tokens, so it is not a causal "
            "language model and has no perplexity"
        )


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shifted: npt.NDArray[np.float32] = logits - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted
