"""The workers of one training step on this machine, as `torchrun --standalone` starts them; and how their end is told.

A step that finds itself started by torchrun, as by a TrainJob's on several machines, is a worker already and starts
none. What a worker does is `engine`'s.
"""

import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence

from evergreen.runtime.errors import Preempted, TemporaryError


def is_worker() -> bool:
    """Whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def is_leader() -> bool:
    """Whether this worker runs the step; the others do what it says."""
    return os.environ["RANK"] == "0"


def run_workers(arguments: Sequence[str], processes: int) -> int:
    """Runs `python -m components.training` with these flags in so many processes; the exit code of the first to fail.

    A worker that ends with an error has told it itself.

    Raises:
        TemporaryError: a worker was killed.
        Preempted: SIGTERM came; the workers were told, and had 30 seconds to save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # All of them are here: nothing has to be reached from outside.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    # torchrun's own stay otherwise.
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in signals}
    try:
        elastic_launch(config, sys.executable)("-m", "components.training", *arguments)
    except SignalException as error:
        raise Preempted(f"{error.sigval.name} came: the workers were told to save; the same command goes on") from error
    except ChildFailedError as error:
        # The others, ended by SIGTERM, may be among them.
        for rank, failure in sorted(error.failures.items(), key=lambda each: each[1].exitcode == -signal.SIGTERM):
            if failure.exitcode < 0:
                raise TemporaryError(
                    f"worker {rank} of {processes} was killed by {failure.signal_name()}, and the others were ended; "
                    "the same command goes on from the last save, with any number of processes"
                ) from error
        return int(min(error.failures.items())[1].exitcode)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0
