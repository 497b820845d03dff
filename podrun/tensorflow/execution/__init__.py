"""Programs on devices: compile, feed, run, and hand variables over between TensorFlow and the IPUs."""
