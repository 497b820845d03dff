"""Tests of `podrun.runtime`, most of them through a front end of their own (`tests.runtime.tiny`)."""
