"""Start the workers of one training step on this machine, as `torchrun --standalone` does.

If torchrun itself started the step, the step is already a worker and starts no further workers.
This is the case in a TrainJob on several machines. `engine` has the code of a worker.
"""

import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence

from evergreen.runtime.errors import Preempted, TemporaryError
from evergreen.runtime.exit_codes import ExitCode


def is_worker() -> bool:
    """Return whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def is_leader() -> bool:
    """Return whether this worker runs the step.

    The other workers execute the calls of this worker.
    """
    return os.environ["RANK"] == "0"


def run_workers(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m components.training` in several processes.

    Returns 0, or the exit code of the first worker that failed. The failed worker has already
    reported its error.

    Args:
        arguments: Flags of the step.
        processes: Number of processes.

    Raises:
        TemporaryError: a worker was killed.
        Preempted: SIGTERM arrived. The workers were signalled and had 30 seconds to save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # All workers are on this machine, so no other network interface is needed.
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
    # torchrun does not restore the signal handlers.
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in signals}
    try:
        elastic_launch(config, sys.executable)("-m", "components.training", *arguments)
    except SignalException as error:
        raise Preempted(
            f"{error.sigval.name} arrived, and the workers were asked to save; the same command "
            "continues"
        ) from error
    except ChildFailedError as error:
        # Workers that ended by SIGTERM are sorted last, because another worker had failed before.
        for rank, failure in sorted(
            error.failures.items(), key=lambda each: each[1].exitcode == -signal.SIGTERM
        ):
            if failure.exitcode < 0:
                raise TemporaryError(
                    f"worker {rank} of {processes} was killed by {failure.signal_name()}, and the "
                    "others were stopped; the same command continues from the last save, with "
                    "any number of processes"
                ) from error
        # If another worker fails, the leader receives SIGTERM and ends as preempted. The failure of
        # the other worker is the cause.
        _, first = min(
            error.failures.items(),
            key=lambda each: (each[1].exitcode == ExitCode.PREEMPTED, each[0]),
        )
        return int(first.exitcode)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0
