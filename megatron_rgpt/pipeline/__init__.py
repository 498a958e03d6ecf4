"""The looped pipeline: placement and schedule (pure), and the engine that runs a stage's program."""
