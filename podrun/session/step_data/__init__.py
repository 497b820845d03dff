"""What goes into a step and what comes out: `dataflow` (anchors and inputs), `stepio` (the program's arrays and
callbacks), `streams` (transfers without a step)."""
