"""What a user did wrong, said in one line.

`UserError` is raised for bad input: a flag and its value, a file and its byte, and what to do. Commands
wrap their work in `exit_on_user_error`, which prints the line and leaves with exit code 2 and no stack
trace. A fault of ours is never a `UserError`: it keeps its stack trace.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

USER_ERROR_EXIT_CODE = 2
QUIET_SECONDS = 10


class UserError(ValueError):
    """Bad input. The message is one line that names the thing, its value and what to do."""


@contextmanager
def exit_on_user_error(*, quiet: bool = False) -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2.

    `quiet` is for ranks whose error another rank reports: they leave without a word, after it.
    """
    try:
        yield
    except UserError as error:
        if quiet:
            # a launcher ends all ranks when the first one leaves, so give the one that reports time to do it
            time.sleep(QUIET_SECONDS)
        else:
            print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
        # Other ranks may be blocked in a collective: leave without waiting for process groups to end.
        if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
            os._exit(USER_ERROR_EXIT_CODE)
        raise SystemExit(USER_ERROR_EXIT_CODE) from None
