"""What a user did wrong, said in one line.

`UserError` is raised for bad input: a flag and its value, a file and its byte, and what to do. Commands
wrap their work in `exit_on_user_error`, which prints the line and leaves with exit code 2 and no stack
trace. A fault of ours is never a `UserError`: it keeps its stack trace.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

USER_ERROR_EXIT_CODE = 2


class UserError(ValueError):
    """Bad input. The message is one line that names the thing, its value and what to do."""


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2."""
    try:
        yield
    except UserError as error:
        line = " ".join(str(error).split())
        print(f"error: {line}", file=sys.stderr, flush=True)
        # The other ranks may be blocked in a collective: leave at once, without waiting for process groups.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os._exit(USER_ERROR_EXIT_CODE)
        raise SystemExit(USER_ERROR_EXIT_CODE) from None
