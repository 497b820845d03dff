"""What ``libscale.so`` computes: the file that PODRUN_CUSTOM_OPS names."""

from podrun.runtime.user_operators import register_user_operator

register_user_operator("libscale.so", lambda x, *, by: by * x)
