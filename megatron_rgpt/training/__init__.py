"""The main job: engine, optimizer, loop, evaluation, logs."""
