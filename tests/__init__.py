"""The tests, as a package: test modules import each other's helpers by full name (`from tests.ranks import RankPool`).

Every folder of tests has an `__init__.py`, so that two of them may hold files of the same name, and so that the
ranks of a `RankPool` can import a test module by the name pytest gave it.
"""
