"""The monitor: joins records with outcomes, archives rows, decides when to retrain.

`metrics`, `drift` and `policies` only compute. `state`, `retraining`, `web` and `uploader` access
files, processes and the network. The module `monitor` calls the other parts in order. `backtest`
applies the same policies to an archive. The package imports `evergreen` and nothing else of this
repository.
"""
