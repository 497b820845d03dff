"""Errors of the runtime as programs expect them: classes of ``tf.errors``, with the SDK's words where it has some."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from podrun.core.errors import PodrunError, PoplarError
from podrun.runtime.feeds import FeedEndedError

ENDED = "Infeed dataset iterator out of range. Are you trying to dequeue more elements than are in the dataset?"


def in_words_of_the_sdk(error: BaseException) -> BaseException:
    """The error that the program sees."""
    if isinstance(error, FeedEndedError):
        return _op_error(tf.errors.OutOfRangeError, ENDED, error)
    if isinstance(error, PoplarError):
        return _op_error(tf.errors.InternalError, f"[Poplar] {error}", error)
    return error


def _op_error(kind: Any, message: str, cause: BaseException) -> BaseException:
    error: BaseException = kind(None, None, message)
    hint = cause.hint if isinstance(cause, PodrunError) else ""
    if hint:
        error.add_note(hint)
    error.__cause__ = cause
    return error
