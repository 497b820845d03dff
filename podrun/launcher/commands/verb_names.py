"""The names of podrun's verbs."""

RECORD_VERBS = ("replay", "shrink", "diff", "incidents")
UPKEEP_VERBS = ("doctor", "cache", "ps", "stop")
SIMULATION_VERBS = ("simulate", "chaos", "scale")
SERVING_VERBS = ("serve", "capacity", "load")
MONITOR_VERBS = ("top", "record", "health", "exporter", "dashboards", "schema", "drill", "trace")
VERBS = (
    *("profile", "estimate", "compat", "faults", "inject", *RECORD_VERBS, *UPKEEP_VERBS),
    *SIMULATION_VERBS,
    *SERVING_VERBS,
    *MONITOR_VERBS,
    *("completion", "help"),
)
"""Verbs. ``podrun -- profile`` runs a program of that name instead."""
