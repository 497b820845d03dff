"""Verbs of ``podrun`` that look at a POD: `health`, `exporter`, `dashboards`. One file a verb."""
