"""Which trigger the settings name. What every trigger promises is `monitoring.acting.trigger`'s."""

from __future__ import annotations

from monitoring.acting.trigger import Trigger
from monitoring.settings import MonitorSettings


def make_trigger(settings: MonitorSettings) -> Trigger | None:
    """The trigger that the settings name; None where the monitor only notifies."""
    if settings.trigger == "local":
        from monitoring.acting.local_trigger import LocalTrigger

        return LocalTrigger(settings.state, settings.store, settings.run_command)
    if settings.trigger == "kubeflow":
        from monitoring.acting.kubeflow_trigger import KubeflowTrigger

        return KubeflowTrigger.connect(settings)
    return None
