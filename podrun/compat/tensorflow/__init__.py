"""``import tensorflow`` for programs written for the SDK: the real package takes this folder's place."""

from podrun.compat._tensorflow import serve_tensorflow as _serve

_serve()
