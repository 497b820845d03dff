"""JSON schemas of what tools print with ``--format json``; ``$defs.row`` of each: a line of ``--format jsonl``."""
