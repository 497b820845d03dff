"""Devices as programs see them: `device_manager` finds them, `device` is one that a program holds."""
