"""The monitor: joins clicks to predictions, watches AUC, archives every row and asks for a retraining run on drift.

Pure modules (`join`, `window`, `kpis`, `policy`) compute and decide; the others touch a file, a process or the
network; `monitor` only sequences them. Knows `components.contracts` and nothing else of this repository.
"""
