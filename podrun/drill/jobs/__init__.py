"""Programs that run in drills. They are started by ``podrun``, and know nothing of the drill."""
