"""``import horovod.popart`` for scripts written for the SDK. Other parts of Horovod are those of an installed one."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
