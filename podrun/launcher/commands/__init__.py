"""The verbs of ``podrun``, one a file. `podrun.launcher.cli` imports the one that is asked for."""
