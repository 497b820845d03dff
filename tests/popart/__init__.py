"""Tests of `podrun.popart`: what programs of PopART meet, up to the session's numbers."""
