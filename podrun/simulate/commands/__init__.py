"""``podrun simulate``, ``podrun chaos`` and ``podrun scale``: one verb a file."""
