# SPDX-License-Identifier: MIT
"""Greedy text generation with a KV cache, on whatever runs the decoder like a session."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
STOP_IDS = (0, 2)  # <|endoftext|>, and <|im_end|>, which ends an answer in a chat

_CACHE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Session(Protocol):
    """The part of onnxruntime.InferenceSession that the decoder needs."""

    def get_inputs(self) -> Sequence[Any]:
        """Returns the inputs, each with a name, a type and a shape."""

    def run(self, output_names: Any, input_feed: Any) -> Sequence[Any]:
        """Returns the named outputs for the arrays of `input_feed`."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `Decoder.greedy` made, and how long it took.

    Attributes:
        tokens: The new tokens, without the prompt and without the stop token.
        prefill_seconds: Time for the whole prompt, which gives the first token.
        step_seconds: Time for each token after the first, the stop token included.
    """

    tokens: list[int]
    prefill_seconds: float
    step_seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed by the median step, or NaN if there was no step."""
        return float(1 / np.median(self.step_seconds)) if self.step_seconds else float("nan")


class Decoder:
    """One sequence on a decoder session; the cache grows with every call.

    Args:
        session: Has the inputs `input_ids`, `position_ids`, `past_key_values.{i}.{key,value}`
            and the outputs `logits`, `present.{i}.{key,value}`.

    Raises:
        ValueError: If the session has other inputs.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        inputs = {value.name: value for value in session.get_inputs()}
        past = [name for name in inputs if name.startswith("past_key_values.")]
        if not past or set(inputs) != {"input_ids", "position_ids", *past}:
            raise ValueError(
                f"the session's inputs are {sorted(inputs)}; a decoder takes input_ids, "
                "position_ids and past_key_values.{i}.{key,value} and nothing else"
            )
        self._past = past
        self._outputs = ["logits", *(n.replace("past_key_values", "present") for n in past)]
        self._empty = {}
        for name in past:
            _, heads, _, width = inputs[name].shape
            self._empty[name] = np.zeros((1, heads, 0, width), _CACHE_TYPES[inputs[name].type])
        self.reset()

    def reset(self) -> None:
        """Forgets the sequence."""
        self._cache: dict[str, npt.NDArray[Any]] = dict(self._empty)
        self.length = 0

    def prefill(self, ids: Sequence[int]) -> npt.NDArray[Any]:
        """Starts a new sequence with `ids`.

        Returns:
            Logits [len(ids), vocab]; row i is about the token after ids[i].

        Raises:
            ValueError: If `ids` is empty.
        """
        if not len(ids):
            raise ValueError("the prompt has no tokens; give at least one")
        self.reset()
        return self._run(ids)

    def step(self, token: int) -> npt.NDArray[Any]:
        """Appends one token to the sequence and returns the logits [vocab] of the next."""
        logits: npt.NDArray[Any] = self._run([token])[-1]
        return logits

    def greedy(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: Collection[int] = STOP_IDS,
    ) -> Generation:
        """Continues a prompt with the likeliest token each time.

        Args:
            prompt_ids: The prompt, at least one token.
            max_new_tokens: Stop after so many.
            stop_ids: Stop before any of these.

        Returns:
            The tokens and the seconds that they took.

        Raises:
            ValueError: If `prompt_ids` is empty.
        """
        start = time.perf_counter()
        token = int(self.prefill(prompt_ids)[-1].argmax())
        prefill_seconds = time.perf_counter() - start
        tokens: list[int] = []
        steps: list[float] = []
        while len(tokens) < max_new_tokens and token not in stop_ids:
            tokens.append(token)
            if len(tokens) < max_new_tokens:  # nobody would look at the last step's token
                start = time.perf_counter()
                token = int(self.step(token).argmax())
                steps.append(time.perf_counter() - start)
        return Generation(tokens, prefill_seconds, steps)

    def _run(self, ids: Sequence[int]) -> npt.NDArray[Any]:
        """Runs `ids` after the cache; returns logits [len(ids), vocab]."""
        end = self.length + len(ids)
        feed = {
            "input_ids": np.asarray([ids], np.int64),
            "position_ids": np.arange(self.length, end, dtype=np.int64)[None],
            **self._cache,
        }
        logits, *present = self._session.run(self._outputs, feed)
        self._cache = dict(zip(self._past, present, strict=True))
        self.length = end
        rows: npt.NDArray[Any] = logits[0]
        return rows


def chat_prompt(question: str, *, system: str = SYSTEM_PROMPT) -> str:
    """Wraps a question in SmolLM2-Instruct's chat template, ready for the answer."""
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def answer(
    session: Session, prompt: Sequence[int], tokens: int, reference: str, make_reference: bool
) -> dict[str, Any]:
    """Runs the prompt, compares its logits with the reference, and generates tokens.

    Args:
        session: The model.
        prompt: Token ids.
        tokens: How many to generate, whatever they are; 0 for none.
        reference: Path of the reference logits, .npy.
        make_reference: Whether these logits are the reference.

    Returns:
        ``tokens``, ``step_milliseconds`` (the median after the first, or None) and
        ``difference``, the greatest one of the logits over the greatest reference.
    """
    decoder = Decoder(session)
    logits = decoder.prefill(prompt)
    if make_reference:
        np.save(reference, logits)
    expected = np.load(reference)
    found: list[int] = []
    step = None
    if tokens:
        generation = decoder.greedy(prompt, tokens, stop_ids=())
        found = list(map(int, generation.tokens))
        step = 1e3 * float(np.median(generation.step_seconds))
    difference = float(abs(logits - expected).max() / abs(expected).max())
    return {"tokens": found, "step_milliseconds": step, "difference": difference}
