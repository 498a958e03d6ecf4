"""The data house: from users' files to token batches.

It may know randomness, config and errors, and nothing of torch, of process groups or of the model: every
rank works from the files alone. `datasets` is the door for training, `preprocess` the one for making files.
"""
