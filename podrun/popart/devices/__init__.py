"""Devices under PopART's names: what one is (`device`) and who gives them (`device_manager`). The runtime attaches
them.
"""
