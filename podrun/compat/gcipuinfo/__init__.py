"""``import gcipuinfo`` for scripts written for the SDK: `podrun.monitor.gcipuinfo`, label constants included."""

from podrun.monitor import gcipuinfo as _gcipuinfo

globals().update({name: value for name, value in vars(_gcipuinfo).items() if not name.startswith("_")})
