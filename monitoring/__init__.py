"""The monitor: stores every record, joins outcomes, measures, decides and acts, and hands each row on to the lake.

Pure rooms (`measures`, `drift`, `deciding`) compute; `memory`, `acting`, `showing`, `uploader` touch files, processes
and the network; `monitor` only sequences them. `backtest` feeds the live judge from an archive. Knows the contracts,
storage, logs and charts, and nothing else of this repository.
"""
